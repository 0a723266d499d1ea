#include "kernels/activation/reglu_kernel.cuh"

namespace warpsmith {

Status reglu_forward_cuda(const GatedFwdParams& p, void* stream) { return activation::run(p, stream); }
Status reglu_backward_cuda(const GatedBwdParams& p, void* stream) { return activation::run(p, stream); }

}  // namespace warpsmith
