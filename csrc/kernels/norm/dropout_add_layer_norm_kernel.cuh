#pragma once
#include "kernels/norm/norm_backward.cuh"
#include "kernels/norm/norm_forward.cuh"

// Kernels of dropout_add_layer_norm: those of the norm family with a mean, a residual and dropout.
// Forward, an element: reads x and residual, writes y and residual_out (2 * (sizeof(T) + sizeof(R)) bytes); a row: 8
// bytes for mean and rstd. Backward: reads dy, residual_out and its gradient, writes dx and dresidual (2 * sizeof(T) +
// 3 * sizeof(R) bytes); a row: 8 bytes; partial rows of dweight and dbias. The mask is made again from its seed.
namespace warpsmith::norm {

using DropoutAddLayerNorm = NormOp<true, true, true>;

}  // namespace warpsmith::norm
