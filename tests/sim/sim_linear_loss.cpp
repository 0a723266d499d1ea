// What Python's tests do not ask of the linear losses' kernels: the plan of chunks, tensors beyond 2^31 elements, and
// what launchers refuse.
#include "harness.h"
#include "kernels/linear_loss/linear_loss.h"
#include "kernels/linear_loss/linear_loss_config.h"
#include "sim/sparse_memory.h"

namespace warpsmith::test {
namespace {

LinearLossChunks chunks(int64_t rows, int64_t classes, int element_bytes, int64_t limit, bool cuda = true) {
  return choose_linear_loss_chunks({rows, classes, element_bytes, limit, cuda});
}

TEST(chunks_of_rows) {
  expect_equal("bytes", chunks(4096, 128256, 2, 0).logits_bytes, int64_t{4096} * 128256 * 2);
  const LinearLossChunks odd = chunks(1000, 50257, 4, 300 * 50260 * 4, false);
  expect_equal("stride", odd.logits_stride, int64_t{50260});
  expect_equal("chunks", odd.chunks, int64_t{4});
  expect_equal("rows", odd.chunk_rows, int64_t{256});
  expect_equal("a vector's stride", chunks(1, 8, 2, 0).logits_stride, int64_t{8});
  expect_equal("no whole tile", chunks(300, 1000, 2, 110 * 2000).chunk_rows, int64_t{100});
  expect_equal("the limit itself", chunks(128, 1000, 2, 128 * 2000).chunks, int64_t{1});
  expect_equal("less than a row", chunks(5, 1000, 2, 1).chunks, int64_t{5});
  expect_equal("no rows", chunks(0, 1000, 2, 0).chunks, int64_t{0});
  expect_equal("the default of a CPU", chunks(40'000, 1000, 2, 0, false).chunks, int64_t{2});
  expect_equal("the default of CUDA", chunks(40'000, 1000, 2, 0).chunks, int64_t{1});
}

RANDOM_TEST(chunks_of_any_problem) {
  const int64_t rows = random.size(0, 100'000), classes = random.size(1, 300'000), bytes = random.choice({2, 4});
  const int64_t limit = random.size(1, 1 << 30);
  const LinearLossChunks c = chunks(rows, classes, static_cast<int>(bytes), limit, random.coin());
  expect(c.chunks * c.chunk_rows >= rows && (c.chunks - 1) * c.chunk_rows < std::max<int64_t>(rows, 1), "all rows");
  expect(c.logits_stride >= classes && c.logits_stride * bytes % 16 == 0, "whole vectors");
  expect(rows == 0 || c.chunk_rows == 1 || c.chunk_rows * c.logits_stride * bytes <= limit, "within the limit");
}

TEST(finish_pairs_without_a_kernel_are_refused) {
  Buffer<float> one(1);
  LinearFinishParams p{one.data(), one.data(), nullptr, one.data(), nullptr, 1, Dtype::float16, Dtype::float32};
  expect_refused(linear_finish_cuda(p, nullptr), "from float16 to float32");
  p.dtype = p.out_dtype = Dtype::float64;
  expect_refused(linear_finish_cuda(p, nullptr), "from float64 to float64");
  p.dtype = Dtype::float32;
  expect_refused(linear_finish_cuda(p, nullptr), "from float32 to float64");
}

// The last of more than 2^31 elements, in memory that is never touched but for the end: one block runs of them all.
TEST(finish_beyond_2_31_elements) {
  constexpr int64_t kCount = (int64_t{1} << 31) + 4096;
  sim::SparseMemory<bfloat16> x(kCount), out(kCount);
  sim::SparseMemory<float> wide(kCount), sum(kCount);
  Buffer<float> factor(1);
  factor[0] = 2;
  const sim::Options before = sim::options();
  sim::options().properties.multiprocessors = static_cast<int>(kCount / (256 * 8 * 8)) + 1;
  sim::options().block_filter = [](uint3 block) { return block.x == kCount / (256 * 8) - 1; };
  const int64_t last = kCount - 1;
  under_every_seed([&] {
    x.data()[last] = from_float<bfloat16>(1.5f);
    expect_ok(linear_finish_cuda(
        {x.data(), x.data(), nullptr, factor.data(), nullptr, kCount, Dtype::bfloat16, Dtype::bfloat16}, nullptr));
    expect_equal("last element", to_float(x.data()[last]), 3.0f);
    wide[last] = 1.5f, sum[last] = 1;
    expect_ok(linear_finish_cuda(
        {wide.data(), out.data(), nullptr, factor.data(), nullptr, kCount, Dtype::float32, Dtype::bfloat16}, nullptr));
    expect_equal("last element of another dtype", to_float(out[last]), 3.0f);
    expect_ok(linear_finish_cuda(
        {x.data(), nullptr, sum.data(), factor.data(), nullptr, kCount, Dtype::bfloat16, Dtype::bfloat16}, nullptr));
    expect_equal("last element of the sum", sum[last], 7.0f);
  });
  sim::options() = before;
}

}  // namespace
}  // namespace warpsmith::test
