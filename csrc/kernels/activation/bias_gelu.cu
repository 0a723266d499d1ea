#include "kernels/activation/bias_gelu_kernel.cuh"

namespace warpsmith {

Status bias_gelu_forward_cuda(const BiasedFwdParams& p, void* stream) { return activation::run(p, stream); }
Status bias_gelu_backward_cuda(const BiasedBwdParams& p, void* stream) { return activation::run(p, stream); }
Status bias_gelu_partial_rows_cuda(const BiasedBwdParams& p, int64_t* rows) {
  return activation::biased_partial_rows(p, rows);
}

}  // namespace warpsmith
