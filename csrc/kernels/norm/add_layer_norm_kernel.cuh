#pragma once
#include "kernels/norm/norm_backward.cuh"
#include "kernels/norm/norm_forward.cuh"

// Kernels of add_layer_norm: those of the norm family with a mean and a residual.
// Forward, an element: reads x and residual, writes y and residual_out (2 * (sizeof(T) + sizeof(R)) bytes); a row: 8
// bytes for mean and rstd. Backward: reads dy, residual_out and its gradient, writes dx (2 * (sizeof(T) + sizeof(R))
// bytes, and sizeof(R) more where dresidual is another tensor); a row: 8 bytes; partial rows of dweight and dbias.
namespace warpsmith::norm {

using AddLayerNorm = NormOp<true, true, false>;

}  // namespace warpsmith::norm
