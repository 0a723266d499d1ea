#include "kernels/norm/add_rms_norm.h"

#include "kernels/norm/add_rms_norm_kernel.cuh"
#include "kernels/norm/norm_launch.cuh"

namespace warpsmith {

Status add_rms_norm_forward_cuda(const NormForwardParams& p, void* stream) {
  return norm::forward_cuda<norm::AddRmsNorm>(p, stream);
}

Status add_rms_norm_partial_rows_cuda(const NormBackwardParams& p, int64_t* partial_rows) {
  return norm::partial_rows_cuda<norm::AddRmsNorm>(p, partial_rows);
}

Status add_rms_norm_backward_cuda(const NormBackwardParams& p, void* stream) {
  return norm::backward_cuda<norm::AddRmsNorm>(p, stream);
}

}  // namespace warpsmith
