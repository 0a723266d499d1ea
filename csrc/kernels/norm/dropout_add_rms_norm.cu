#include "kernels/norm/dropout_add_rms_norm.h"

#include "kernels/norm/dropout_add_rms_norm_kernel.cuh"
#include "kernels/norm/norm_launch.cuh"

namespace warpsmith {

Status dropout_add_rms_norm_forward_cuda(const NormForwardParams& p, void* stream) {
  return norm::forward_cuda<norm::DropoutAddRmsNorm>(p, stream);
}

Status dropout_add_rms_norm_partial_rows_cuda(const NormBackwardParams& p, int64_t* partial_rows) {
  return norm::partial_rows_cuda<norm::DropoutAddRmsNorm>(p, partial_rows);
}

Status dropout_add_rms_norm_backward_cuda(const NormBackwardParams& p, void* stream) {
  return norm::backward_cuda<norm::DropoutAddRmsNorm>(p, stream);
}

}  // namespace warpsmith
