// What a linear cross-entropy does to its gradients in the backward, on the host: every pair of dtypes, in place and
// not, and the sum into a caller's float32 buffer.
#include "harness.h"
#include "kernels/linear_loss/linear_cross_entropy.h"
#include "kernels/linear_loss/linear_cross_entropy_config.h"
#include "sim/sparse_memory.h"

namespace warpsmith::test {
namespace {

template <class T> constexpr Dtype kDtype = Dtype::float32;
template <> constexpr Dtype kDtype<float16> = Dtype::float16;
template <> constexpr Dtype kDtype<bfloat16> = Dtype::bfloat16;

struct Factors {
  float factor = 1;
  float denominator = 1;
  bool divides = false;
  double value() const {
    return divides && denominator != 0 ? static_cast<double>(factor / denominator) : static_cast<double>(factor);
  }
};

template <class In, class Out> struct Problem {
  size_t count;
  Factors f;
  Buffer<In> x, before;
  Buffer<Out> out;
  Buffer<float> sum, sum_before, factor, denominator;

  Problem(size_t n, const Factors& factors, size_t offset = 0)
      : count(n),
        f(factors),
        x(n, offset),
        before(n),
        out(n, offset),
        sum(n, offset),
        sum_before(n),
        factor(1),
        denominator(1) {
    fill_normal(before, 5);
    fill_normal(sum_before, 6);
    factor[0] = f.factor;
    denominator[0] = f.denominator;
  }

  LinearFinishParams params() {
    restore();
    return {x.data(),
            out.data(),
            nullptr,
            factor.data(),
            f.divides ? denominator.data() : nullptr,
            static_cast<int64_t>(count),
            kDtype<In>,
            kDtype<Out>};
  }

  void restore() {
    std::memcpy(static_cast<void*>(x.data()), before.data(), count * sizeof(In));
    std::memcpy(static_cast<void*>(sum.data()), sum_before.data(), count * sizeof(float));
    out.poison();
  }

  std::vector<double> scaled() const {
    std::vector<double> want(count);
    for (size_t i = 0; i < count; ++i) want[i] = static_cast<double>(to_float(before[i])) * f.value();
    return want;
  }

  void check_out_of_place() {
    under_every_seed([&] {
      expect_ok(linear_finish_cuda(params(), nullptr));
      expect_close("out", out, scaled(), {.ulps = 0.51, .relative = 2e-7, .absolute = 3.1e-8});
      same_bits_for_every_seed("out", out);
      same_bits_for_every_seed("x", x);
    });
  }

  void check_in_place() {
    under_every_seed([&] {
      LinearFinishParams p = params();
      p.out = p.x;
      p.out_dtype = p.dtype;
      expect_ok(linear_finish_cuda(p, nullptr));
      expect_close("x", x, scaled(), {.ulps = 0.51, .relative = 2e-7, .absolute = 3.1e-8});
      same_bits_for_every_seed("x", x);
    });
  }

  void check_sum() {
    std::vector<double> want = scaled();
    for (size_t i = 0; i < count; ++i) want[i] += static_cast<double>(sum_before[i]);
    const std::vector<double> zeros(count, 0.0);
    under_every_seed([&] {
      LinearFinishParams p = params();
      p.out = nullptr;
      p.out_dtype = p.dtype;
      p.sum = sum.data();
      expect_ok(linear_finish_cuda(p, nullptr));
      expect_close("sum", sum, want, {.ulps = 1, .relative = 2e-7, .absolute = 1e-6});
      expect_close("x", x, zeros, {});
      same_bits_for_every_seed("sum", sum);
    });
  }
};

// A machine or a filter of blocks for one test.
struct Machine {
  sim::Options before = sim::options();
  explicit Machine(int multiprocessors) { sim::options().properties.multiprocessors = multiprocessors; }
  ~Machine() { sim::options() = before; }
};

template <class In, class Out> void check_sizes() {
  for (const size_t count : {size_t{1}, size_t{7}, size_t{8}, size_t{2049}, size_t{70'000}})
    Problem<In, Out>(count, {.factor = 1.75f}).check_out_of_place();
}

TEST(every_pair_of_dtypes) {
  check_sizes<float, float>();
  check_sizes<float, float16>();
  check_sizes<float, bfloat16>();
  check_sizes<float16, float16>();
  check_sizes<bfloat16, bfloat16>();
}

TEST(in_place) {
  Problem<float, float>(3001, {.factor = -0.5f}).check_in_place();
  Problem<float16, float16>(3001, {.factor = 2}).check_in_place();
  Problem<bfloat16, bfloat16>(3001, {.factor = 3}).check_in_place();
}

TEST(into_a_sum) {
  for (const size_t count : {size_t{1}, size_t{9}, size_t{5000}}) {
    Problem<float, float>(count, {.factor = 1}).check_sum();
    Problem<float16, float16>(count, {.factor = 0.25f, .denominator = 3, .divides = true}).check_sum();
    Problem<bfloat16, bfloat16>(count, {.factor = 7}).check_sum();
  }
}

TEST(misaligned_tensors) {
  Problem<bfloat16, bfloat16>(1000, {.factor = 3}, 1).check_in_place();
  Problem<float, float16>(1000, {.factor = 3}, 1).check_out_of_place();
  Problem<float, float>(1000, {.factor = 3}, 3).check_sum();
}

// One of two tensors alone lies off 16 bytes.
TEST(one_misaligned_tensor) {
  Problem<float, bfloat16> p(1000, {.factor = 3});
  Buffer<bfloat16> out(1000, 1);
  Buffer<float> sum(1000, 1);
  under_every_seed([&] {
    LinearFinishParams to_out = p.params();
    to_out.out = out.data();
    expect_ok(linear_finish_cuda(to_out, nullptr));
    expect_close("out", out, p.scaled(), {.ulps = 0.51, .relative = 2e-7, .absolute = 3.1e-8});
    LinearFinishParams to_sum = p.params();
    std::memset(static_cast<void*>(sum.data()), 0, sum.size() * sizeof(float));
    to_sum.sum = sum.data();
    to_sum.out = nullptr;
    to_sum.out_dtype = to_sum.dtype;
    expect_ok(linear_finish_cuda(to_sum, nullptr));
    expect_close("sum", sum, p.scaled(), {.relative = 2e-7});
  });
}

LinearLossChunks chunks(int64_t rows, int64_t classes, int element_bytes, int64_t limit, bool cuda = true) {
  return choose_linear_loss_chunks({rows, classes, element_bytes, limit, cuda});
}

TEST(chunks_of_rows) {
  const LinearLossChunks one = chunks(4096, 128256, 2, 0);
  expect_equal("chunks", one.chunks, int64_t{1});
  expect_equal("bytes", one.logits_bytes, int64_t{4096} * 128256 * 2);
  const LinearLossChunks four = chunks(4096, 128256, 2, int64_t{1024} * 128256 * 2);
  expect_equal("chunks", four.chunks, int64_t{4});
  expect_equal("rows", four.chunk_rows, int64_t{1024});
  expect_equal("bytes", four.logits_bytes, int64_t{1024} * 128256 * 2);
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

TEST(denominators) {
  Problem<float16, float16>(100, {.factor = 65536, .denominator = 4000, .divides = true}).check_in_place();
  Problem<float, float>(100, {.factor = 2, .denominator = 0, .divides = true}).check_out_of_place();
}

// More blocks than the grid may have: the loop goes round several times.
TEST(a_small_machine) {
  const Machine small(1);
  Problem<bfloat16, bfloat16>(100'003, {.factor = 3}).check_in_place();
  Problem<float, bfloat16>(100'003, {.factor = 3}).check_out_of_place();
  Problem<bfloat16, bfloat16>(40'003, {.factor = 3}).check_sum();
}

// A factor of 1 costs a read of the factor by each thread, and no element.
TEST(bytes_moved) {
  constexpr int64_t kCount = 8192, kThreads = kCount / 8;
  Problem<bfloat16, bfloat16> p(kCount, {.factor = 3});
  Problem<float, bfloat16> cast(kCount, {.factor = 3});
  under_every_seed([&] {
    LinearFinishParams in_place = p.params();
    in_place.out = in_place.x;
    expect_ok(linear_finish_cuda(in_place, nullptr));
    expect_bytes({.read = kCount * 2 + kThreads * 4, .written = kCount * 2});

    sim::counters() = {};
    p.factor[0] = 1;
    expect_ok(linear_finish_cuda(in_place, nullptr));
    expect_bytes({.read = kThreads * 4, .written = 0});
    p.factor[0] = 3;

    sim::counters() = {};
    LinearFinishParams sum = p.params();
    sum.sum = p.sum.data();
    sum.out = nullptr;
    expect_ok(linear_finish_cuda(sum, nullptr));
    expect_bytes({.read = kCount * 6 + kThreads * 4, .written = kCount * 6});

    sim::counters() = {};
    expect_ok(linear_finish_cuda(cast.params(), nullptr));
    expect_bytes({.read = kCount * 4 + kThreads * 4, .written = kCount * 2});
  });
}

TEST(nothing_to_do) {
  LinearFinishParams p = Problem<float, float>(1, {}).params();
  p.count = 0;
  expect_ok(linear_finish_cuda(p, nullptr));
}

TEST(pairs_without_a_kernel_are_refused) {
  LinearFinishParams p = Problem<float, float>(1, {}).params();
  p.dtype = Dtype::float16;
  expect_refused(linear_finish_cuda(p, nullptr), "from float16 to float32");
  p.dtype = p.out_dtype = Dtype::float64;
  expect_refused(linear_finish_cuda(p, nullptr), "from float64 to float64");
  p.dtype = Dtype::float32;
  expect_refused(linear_finish_cuda(p, nullptr), "from float32 to float64");
}

// The last of more than 2^31 elements, in memory that is never touched but for the end: one block runs of them all.
TEST(beyond_2_31_elements) {
  constexpr int64_t kCount = (int64_t{1} << 31) + 4096;
  sim::SparseMemory<bfloat16> x(kCount);
  Buffer<float> factor(1);
  factor[0] = 2;
  const Machine large(static_cast<int>(kCount / (256 * 8 * 8)) + 1);
  sim::options().block_filter = [](uint3 block) { return block.x == kCount / (256 * 8) - 1; };
  const int64_t last = kCount - 1;
  under_every_seed([&] {
    x.data()[last] = from_float<bfloat16>(1.5f);
    expect_ok(linear_finish_cuda(
        {x.data(), x.data(), nullptr, factor.data(), nullptr, kCount, Dtype::bfloat16, Dtype::bfloat16}, nullptr));
    expect_equal("last element", to_float(x.data()[last]), 3.0f);
  });
}

template <class In, class Out> void run_random(Random& random) {
  const Factors f{.factor = static_cast<float>(random.integer(-3, 3)),
                  .denominator = static_cast<float>(random.integer(0, 9)),
                  .divides = random.coin()};
  Problem<In, Out> p(static_cast<size_t>(random.size(1, 30'000)), f,
                     static_cast<size_t>(random.choice<int64_t>({0, 1})));
  const Machine machine(static_cast<int>(random.integer(1, 3)));
  switch (random.integer(0, 2)) {
    case 0: return p.check_out_of_place();
    case 1: return p.check_in_place();
    default: return p.check_sum();
  }
}

RANDOM_TEST(random_problems) {
  switch (random.integer(0, 3)) {
    case 0: return run_random<float, float>(random);
    case 1: return run_random<bfloat16, bfloat16>(random);
    case 2: return run_random<float16, float16>(random);
    default: {
      Problem<float, bfloat16>(static_cast<size_t>(random.size(1, 30'000)), {.factor = 1}).check_out_of_place();
      return;
    }
  }
}

}  // namespace
}  // namespace warpsmith::test
