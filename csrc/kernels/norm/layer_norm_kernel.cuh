#pragma once
#include "kernels/norm/norm_backward.cuh"
#include "kernels/norm/norm_forward.cuh"

// Kernels of layer_norm: those of the norm family with a mean, without residual and dropout.
// Forward, an element: reads x, writes y (2 * sizeof(T) bytes); a row: 8 bytes for mean and rstd. forward_block: each
// thread the row's first four elements as well, and rows whose sums cancel twice more, all from a cache.
// Backward: reads dy and x, writes dx (3 * sizeof(T) bytes); a row: 8 bytes; partial rows of dweight and dbias.
namespace warpsmith::norm {

using LayerNorm = NormOp<true, false, false>;

}  // namespace warpsmith::norm
