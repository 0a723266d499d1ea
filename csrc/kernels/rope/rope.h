#pragma once
#include <cstdint>

#include "common/alignment.h"
#include "common/dtype.h"
#include "common/op_list.h"
#include "common/parallel.h"
#include "common/status.h"
#include "kernels/rope/rope_ops.h"

// Params and entry points of rope and qk_norm_rope.
namespace warpsmith {

WARPSMITH_DEFINE_OPS(RopeOp, WARPSMITH_ROPE_OPS)

// ---- Shared by both ops: which tensors are rotated, by which angles, at which positions.

// One tensor of heads, [batch, tokens, heads, head_dim]. The elements of a head are adjacent.
struct RotaryHeads {
  int64_t heads;                                    // 0: no such tensor
  int64_t batch_stride, token_stride, head_stride;  // in elements
};

// cos and sin: one angle for each pair of rotated elements.
struct RotaryAngles {
  const void* cos;                   // [rows, rotary_dim / 2], dtype; with per_token [batch or 1, tokens, rotary_dim]
  const void* sin;                   // as cos, with the same strides
  int64_t rows;                      // positions in the table; with per_token the tokens of a batch entry
  int64_t batch_stride, row_stride;  // in elements; batch_stride 0: one table for all batch entries
  int32_t column_stride;  // 2: each angle is stored twice in a row, once for each element of an interleaved pair
  bool per_token;         // the row is the token's index in its batch entry; RotaryPositions is not read
  Dtype dtype;            // the activation's dtype, or float32 beside a 16-bit activation
};

// A token's position is its index in the batch entry (packed: in its sequence), plus `offset`, plus its entry of
// `offsets`.
struct RotaryPositions {
  const int32_t* cu_seqlens;  // [sequences + 1]: the first token of each packed sequence, then T; null: not packed
  int64_t sequences;
  const void* offsets;    // [batch or sequences] int32 or int64, offset_stride apart; null: none
  int64_t offset_stride;  // 0: one offset for all
  bool wide_offsets;      // offsets are int64
  int64_t offset;
};

struct RotaryShape {
  int64_t batch, tokens;  // tokens: per batch entry
  int64_t head_dim, rotary_dim;
  bool interleaved;  // pairs are neighbours (2i, 2i + 1); otherwise (i, i + rotary_dim / 2)
  bool inverse;      // rotate by the negative angle, as gradients do
};

// CUDA kernels write NaN to the rotated elements of a token whose position has no row of cos, or that is in no
// sequence. On the CPU this check refuses such positions before anything is written.
Status rotary_check_positions_cpu(const RotaryShape& shape, const RotaryAngles& angles,
                                  const RotaryPositions& positions);

// Whether 16-byte vectors can be used: every token, head and row of cos is aligned to 16 bytes.
inline bool heads_on_16_bytes(const void* base, const RotaryHeads& h, Dtype dtype) {
  return h.heads == 0 || (on_16_bytes(base) && on_16_bytes(h.batch_stride, dtype) &&
                          on_16_bytes(h.token_stride, dtype) && on_16_bytes(h.head_stride, dtype));
}
inline bool angles_on_16_bytes(const RotaryAngles& a) {
  return on_16_bytes(a.cos) && on_16_bytes(a.sin) && on_16_bytes(a.batch_stride, a.dtype) &&
         on_16_bytes(a.row_stride, a.dtype);
}

// ---- rope: rotates the first rotary_dim elements of each head of q and k, pair by pair, and copies the others:
//   (a, b) -> (a cos - b sin, b cos + a sin), in float (double for float64).
// The rotation is linear, so the gradient is the same op with `inverse`. An output may be its input (both with equal
// strides); elements that are not rotated are then left alone.
struct RopeParams {
  const void* q;                                                     // [batch, tokens, q heads, head_dim], dtype
  const void* k;                                                     // [batch, tokens, k heads, head_dim], dtype
  void* q_out;                                                       // as q
  void* k_out;                                                       // as k
  RotaryHeads q_in_layout, k_in_layout, q_out_layout, k_out_layout;  // heads are equal in and out
  RotaryAngles angles;
  RotaryPositions positions;
  RotaryShape shape;
  bool inplace;  // q_out is q and k_out is k
  Dtype dtype;
};

Status rope_cuda(const RopeParams& params, void* stream);
Status rope_cpu(const RopeParams& params, const Parallel& parallel);

// The same with a given configuration, for tuning and tests.
struct RopeConfig;
Status rope_cuda_with(const RopeConfig& config, const RopeParams& params, void* stream);

// ---- qk_norm_rope: normalises each head of q and k, y = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + eps), and
// rotates it as rope does. Arithmetic is float (double for float64); nothing is rounded in between.
struct QkNormRopeFwdParams {
  const void* q;         // [batch, tokens, q heads, head_dim], dtype
  const void* k;         // [batch, tokens, k heads, head_dim], dtype
  const void* q_weight;  // [head_dim], weight_dtype
  const void* k_weight;  // [head_dim], weight_dtype
  void* q_out;           // as q
  void* k_out;           // as k
  RotaryHeads q_layout, k_layout, q_out_layout, k_out_layout;
  RotaryAngles angles;
  RotaryPositions positions;
  RotaryShape shape;  // inverse: false
  double eps;
  Dtype dtype, weight_dtype;  // equal, or 16-bit dtype with float32 weight
};

// With r the gradient of the output rotated back, x_hat = x * rstd and g = r * weight:
//   dx = rstd * (g - x_hat * mean(g * x_hat)),   dweight = sum over batch, tokens and heads of r * x_hat.
// rstd is computed again: x is read anyway.
struct QkNormRopeBwdParams {
  const void* dq_out;  // as q
  const void* dk_out;  // as k
  const void* q;       // as in the forward, and the next three
  const void* k;
  const void* q_weight;
  const void* k_weight;
  void* dq;         // as q; null: not wanted
  void* dk;         // as k; null: not wanted
  void* dq_weight;  // [head_dim], weight_dtype; null: not wanted
  void* dk_weight;  // [head_dim], weight_dtype; null: not wanted
  void* partials;   // [partial rows, 2, head_dim], float (double for float64); null: no weight gradient is wanted
  RotaryHeads dq_out_layout, dk_out_layout, q_layout, k_layout, dq_layout, dk_layout;
  RotaryAngles angles;
  RotaryPositions positions;
  RotaryShape shape;  // inverse: true
  double eps;
  Dtype dtype, weight_dtype;
};

Status qk_norm_rope_forward_cuda(const QkNormRopeFwdParams& params, void* stream);
Status qk_norm_rope_forward_cpu(const QkNormRopeFwdParams& params, const Parallel& parallel);
Status qk_norm_rope_backward_cuda(const QkNormRopeBwdParams& params, void* stream);
Status qk_norm_rope_backward_cpu(const QkNormRopeBwdParams& params, const Parallel& parallel);

// Weight gradients are summed in two stages, in a fixed order: blocks of tokens into `partials`, then over its rows.
// Sets partial_rows to the number that a backward on the current device writes.
Status qk_norm_rope_partial_rows_cuda(const QkNormRopeBwdParams& params, int64_t* partial_rows);
// Returns that number on the CPU.
int64_t qk_norm_rope_partial_rows_cpu(int64_t tokens);

// The same with a given configuration, for tuning and tests. `partials` must have that configuration's
// qk_norm_rope_partial_rows.
struct QkNormRopeConfig;
Status qk_norm_rope_forward_cuda_with(const QkNormRopeConfig& config, const QkNormRopeFwdParams& params, void* stream);
Status qk_norm_rope_backward_cuda_with(const QkNormRopeConfig& config, const QkNormRopeBwdParams& params, void* stream);

}  // namespace warpsmith
