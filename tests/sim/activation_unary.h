#pragma once
#include "dtypes.h"
#include "harness.h"
#include "kernels/activation/activation.h"

// The sim tests of the unary activations. The other paths of the elementwise body are those of the gated ones.
namespace warpsmith::test {

// An op, with its function and derivative in double.
struct UnaryOp {
  Unary row;
  double (*value)(double);
  double (*derivative)(double);
};

template <class T> void unary_run(const UnaryOp& op, int64_t rows, int64_t columns, int64_t padding = 0,
                                  const Offsets& offset = {}, uint64_t seed = 1) {
  const int64_t stride = columns + padding;
  Buffer<T> x(static_cast<size_t>(rows * stride), offset[0]), dy(x.size(), offset[1]);
  Buffer<T> y(static_cast<size_t>(rows * columns), offset[2]), dx(y.size(), offset[3]);
  fill_normal(x, seed);
  fill_normal(dy, seed + 1);
  std::vector<double> want_y(y.size()), want_dx(dx.size());
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) {
      const size_t from = static_cast<size_t>(r * stride + c), to = static_cast<size_t>(r * columns + c);
      const double at = static_cast<double>(to_float(x[from]));
      want_y[to] = op.value(at);
      want_dx[to] = static_cast<double>(to_float(dy[from])) * op.derivative(at);
    }
  // One rounding to T and, before it, one to float of the product (a factor 2 is exact).
  const Tolerance rounding{.ulps = 0.5, .relative = 0x1p-24};
  const int64_t unit = rows * columns * static_cast<int64_t>(sizeof(T));
  under_every_seed([&] {
    y.poison(), dx.poison();
    expect_ok(unary_forward_cuda(op.row, {x.data(), y.data(), rows, columns, stride, kDtype<T>}, nullptr));
    expect_bytes({.read = unit, .written = unit});
    expect_close("y", y, want_y, rounding);
    same_bits_for_every_seed("y", y);
    sim::counters() = {};
    expect_ok(unary_backward_cuda(op.row, {dy.data(), x.data(), dx.data(), rows, columns, stride, stride, kDtype<T>},
                                  nullptr));
    expect_bytes({.read = 2 * unit, .written = unit});
    expect_close("dx", dx, want_dx, rounding);
    same_bits_for_every_seed("dx", dx);
  });
}

inline void unary_paths(const UnaryOp& op) {
  unary_run<bfloat16>(op, 3, 1032);
  unary_run<bfloat16>(op, 3, 33);
  unary_run<float16>(op, 2, 264);
  unary_run<float>(op, 2, 514);
  unary_run<bfloat16>(op, 5, 64, 8);
  unary_run<float16>(op, 5, 64, 3);
  unary_run<float>(op, 5, 60, 4, 3);
  unary_run<bfloat16>(op, 1, 264, 0, 1);
  for (int argument = 0; argument < 4; ++argument) unary_run<bfloat16>(op, 3, 64, 0, Offsets::only(argument));
}

inline void unary_refuses_float64(const UnaryOp& op) {
  Buffer<float> x(4), y(4);
  expect_refused(unary_forward_cuda(op.row, {x.data(), y.data(), 1, 4, 4, Dtype::float64}, nullptr), "float64");
  expect_refused(unary_backward_cuda(op.row, {x.data(), x.data(), y.data(), 1, 4, 4, 4, Dtype::float64}, nullptr),
                 "float64");
}

inline void unary_random(const UnaryOp& op, Random& random) {
  const int64_t rows = random.size(1, 20), columns = random.size(1, 300), padding = random.choice<int64_t>({0, 8, 1});
  const Offsets offset = Offsets::draw(random, 4);
  const int64_t kind = random.integer(0, 2);
  const uint64_t seed = random.bits() % 1000;
  if (kind == 0) return unary_run<bfloat16>(op, rows, columns, padding, offset, seed);
  if (kind == 1) return unary_run<float>(op, rows, columns, padding, offset, seed);
  unary_run<float16>(op, rows, columns, padding, offset, seed);
}

}  // namespace warpsmith::test
