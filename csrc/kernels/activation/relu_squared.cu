#include "kernels/activation/relu_squared_kernel.cuh"

namespace warpsmith {

Status relu_squared_forward_cuda(const ReluSquaredFwdParams& p, void* stream) {
  return activation::launch_elementwise(activation::ReluSquaredForward{},
                                        {{{p.x, p.x_stride}}, {{p.y, p.columns}}, p.rows, p.columns, p.dtype}, stream);
}

Status relu_squared_backward_cuda(const ReluSquaredBwdParams& p, void* stream) {
  return activation::launch_elementwise(
      activation::ReluSquaredBackward{},
      {{{p.dy, p.dy_stride}, {p.x, p.x_stride}}, {{p.dx, p.columns}}, p.rows, p.columns, p.dtype}, stream);
}

}  // namespace warpsmith
