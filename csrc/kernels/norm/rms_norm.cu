#include "kernels/norm/rms_norm.h"

#include "kernels/norm/norm_launch.cuh"
#include "kernels/norm/rms_norm_kernel.cuh"

namespace warpsmith {

Status rms_norm_forward_cuda(const NormForwardParams& p, void* stream) {
  return norm::forward_cuda<norm::RmsNorm>(p, stream);
}

Status rms_norm_partial_rows_cuda(const NormBackwardParams& p, int64_t* partial_rows) {
  return norm::partial_rows_cuda<norm::RmsNorm>(p, partial_rows);
}

Status rms_norm_backward_cuda(const NormBackwardParams& p, void* stream) {
  return norm::backward_cuda<norm::RmsNorm>(p, stream);
}

}  // namespace warpsmith
