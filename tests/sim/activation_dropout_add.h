#pragma once
#include "dtypes.h"
#include "harness.h"
#include "kernels/activation/activation.h"
#include "kernels/activation/activation_config.h"
#include "sim/sparse_memory.h"

// The sim tests of dropout_add, against the mask's definition. The other paths of the elementwise body are those of the
// gated activations.
namespace warpsmith::test::dropout_add {

struct Seed {
  int64_t words[2];
};

inline bool keeps(const Seed& seed, int64_t element, uint32_t threshold) {
  const PhiloxCounter lanes = dropout_lanes(static_cast<uint64_t>(seed.words[0]), static_cast<uint64_t>(seed.words[1]),
                                            static_cast<uint64_t>(element / 8));
  return dropout_keeps(lanes, static_cast<int>(element % 8), threshold);
}

struct Shape {
  int64_t rows, columns;
  int64_t padding = 0;
  Offsets offset = {};
  double p = 0.3;
};

template <class T> void run(const Shape& s, uint64_t data = 1) {
  const Seed seed{{static_cast<int64_t>(data * 0x9e3779b97f4a7c15ull), -static_cast<int64_t>(data)}};
  const Dropout dropout = make_dropout(seed.words, s.p);
  const int64_t stride = s.columns + s.padding, unit = s.rows * s.columns * static_cast<int64_t>(sizeof(T));
  Buffer<T> x(static_cast<size_t>(s.rows * stride), s.offset[0]), residual(x.size(), s.offset[1]);
  Buffer<T> y(static_cast<size_t>(s.rows * s.columns), s.offset[2]), dx(y.size(), s.offset[3]);
  fill_normal(x, data);
  fill_normal(residual, data + 1);
  std::vector<double> want_y(y.size()), want_dx(y.size()), want_sum(y.size());
  for (int64_t r = 0; r < s.rows; ++r)
    for (int64_t c = 0; c < s.columns; ++c) {
      const size_t from = static_cast<size_t>(r * stride + c), to = static_cast<size_t>(r * s.columns + c);
      const double kept = keeps(seed, r * s.columns + c, dropout.threshold) ? dropout.scale : 0;
      const double value = static_cast<double>(to_float(x[from])), base = static_cast<double>(to_float(residual[from]));
      want_y[to] = base + kept * value;
      want_dx[to] = kept * value;
      want_sum[to] = base + value;
    }
  const Tolerance rounding{.ulps = 0.51, .relative = 1e-6, .absolute = 1e-6};
  // Of threads with vectors, and of elements of the last vector, one by one.
  const auto seeds_read = [&](bool aligned) {
    aligned = aligned && (s.padding == 0 || stride * static_cast<int64_t>(sizeof(T)) % 16 == 0);
    const ElementwiseConfig c =
        choose_elementwise({s.rows, s.columns, static_cast<int>(sizeof(T)), s.padding == 0, aligned});
    return 16 * (s.rows * s.columns / c.vector_elems + (c.flat ? s.rows * s.columns % c.vector_elems : 0));
  };
  const int64_t forward_seeds = seeds_read(!s.offset[0] && !s.offset[1] && !s.offset[2]);
  const int64_t backward_seeds = seeds_read(!s.offset[0] && !s.offset[3]);
  under_every_seed([&] {
    y.poison(), dx.poison();
    DropoutAddFwdParams f{x.data(), residual.data(), y.data(), dropout, s.rows, s.columns, stride, stride, kDtype<T>};
    expect_ok(dropout_add_forward_cuda(f, nullptr));
    expect_bytes({.read = 2 * unit + forward_seeds, .written = unit});
    expect_close("y", y, want_y, rounding);
    same_bits_for_every_seed("y", y);
    sim::counters() = {};
    expect_ok(dropout_add_backward_cuda({x.data(), dx.data(), dropout, s.rows, s.columns, stride, kDtype<T>}, nullptr));
    expect_bytes({.read = unit + backward_seeds, .written = unit});
    expect_close("dx", dx, want_dx, rounding);
    for (size_t i = 0; i < dx.size(); ++i)
      if (want_dx[i] == 0) expect(to_float(dx[i]) == 0, "a dropped element is exactly 0");
    f.dropout.seed = nullptr;
    expect_ok(dropout_add_forward_cuda(f, nullptr));
    expect_close("y without dropout", y, want_sum, rounding);
  });
}

TEST(dropout_add_every_path_and_its_bytes) {
  run<bfloat16>({.rows = 3, .columns = 1032});
  run<bfloat16>({.rows = 3, .columns = 33});
  run<float16>({.rows = 2, .columns = 264});
  run<float>({.rows = 2, .columns = 514});
  run<bfloat16>({.rows = 5, .columns = 64, .padding = 8});
  run<float16>({.rows = 5, .columns = 63, .padding = 3});
  run<float>({.rows = 5, .columns = 60, .padding = 4});
  run<float>({.rows = 5, .columns = 61, .padding = 4, .offset = 3});
  for (int argument = 0; argument < 4; ++argument)
    run<bfloat16>({.rows = 3, .columns = 64, .offset = Offsets::only(argument)});
}

TEST(dropout_add_probabilities) {
  for (const double p : {0.0, 1e-6, 0.5, 0.999, 1.0}) run<bfloat16>({.rows = 3, .columns = 136, .p = p});
}

// The last elements of a tensor of more than 2^35: the call's index needs more than 32 bits.
TEST(dropout_add_beyond_2_32_calls) {
  constexpr int64_t kBlock = ElementwiseConfig{}.threads * 8, kFirst = (int64_t{1} << 35) + 3 * kBlock,
                    kElements = kFirst + 21;
  const Seed seed{{5, 6}};
  const Dropout dropout = make_dropout(seed.words, 0.5);
  sim::SparseMemory<bfloat16> dy(kElements), dx(kElements);
  for (int64_t e = kFirst; e < kElements; ++e) dy[static_cast<size_t>(e)] = from_float<bfloat16>(1.0f);
  sim::options().block_filter = [](uint3 block) { return block.x == kFirst / kBlock; };
  expect_ok(
      dropout_add_backward_cuda({dy.data(), dx.data(), dropout, 1, kElements, kElements, Dtype::bfloat16}, nullptr));
  for (int64_t e = kFirst; e < kElements; ++e)
    expect_equal("dx", to_float(dx[static_cast<size_t>(e)]), keeps(seed, e, dropout.threshold) ? 2.0f : 0.0f);
  sim::options().block_filter = {};
}

TEST(dropout_add_refuses_float64) {
  Buffer<float> x(4), y(4);
  const Dropout none = make_dropout(nullptr, 0);
  expect_refused(dropout_add_forward_cuda({x.data(), x.data(), y.data(), none, 1, 4, 4, 4, Dtype::float64}, nullptr),
                 "float64");
  expect_refused(dropout_add_backward_cuda({x.data(), y.data(), none, 1, 4, 4, Dtype::float64}, nullptr), "float64");
}

RANDOM_TEST(dropout_add_random_problems) {
  Shape s{.rows = random.size(1, 20), .columns = random.size(1, 300)};
  s.padding = random.choice<int64_t>({0, 8, 1});
  s.offset = Offsets::draw(random, 4);
  s.p = random.choice<double>({0.5, 0.1, 0.9});
  if (s.rows == 1) s.padding = 0;
  const int64_t kind = random.integer(0, 2);
  const uint64_t data = random.bits() % 1000;
  if (kind == 0) return run<bfloat16>(s, data);
  if (kind == 1) return run<float>(s, data);
  run<float16>(s, data);
}

}  // namespace warpsmith::test::dropout_add
