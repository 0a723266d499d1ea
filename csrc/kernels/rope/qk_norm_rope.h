#pragma once
#include "kernels/rope/rotary.h"

namespace warpsmith {

// Each head of q and k is normalised, y = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + eps), and then rotated as
// rope does it. Arithmetic is float (double for float64), and nothing is rounded in between.
struct QkNormRopeFwdParams {
  const void* q;                                               // [batch, tokens, q heads, head_dim], dtype
  const void* k;                                               // [batch, tokens, k heads, head_dim], dtype
  const void* q_weight;                                        // [head_dim], weight_dtype
  const void* k_weight;                                        // [head_dim], weight_dtype
  void* q_out;                                                 // as q
  void* k_out;                                                 // as k
  RotaryHeads q_layout, k_layout, q_out_layout, k_out_layout;  // zero heads: no tensor
  RotaryAngles angles;
  RotaryPositions positions;
  RotaryShape shape;  // inverse: false
  double eps;
  Dtype dtype, weight_dtype;  // equal, or 16-bit dtype with float32 weight
};

// With r the gradient of the output rotated back, x_hat = x * rstd and g = r * weight:
//   dx = rstd * (g - x_hat * mean(g * x_hat)),   dweight = sum over batch, tokens and heads of r * x_hat.
// rstd is computed again from x, which is read anyway.
struct QkNormRopeBwdParams {
  const void* dq_out;  // as q
  const void* dk_out;  // as k
  const void* q;
  const void* k;
  const void* q_weight;
  const void* k_weight;
  void* dq;         // as q; null: not wanted
  void* dk;         // as k; null: not wanted
  void* dq_weight;  // [head_dim], weight_dtype; null: not wanted
  void* dk_weight;  // [head_dim], weight_dtype; null: not wanted
  void* partials;   // [qk_norm_rope_partial_rows(...), 2, head_dim], float (double for float64); null: no weight's
  RotaryHeads dq_out_layout, dk_out_layout, q_layout, k_layout, dq_layout, dk_layout;
  RotaryAngles angles;
  RotaryPositions positions;
  RotaryShape shape;  // inverse: true
  double eps;
  Dtype dtype, weight_dtype;
};

Status qk_norm_rope_forward_cuda(const QkNormRopeFwdParams& params, void* stream);
Status qk_norm_rope_forward_cpu(const QkNormRopeFwdParams& params, const Parallel& parallel);

// The gradients of the weights are summed in two stages in a fixed order: into `partials` by blocks of tokens, then
// over them. How many partial rows a backward writes. The CUDA answer depends on the current device.
Status qk_norm_rope_partial_rows_cuda(const QkNormRopeBwdParams& params, int64_t* partial_rows);
int64_t qk_norm_rope_partial_rows_cpu(int64_t tokens);

Status qk_norm_rope_backward_cuda(const QkNormRopeBwdParams& params, void* stream);
Status qk_norm_rope_backward_cpu(const QkNormRopeBwdParams& params, const Parallel& parallel);

// With a configuration of the caller's choice (tuning and tests); `partials` must have its qk_norm_rope_partial_rows.
struct QkNormRopeConfig;
Status qk_norm_rope_forward_cuda_with(const QkNormRopeConfig& config, const QkNormRopeFwdParams& params, void* stream);
Status qk_norm_rope_backward_cuda_with(const QkNormRopeConfig& config, const QkNormRopeBwdParams& params, void* stream);

}  // namespace warpsmith
