#pragma once
#include <cstdint>

#include "common/vectorize.h"
#include "kernels/rope/rotary.h"

namespace warpsmith {

// The element of cos and sin at which the angles of tokens begin, token by token in ascending order. Positions have
// been checked.
class RotaryRows {
 public:
  RotaryRows(const RotaryAngles& angles, const RotaryPositions& positions) : angles_(angles), positions_(positions) {}

  int64_t operator()(int64_t batch, int64_t index);

 private:
  const RotaryAngles& angles_;
  const RotaryPositions& positions_;
  int64_t sequence_ = 0;
};

}  // namespace warpsmith
