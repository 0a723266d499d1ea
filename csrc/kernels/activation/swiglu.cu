#include "kernels/activation/swiglu_kernel.cuh"

namespace warpsmith {

Status swiglu_forward_cuda(const GatedFwdParams& p, void* stream) { return activation::run(p, stream); }
Status swiglu_backward_cuda(const GatedBwdParams& p, void* stream) { return activation::run(p, stream); }

}  // namespace warpsmith
