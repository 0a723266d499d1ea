// What Python's tests do not ask of the activations' kernels: last blocks of rows that lie along two dimensions of a
// grid, and calls of Philox beyond 2^32.
// links: csrc/kernels/activation/biased.cu
// links: csrc/kernels/activation/unary.cu
#include "far.h"
#include "harness.h"
#include "kernels/activation/activation.h"
#include "kernels/activation/activation_config.h"

namespace warpsmith::test {
namespace {

// The last rows of contiguous tensors of more than 2^31 elements have the bits of the same rows alone.
TEST(far_rows_of_biased_activations) {
  for (const int64_t columns : {8192, 8191}) {
    constexpr int64_t kRows = 3, kMostAlongY = 65535;  // of the grid's rows of blocks
    const size_t elements = static_cast<size_t>(kRows * columns);
    Buffer<bfloat16> x(elements), dy(elements), y(elements), dx(elements), y_far(elements), dx_far(elements);
    Buffer<bfloat16> bias(static_cast<size_t>(columns));
    fill_normal(x, 1, 2.0f), fill_normal(dy, 2), fill_normal(bias, 3);
    const auto run = [&](const bfloat16* inputs, const bfloat16* upstream, bfloat16* out, bfloat16* gradient,
                         int64_t rows) {
      constexpr Dtype kType = Dtype::bfloat16;
      expect_ok(biased_forward_cuda(Biased::bias_silu,
                                    {inputs, bias.data(), out, rows, columns, columns, false, kType, kType}, nullptr));
      const BiasedBwdParams p{upstream, inputs,  bias.data(), gradient, nullptr, nullptr, rows,
                              columns,  columns, columns,     false,    kType,   kType};
      expect_ok(biased_backward_cuda(Biased::bias_silu, p, nullptr));
    };
    run(x.data(), dy.data(), y.data(), dx.data(), kRows);
    const int64_t first = first_far_row(columns, kRows, kMostAlongY);
    Far<bfloat16> far_x(x, first, columns), far_dy(dy, first, columns);
    Far<bfloat16> far_y(y_far, first, columns), far_dx(dx_far, first, columns);
    const FarMachine machine(uint3{0, kRows, 1});
    under_every_seed([&] {
      far_y.poison(), far_dx.poison();
      run(far_x.data(), far_dy.data(), far_y.data(), far_dx.data(), first + kRows);
      far_y.fetch(), far_dx.fetch();
      expect(std::memcmp(y.data(), y_far.data(), elements * 2) == 0, "y has other bits");
      expect(std::memcmp(dx.data(), dx_far.data(), elements * 2) == 0, "dx has other bits");
    });
  }
}

// The last elements of a tensor of more than 2^35: the call's index needs more than 32 bits.
TEST(dropout_add_beyond_2_32_calls) {
  constexpr int64_t kBlock = ElementwiseConfig{}.threads * 8, kFirst = (int64_t{1} << 35) + 3 * kBlock,
                    kElements = kFirst + 21;
  const int64_t seed[] = {5, 6};
  const Dropout dropout = make_dropout(seed, 0.5);
  sim::SparseMemory<bfloat16> dy(kElements), dx(kElements);
  for (int64_t e = kFirst; e < kElements; ++e) dy[static_cast<size_t>(e)] = from_float<bfloat16>(1.0f);
  sim::options().block_filter = [](uint3 block) { return block.x == kFirst / kBlock; };
  expect_ok(
      dropout_add_backward_cuda({dy.data(), dx.data(), dropout, 1, kElements, kElements, Dtype::bfloat16}, nullptr));
  for (int64_t e = kFirst; e < kElements; ++e) {
    const PhiloxCounter lanes = dropout_lanes(5, 6, static_cast<uint64_t>(e / 8));
    const bool kept = dropout_keeps(lanes, static_cast<int>(e % 8), dropout.threshold);
    expect_equal("dx", to_float(dx[static_cast<size_t>(e)]), kept ? 2.0f : 0.0f);
  }
  sim::options().block_filter = {};
}

}  // namespace
}  // namespace warpsmith::test
