#pragma once
#include "kernels/norm/norm_backward.cuh"
#include "kernels/norm/norm_forward.cuh"

// Kernels of dropout_add_rms_norm: those of the norm family without a mean, with a residual and dropout.
// Forward, an element: reads x and residual, writes y and residual_out (2 * (sizeof(T) + sizeof(R)) bytes); a row: 4
// bytes for rstd. Backward: reads dy, residual_out and its gradient, writes dx and dresidual (2 * sizeof(T) + 3 *
// sizeof(R) bytes); a row: 4 bytes; partial rows of dweight. The mask is made again from its seed.
namespace warpsmith::norm {

using DropoutAddRmsNorm = NormOp<false, true, true>;

}  // namespace warpsmith::norm
