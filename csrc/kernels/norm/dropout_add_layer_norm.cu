#include "kernels/norm/dropout_add_layer_norm.h"

#include "kernels/norm/dropout_add_layer_norm_kernel.cuh"
#include "kernels/norm/norm_launch.cuh"

namespace warpsmith {

Status dropout_add_layer_norm_forward_cuda(const NormForwardParams& p, void* stream) {
  return norm::forward_cuda<norm::DropoutAddLayerNorm>(p, stream);
}

Status dropout_add_layer_norm_partial_rows_cuda(const NormBackwardParams& p, int64_t* partial_rows) {
  return norm::partial_rows_cuda<norm::DropoutAddLayerNorm>(p, partial_rows);
}

Status dropout_add_layer_norm_backward_cuda(const NormBackwardParams& p, void* stream) {
  return norm::backward_cuda<norm::DropoutAddLayerNorm>(p, stream);
}

}  // namespace warpsmith
