#include "kernels/activation/biased.cuh"

namespace warpsmith {

Status biased_forward_cuda(Biased op, const BiasedFwdParams& p, void* stream) {
#define WARPSMITH_USE(op, F) activation::launch_biased_forward<activation::F>(p, stream)
#define WARPSMITH_CASE(op, F, flag) \
  case Biased::op: return WARPSMITH_SELECT_##flag(op, F, p.tanh, WARPSMITH_USE);
  switch (op) { WARPSMITH_BIASED_OPS(WARPSMITH_CASE) }
#undef WARPSMITH_USE
  return Status::unsupported("no such biased op");
}

Status biased_backward_cuda(Biased op, const BiasedBwdParams& p, void* stream) {
#define WARPSMITH_USE(op, F) activation::launch_biased_backward<activation::F>(p, stream)
  switch (op) { WARPSMITH_BIASED_OPS(WARPSMITH_CASE) }
  return Status::unsupported("no such biased op");
}

Status biased_partial_rows_cuda(const BiasedBwdParams& p, int64_t* partial_rows) {
  BiasedProblem problem;
  WARPSMITH_RETURN_IF_FAILED(activation::problem_of(p, &problem));
  *partial_rows = choose_biased_backward(problem).row_blocks;
  return {};
}

}  // namespace warpsmith
