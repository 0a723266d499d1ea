#pragma once
#include "kernels/rope/rotary.h"

namespace warpsmith {

// Rotates the first rotary_dim elements of each head of q and k, pair by pair, and copies the others:
//   (a, b) -> (a cos - b sin, b cos + a sin), in float (double for float64).
// Linear, so the gradient is the same with `inverse`. An output may be its input (both strides equal): then the
// elements that are not rotated are not touched.
struct RopeParams {
  const void* q;  // [batch, tokens, q heads, head_dim], dtype
  const void* k;  // [batch, tokens, k heads, head_dim], dtype
  void* q_out;
  void* k_out;
  RotaryHeads q_in_layout, k_in_layout, q_out_layout, k_out_layout;  // heads equal in and out; zero heads: no tensor
  RotaryAngles angles;
  RotaryPositions positions;
  RotaryShape shape;
  bool inplace;  // q_out is q and k_out is k
  Dtype dtype;
};

Status rope_cuda(const RopeParams& params, void* stream);
Status rope_cpu(const RopeParams& params, const Parallel& parallel);

// With a configuration of the caller's choice (tuning and tests).
struct RopeConfig;
Status rope_cuda_with(const RopeConfig& config, const RopeParams& params, void* stream);

}  // namespace warpsmith
