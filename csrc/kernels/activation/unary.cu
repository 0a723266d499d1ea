#include "kernels/activation/unary.cuh"

#include "kernels/activation/dropout_add.cuh"

namespace warpsmith {

Status unary_forward_cuda(Unary op, const UnaryFwdParams& p, void* stream) {
#define WARPSMITH_CASE(op, F, flag) \
  case Unary::op: return activation::unary_forward<activation::F>(p, stream);
  switch (op) { WARPSMITH_UNARY_OPS(WARPSMITH_CASE) }
#undef WARPSMITH_CASE
  return Status::unsupported("no such unary op");
}

Status unary_backward_cuda(Unary op, const UnaryBwdParams& p, void* stream) {
#define WARPSMITH_CASE(op, F, flag) \
  case Unary::op: return activation::unary_backward<activation::F>(p, stream);
  switch (op) { WARPSMITH_UNARY_OPS(WARPSMITH_CASE) }
  return Status::unsupported("no such unary op");
}

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
