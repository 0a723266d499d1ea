#pragma once
#include <cstdint>

#include "kernels/rope/rotary.h"

namespace warpsmith {

// In place a loop reads and writes the same elements, each in one turn only: nothing is carried from turn to turn.
#if defined(__clang__)
#define WARPSMITH_INDEPENDENT_TURNS _Pragma("clang loop vectorize(assume_safety)")
#else
#define WARPSMITH_INDEPENDENT_TURNS _Pragma("GCC ivdep")
#endif

// The element of cos and sin at which the angles of tokens begin, token by token in ascending order. Positions have
// been checked.
class RotaryRows {
 public:
  RotaryRows(const RotaryShape& shape, const RotaryAngles& angles, const RotaryPositions& positions)
      : shape_(shape), angles_(angles), positions_(positions) {}

  int64_t operator()(int64_t batch, int64_t index);

 private:
  const RotaryShape& shape_;
  const RotaryAngles& angles_;
  const RotaryPositions& positions_;
  int64_t sequence_ = 0;
};

}  // namespace warpsmith
