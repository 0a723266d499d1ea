#include "kernels/activation/dropout_add.h"

#include "torch/support/device.h"
#include "torch/support/dropout.h"
#include "torch/support/library.h"
#include "torch/support/rows.h"
#include "torch/support/tensor.h"

namespace warpsmith {
namespace {

constexpr const char *kForward = "dropout_add", *kBackward = "dropout_add_backward";

Tensor forward(Tensor x_any, Tensor residual_any, std::optional<Tensor> seed, double p) {
  const Dtype dtype = float_dtype(kForward, "x", x_any);
  check_dtype(kForward, "residual", residual_any, dtype);
  check_same_shape(kForward, "residual", residual_any, x_any);
  check_same_device(kForward, "residual", residual_any, x_any);
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
  run_on(
      kForward, x_any, [&](void* stream) { return dropout_add_forward_cuda(params, stream); },
      [&](const Parallel& threads) { return dropout_add_forward_cpu(params, threads); });
  return y;
}

Tensor backward(Tensor dy_any, Tensor seed, double p) {
  const Dtype dtype = float_dtype(kBackward, "dy", dy_any);
  const Dropout dropout = check_dropout(kBackward, seed, p, dy_any);
  const Rows dy = as_rows(kBackward, "dy", dy_any);
  Tensor dx = allocate_like(kBackward, "dx", dy_any);
  if (dy.rows == 0 || dy.columns == 0) return dx;
  const DropoutAddBwdParams params{
      dy.tensor.const_data_ptr(), dx.mutable_data_ptr(), dropout, dy.rows, dy.columns, dy.stride, dtype};
  run_on(
      kBackward, dy_any, [&](void* stream) { return dropout_add_backward_cuda(params, stream); },
      [&](const Parallel& threads) { return dropout_add_backward_cpu(params, threads); });
  return dx;
}

WARPSMITH_SCHEMAS(m) {
  m.def("dropout_add(Tensor x, Tensor residual, Tensor? seed, float p) -> Tensor y");
  m.def("dropout_add_forward(Tensor x, Tensor residual, Tensor? seed, float p) -> Tensor y");
  m.def("dropout_add_backward(Tensor dy, Tensor seed, float p) -> Tensor dx");
}

WARPSMITH_IMPLEMENTATIONS(m) {
  m.impl("dropout_add", TORCH_BOX(&forward));
  m.impl("dropout_add_forward", TORCH_BOX(&forward));
  m.impl("dropout_add_backward", TORCH_BOX(&backward));
}

}  // namespace
}  // namespace warpsmith
