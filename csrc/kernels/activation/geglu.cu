#include "kernels/activation/geglu_kernel.cuh"

namespace warpsmith {

Status geglu_forward_cuda(const GatedFwdParams& p, void* stream) { return activation::run(p, stream); }
Status geglu_backward_cuda(const GatedBwdParams& p, void* stream) { return activation::run(p, stream); }

}  // namespace warpsmith
