#pragma once
#include <cstdint>
#include <vector>

#include "common/half_host.h"
#include "kernels/rope/rope.h"

// What the CPU kernels of rope and qk_norm_rope share.
namespace warpsmith::cpu {

constexpr int64_t kRotaryGrain = 16 * 1024;  // least elements per thread

inline int64_t start_of(const RotaryHeads& l, int64_t batch, int64_t index) {
  return batch * l.batch_stride + index * l.token_stride;
}

inline int64_t offset_of(const RotaryPositions& p, int64_t entry) {
  if (!p.offsets) return p.offset;
  const int64_t at = entry * p.offset_stride;
  return p.offset +
         (p.wide_offsets ? static_cast<const int64_t*>(p.offsets)[at] : static_cast<const int32_t*>(p.offsets)[at]);
}

// cos and sin of one token after another, in ascending order, as Math. C: their storage type. Positions are already
// checked.
template <class C, class Math> class TokenAngles {
 public:
  TokenAngles(const RotaryShape& shape, const RotaryAngles& angles, const RotaryPositions& positions)
      : pairs(shape.rotary_dim / 2),
        shape_(shape),
        angles_(angles),
        positions_(positions),
        cos_(static_cast<size_t>(pairs)),
        sin_(static_cast<size_t>(pairs)) {}

  void look_up(int64_t batch, int64_t index) {
    const int64_t row = row_of(batch, index), step = angles_.column_stride;
    const C *from_cos = static_cast<const C*>(angles_.cos) + row, *from_sin = static_cast<const C*>(angles_.sin) + row;
    const Math sign = shape_.inverse ? Math(-1) : Math(1);
    for (int64_t i = 0; i < pairs; ++i) {
      cos_[static_cast<size_t>(i)] = to_float(from_cos[i * step]);
      sin_[static_cast<size_t>(i)] = sign * to_float(from_sin[i * step]);
    }
  }
  const Math* cos() const { return cos_.data(); }
  const Math* sin() const { return sin_.data(); }

  const int64_t pairs;

 private:
  // The first element of the token's row of cos and sin.
  int64_t row_of(int64_t batch, int64_t index) {
    if (angles_.per_token) return batch * angles_.batch_stride + index * angles_.row_stride;
    int64_t position = index, entry = batch;
    if (positions_.cu_seqlens) {
      while (positions_.cu_seqlens[sequence_ + 1] <= index) ++sequence_;
      entry = sequence_;
      position -= positions_.cu_seqlens[entry];
    }
    return (position + offset_of(positions_, entry)) * angles_.row_stride;
  }

  const RotaryShape& shape_;
  const RotaryAngles& angles_;
  const RotaryPositions& positions_;
  int64_t sequence_ = 0;
  std::vector<Math> cos_, sin_;
};

}  // namespace warpsmith::cpu
