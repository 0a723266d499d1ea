#pragma once
#include "kernels/norm/norm_backward.cuh"
#include "kernels/norm/norm_forward.cuh"

// Kernels of rms_norm: those of the norm family with neither mean nor residual.
// Forward, an element: reads x, writes y (2 * sizeof(T) bytes); a row: 4 bytes for rstd. Backward: reads dy and x,
// writes dx (3 * sizeof(T) bytes); a row: 4 bytes; partial rows of dweight.
namespace warpsmith::norm {

using RmsNorm = NormOp<false, false, false>;

}  // namespace warpsmith::norm
