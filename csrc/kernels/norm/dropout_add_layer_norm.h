#pragma once
#include "kernels/norm/norm.h"

// dropout_add_layer_norm: kind layer, with a residual and dropout.
namespace warpsmith {

Status dropout_add_layer_norm_forward_cuda(const NormForwardParams& params, void* stream);
Status dropout_add_layer_norm_forward_cpu(const NormForwardParams& params, const Parallel& parallel);

// How many partial rows a backward with these params writes on the current device (the pointers of the partials are not
// read, all others are: alignment decides).
Status dropout_add_layer_norm_partial_rows_cuda(const NormBackwardParams& params, int64_t* partial_rows);

Status dropout_add_layer_norm_backward_cuda(const NormBackwardParams& params, void* stream);
Status dropout_add_layer_norm_backward_cpu(const NormBackwardParams& params, const Parallel& parallel);

}  // namespace warpsmith
