#pragma once
#include "kernels/norm/norm_backward.cuh"
#include "kernels/norm/norm_forward.cuh"

// Kernels of add_rms_norm: those of the norm family without a mean, with a residual.
// Forward, an element: reads x and residual, writes y and residual_out (2 * (sizeof(T) + sizeof(R)) bytes); a row: 4
// bytes for rstd. Backward: reads dy, residual_out and its gradient, writes dx (2 * (sizeof(T) + sizeof(R)) bytes, and
// sizeof(R) more where dresidual is another tensor); a row: 4 bytes; partial rows of dweight.
namespace warpsmith::norm {

using AddRmsNorm = NormOp<false, true, false>;

}  // namespace warpsmith::norm
