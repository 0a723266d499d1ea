// The relu_squared kernels on the host, against the formula in double precision. The paths of the elementwise body are
// those of sim_swiglu.cpp.
#include "harness.h"
#include "kernels/activation/relu_squared.h"

namespace warpsmith::test {
namespace {

template <class T> constexpr Dtype kDtype = Dtype::float32;
template <> constexpr Dtype kDtype<float16> = Dtype::float16;
template <> constexpr Dtype kDtype<bfloat16> = Dtype::bfloat16;

template <class T> void run(int64_t rows, int64_t columns, int64_t padding = 0, size_t offset = 0, uint64_t seed = 1) {
  const int64_t stride = columns + padding;
  Buffer<T> x(static_cast<size_t>(rows * stride), offset), dy(x.size(), offset);
  Buffer<T> y(static_cast<size_t>(rows * columns), offset), dx(y.size(), offset);
  fill_normal(x, seed);
  fill_normal(dy, seed + 1);
  std::vector<double> want_y(y.size()), want_dx(dx.size());
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) {
      const size_t from = static_cast<size_t>(r * stride + c), to = static_cast<size_t>(r * columns + c);
      const double positive = std::max(0.0, static_cast<double>(to_float(x[from])));
      want_y[to] = positive * positive;
      want_dx[to] = 2 * static_cast<double>(to_float(dy[from])) * positive;
    }
  // One rounding to T and, before it, one to float of the product (a factor 2 is exact).
  const Tolerance rounding{.ulps = 0.5, .relative = 0x1p-24};
  const int64_t unit = rows * columns * static_cast<int64_t>(sizeof(T));
  under_every_seed([&] {
    y.poison(), dx.poison();
    expect_ok(relu_squared_forward_cuda({x.data(), y.data(), rows, columns, stride, kDtype<T>}, nullptr));
    expect_bytes({.read = unit, .written = unit});
    expect_close("y", y, want_y, rounding);
    same_bits_for_every_seed("y", y);
    sim::counters() = {};
    expect_ok(relu_squared_backward_cuda({dy.data(), x.data(), dx.data(), rows, columns, stride, stride, kDtype<T>},
                                         nullptr));
    expect_bytes({.read = 2 * unit, .written = unit});
    expect_close("dx", dx, want_dx, rounding);
    same_bits_for_every_seed("dx", dx);
  });
}

TEST(every_path_and_its_bytes) {
  run<bfloat16>(3, 1032);
  run<bfloat16>(3, 33);
  run<float16>(2, 264);
  run<float>(2, 514);
  run<bfloat16>(5, 64, 8);
  run<float16>(5, 64, 3);
  run<float>(5, 60, 4, 3);
  run<bfloat16>(1, 264, 0, 1);
}

TEST(unknown_dtype_is_refused) {
  Buffer<float> x(4), y(4);
  expect_refused(relu_squared_forward_cuda({x.data(), y.data(), 1, 4, 4, Dtype::float64}, nullptr), "float64");
  expect_refused(relu_squared_backward_cuda({x.data(), x.data(), y.data(), 1, 4, 4, 4, Dtype::float64}, nullptr),
                 "float64");
}

RANDOM_TEST(random_problems) {
  const int64_t rows = random.size(1, 20), columns = random.size(1, 300), padding = random.choice<int64_t>({0, 8, 1});
  const auto offset = static_cast<size_t>(random.choice<int64_t>({0, 0, 1}));
  const int64_t kind = random.integer(0, 2);
  const uint64_t seed = random.bits() % 1000;
  if (kind == 0) return run<bfloat16>(rows, columns, padding, offset, seed);
  if (kind == 1) return run<float>(rows, columns, padding, offset, seed);
  run<float16>(rows, columns, padding, offset, seed);
}

}  // namespace
}  // namespace warpsmith::test
