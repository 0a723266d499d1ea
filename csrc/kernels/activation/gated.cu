#include "kernels/activation/gated.cuh"

namespace warpsmith {

Status gated_forward_cuda(Gated op, const GatedFwdParams& p, void* stream) {
#define WARPSMITH_USE(op, F) activation::gated_forward<activation::F>(p, stream)
#define WARPSMITH_CASE(op, F, flag) \
  case Gated::op: return WARPSMITH_SELECT_##flag(op, F, p.tanh, WARPSMITH_USE);
  switch (op) { WARPSMITH_GATED_OPS(WARPSMITH_CASE) }
#undef WARPSMITH_USE
  return Status::unsupported("no such gated op");
}

Status gated_backward_cuda(Gated op, const GatedBwdParams& p, void* stream) {
#define WARPSMITH_USE(op, F) activation::gated_backward<activation::F>(p, stream)
  switch (op) { WARPSMITH_GATED_OPS(WARPSMITH_CASE) }
  return Status::unsupported("no such gated op");
}

}  // namespace warpsmith
