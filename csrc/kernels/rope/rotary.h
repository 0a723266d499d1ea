#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/parallel.h"
#include "common/status.h"

// What rope and qk_norm_rope share: which tensors are rotated, by which angles, at which positions.
namespace warpsmith {

// One tensor of heads, [batch, tokens, heads, head_dim]: elements of a head are adjacent, the other strides free.
struct RotaryHeads {
  int64_t heads, batch_stride, token_stride, head_stride;  // strides in elements
};

// cos and sin, one angle for each pair of rotated elements.
struct RotaryAngles {
  const void* cos;                   // [rows, rotary_dim / 2], dtype; with per_token [batch or 1, tokens, rotary_dim]
  const void* sin;                   // as cos, with its strides
  int64_t rows;                      // positions that have angles; with per_token the tokens of a batch entry
  int64_t batch_stride, row_stride;  // in elements; batch_stride 0: one table for all
  int32_t column_stride;             // 2: each angle stands twice, beside both elements of its (interleaved) pair
  bool per_token;                    // row = token of the batch entry, the positions below are not used
  Dtype dtype;                       // the activation's, or float32 beside a 16-bit one
};

// The position of a token: its index in the batch entry (in its sequence, where sequences are packed) plus offsets.
struct RotaryPositions {
  const int32_t* cu_seqlens;  // [sequences + 1], first token of each packed sequence and the end; null: not packed
  int64_t sequences;
  const void* offsets;    // [batch or sequences] int32 or int64, offset_stride apart, or null
  int64_t offset_stride;  // 0: one offset for all
  bool wide_offsets;      // int64
  int64_t offset;         // added to every position
};

struct RotaryShape {
  int64_t batch, tokens;  // of a batch entry
  int64_t head_dim, rotary_dim;
  bool interleaved;  // pairs are neighbours (2i, 2i + 1); else (i, i + rotary_dim / 2)
  bool inverse;      // by the negative angle, which is the gradient
};

// The kernels of a token whose position has no angles, or that lies in no sequence, write NaN where they would rotate.
// On the CPU such positions are refused before anything is written.
Status rotary_check_positions_cpu(const RotaryShape& shape, const RotaryAngles& angles,
                                  const RotaryPositions& positions);

// What vectors of 16 bytes need: every token, head and row of cos begins on them.
inline bool on_16_bytes(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

inline bool heads_on_16_bytes(const void* base, const RotaryHeads& h, Dtype dtype) {
  const int64_t bytes = size_bytes(dtype);
  return h.heads == 0 || (on_16_bytes(base) && h.batch_stride * bytes % 16 == 0 && h.token_stride * bytes % 16 == 0 &&
                          h.head_stride * bytes % 16 == 0);
}

inline bool angles_on_16_bytes(const RotaryAngles& a) {
  const int64_t bytes = size_bytes(a.dtype);
  return on_16_bytes(a.cos) && on_16_bytes(a.sin) && a.batch_stride * bytes % 16 == 0 && a.row_stride * bytes % 16 == 0;
}

}  // namespace warpsmith
