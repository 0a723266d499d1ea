#include "bindings/support/device.h"
#include "bindings/support/dropout.h"
#include "bindings/support/library.h"
#include "bindings/support/rows.h"
#include "bindings/support/tensor.h"
#include "kernels/activation/activation.h"

namespace warpsmith {
namespace {

// The bindings of the unary activations and of dropout_add: checks, rows, allocation, launch.
Tensor unary_forward(Unary op, const Tensor& x_any) {
  const Dtype dtype = float_dtype(name(op), "x", x_any);
  const Rows x = as_rows(name(op), "x", x_any);
  Tensor y = allocate_like(name(op), "y", x_any);
  if (x.rows == 0 || x.columns == 0) return y;
  const UnaryFwdParams p{x.tensor.const_data_ptr(), y.mutable_data_ptr(), x.rows, x.columns, x.stride, dtype};
  run_on<unary_forward_cuda, unary_forward_cpu>(name(op), x_any, op, p);
  return y;
}

Tensor unary_backward(Unary op, const Tensor& dy_any, const Tensor& x_any) {
  const Dtype dtype = float_dtype(backward_name(op), "x", x_any);
  check_like(backward_name(op), "dy", dy_any, x_any, dtype);
  const Rows x = as_rows(backward_name(op), "x", x_any), dy = as_rows(backward_name(op), "dy", dy_any);
  Tensor dx = allocate_like(backward_name(op), "dx", x_any);
  if (x.rows == 0 || x.columns == 0) return dx;
  const UnaryBwdParams p{dy.tensor.const_data_ptr(),
                         x.tensor.const_data_ptr(),
                         dx.mutable_data_ptr(),
                         x.rows,
                         x.columns,
                         dy.stride,
                         x.stride,
                         dtype};
  run_on<unary_backward_cuda, unary_backward_cpu>(backward_name(op), x_any, op, p);
  return dx;
}

template <Unary op> struct Bound {
  static Tensor forward(Tensor x) { return unary_forward(op, x); }
  static Tensor backward(Tensor dy, Tensor x) { return unary_backward(op, dy, x); }
};

constexpr const char *kForward = "dropout_add", *kBackward = "dropout_add_backward";

Tensor dropout_add_forward(Tensor x_any, Tensor residual_any, std::optional<Tensor> seed, double p) {
  const Dtype dtype = float_dtype(kForward, "x", x_any);
  check_like(kForward, "residual", residual_any, x_any, dtype);
  const Dropout dropout = check_dropout(kForward, seed, p, x_any);
  const Rows x = as_rows(kForward, "x", x_any), residual = as_rows(kForward, "residual", residual_any);
  Tensor y = allocate_like(kForward, "y", x_any);
  if (x.rows == 0 || x.columns == 0) return y;
  const DropoutAddFwdParams params{x.tensor.const_data_ptr(),
                                   residual.tensor.const_data_ptr(),
                                   y.mutable_data_ptr(),
                                   dropout,
                                   x.rows,
                                   x.columns,
                                   x.stride,
                                   residual.stride,
                                   dtype};
  run_on<dropout_add_forward_cuda, dropout_add_forward_cpu>(kForward, x_any, params);
  return y;
}

Tensor dropout_add_backward(Tensor dy_any, Tensor seed, double p) {
  const Dtype dtype = float_dtype(kBackward, "dy", dy_any);
  const Dropout dropout = check_dropout(kBackward, seed, p, dy_any);
  const Rows dy = as_rows(kBackward, "dy", dy_any);
  Tensor dx = allocate_like(kBackward, "dx", dy_any);
  if (dy.rows == 0 || dy.columns == 0) return dx;
  const DropoutAddBwdParams params{
      dy.tensor.const_data_ptr(), dx.mutable_data_ptr(), dropout, dy.rows, dy.columns, dy.stride, dtype};
  run_on<dropout_add_backward_cuda, dropout_add_backward_cpu>(kBackward, dy_any, params);
  return dx;
}

// g++ 12 does not instantiate a function whose address only a template takes.
#define WARPSMITH_ROW(op, function, flag) template struct Bound<Unary::op>;
WARPSMITH_UNARY_OPS(WARPSMITH_ROW)
#undef WARPSMITH_ROW

WARPSMITH_OPS(m) {
#define WARPSMITH_ROW(op, function, flag)                                              \
  m.add_forward(#op, "(Tensor x) -> Tensor y", TORCH_BOX(&Bound<Unary::op>::forward)); \
  m.add(#op "_backward(Tensor dy, Tensor x) -> Tensor dx", TORCH_BOX(&Bound<Unary::op>::backward));
  WARPSMITH_UNARY_OPS(WARPSMITH_ROW)
#undef WARPSMITH_ROW
  m.add_forward("dropout_add", "(Tensor x, Tensor residual, Tensor? seed, float p) -> Tensor y",
                TORCH_BOX(&dropout_add_forward));
  m.add("dropout_add_backward(Tensor dy, Tensor seed, float p) -> Tensor dx", TORCH_BOX(&dropout_add_backward));
}

}  // namespace
}  // namespace warpsmith
