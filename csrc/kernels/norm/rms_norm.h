#pragma once
#include "kernels/norm/norm.h"

// rms_norm: kind rms, without residual, bias and dropout; the weight may be null.
namespace warpsmith {

Status rms_norm_forward_cuda(const NormForwardParams& params, void* stream);
Status rms_norm_forward_cpu(const NormForwardParams& params, const Parallel& parallel);

// How many partial rows a backward with these params writes on the current device (the pointers of the partials are not
// read, all others are: alignment decides).
Status rms_norm_partial_rows_cuda(const NormBackwardParams& params, int64_t* partial_rows);

Status rms_norm_backward_cuda(const NormBackwardParams& params, void* stream);
Status rms_norm_backward_cpu(const NormBackwardParams& params, const Parallel& parallel);

}  // namespace warpsmith
