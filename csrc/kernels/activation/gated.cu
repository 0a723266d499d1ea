#include "kernels/activation/gated.cuh"

namespace warpsmith {

Status gated_forward_cuda(Gated op, const GatedFwdParams& p, void* stream, bool* has_cast) {
  if (has_cast) *has_cast = false;
  if (p.cast.data && op == Gated::swiglu) {
    const auto aligned = [&](const void* t, int64_t stride) { return rows_on_16_bytes(t, stride, p.rows, p.dtype); };
    const bool all = aligned(p.gate, p.gate_stride) && aligned(p.up, p.up_stride) && aligned(p.y, p.columns) &&
                     on_16_bytes(p.cast.data);
    if (const int threads = gated_row_threads(p.columns, size_bytes(p.dtype), all)) {
      if (has_cast) *has_cast = true;
      return activation::gated_rows<activation::Silu>(p, threads, stream);
    }
  }
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
