#include "kernels/activation/relu_squared.h"

#include "torch/support/device.h"
#include "torch/support/library.h"
#include "torch/support/rows.h"
#include "torch/support/tensor.h"

namespace warpsmith {
namespace {

constexpr const char *kForward = "relu_squared", *kBackward = "relu_squared_backward";

Tensor forward(Tensor x_any) {
  const Dtype dtype = float_dtype(kForward, "x", x_any);
  const Rows x = as_rows(kForward, "x", x_any);
  Tensor y = allocate_like(kForward, "y", x_any);
  if (x.rows == 0 || x.columns == 0) return y;
  const ReluSquaredFwdParams p{x.tensor.const_data_ptr(), y.mutable_data_ptr(), x.rows, x.columns, x.stride, dtype};
  run_on(
      kForward, x_any, [&](void* stream) { return relu_squared_forward_cuda(p, stream); },
      [&](const Parallel& threads) { return relu_squared_forward_cpu(p, threads); });
  return y;
}

Tensor backward(Tensor dy_any, Tensor x_any) {
  const Dtype dtype = float_dtype(kBackward, "x", x_any);
  check_dtype(kBackward, "dy", dy_any, dtype);
  check_same_shape(kBackward, "dy", dy_any, x_any);
  check_same_device(kBackward, "dy", dy_any, x_any);
  const Rows x = as_rows(kBackward, "x", x_any), dy = as_rows(kBackward, "dy", dy_any);
  Tensor dx = allocate_like(kBackward, "dx", x_any);
  if (x.rows == 0 || x.columns == 0) return dx;
  const ReluSquaredBwdParams p{dy.tensor.const_data_ptr(),
                               x.tensor.const_data_ptr(),
                               dx.mutable_data_ptr(),
                               x.rows,
                               x.columns,
                               dy.stride,
                               x.stride,
                               dtype};
  run_on(
      kBackward, x_any, [&](void* stream) { return relu_squared_backward_cuda(p, stream); },
      [&](const Parallel& threads) { return relu_squared_backward_cpu(p, threads); });
  return dx;
}

WARPSMITH_SCHEMAS(m) {
  m.def("relu_squared(Tensor x) -> Tensor y");
  m.def("relu_squared_forward(Tensor x) -> Tensor y");
  m.def("relu_squared_backward(Tensor dy, Tensor x) -> Tensor dx");
}

WARPSMITH_IMPLEMENTATIONS(m) {
  m.impl("relu_squared", TORCH_BOX(&forward));
  m.impl("relu_squared_forward", TORCH_BOX(&forward));
  m.impl("relu_squared_backward", TORCH_BOX(&backward));
}

}  // namespace
}  // namespace warpsmith
