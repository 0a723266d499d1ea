#include "kernels/activation/dropout_add_kernel.cuh"

namespace warpsmith {

Status dropout_add_forward_cuda(const DropoutAddFwdParams& p, void* stream) {
  return activation::launch_elementwise(
      activation::DropoutAddForward{activation::scale_of(p.dropout)},
      {{{p.x, p.x_stride}, {p.residual, p.residual_stride}}, {{p.y, p.columns}}, p.rows, p.columns, p.dtype}, stream);
}

Status dropout_add_backward_cuda(const DropoutAddBwdParams& p, void* stream) {
  return activation::launch_elementwise(activation::DropoutAddBackward{activation::scale_of(p.dropout)},
                                        {{{p.dy, p.dy_stride}}, {{p.dx, p.columns}}, p.rows, p.columns, p.dtype},
                                        stream);
}

}  // namespace warpsmith
