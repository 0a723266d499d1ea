#pragma once
#include <cstdint>

#include "common/philox.h"

// The dropout mask, which is never stored: forward and backward make it again from a seed tensor of two int64, [seed,
// offset], drawn from torch's generator (python/warpsmith/ops/_dropout.py). The same bits on CPU, CUDA and in
// python/warpsmith/reference/dropout.py.
//
// Element e (the linear index in the logical, contiguous tensor) takes lane e % 8 of the Philox4x32-10 call with
// counter (e / 8, offset) and key seed; lanes are the 16-bit halves of the four words, low half first. It is kept where
// lane >= threshold, and then multiplied by scale = 1 / (1 - p).
namespace warpsmith {

constexpr int kDropoutLanes = 8;  // elements of one Philox call

struct Dropout {
  const int64_t* seed;  // [2], {seed, offset}, on the kernel's device; null: everything is kept as it is
  uint32_t threshold;   // p * 65536, rounded, so that 65536 drops everything
  double scale;         // 1 / (1 - p); 0 for p = 1
};

inline Dropout make_dropout(const int64_t* seed, double p) {
  return {seed, static_cast<uint32_t>(p * 65536 + 0.5), p < 1 ? 1 / (1 - p) : 0.0};
}

// The 8 lanes of elements [8 * call, 8 * call + 8).
WARPSMITH_HOST_DEVICE PhiloxCounter dropout_lanes(uint64_t seed, uint64_t offset, uint64_t call) {
  return philox({{static_cast<uint32_t>(call), static_cast<uint32_t>(call >> 32), static_cast<uint32_t>(offset),
                  static_cast<uint32_t>(offset >> 32)}},
                seed);
}

// Whether the element of a lane (0 to 7) is kept. Where `lane` is a constant this costs an instruction and a
// comparison.
WARPSMITH_HOST_DEVICE bool dropout_keeps(const PhiloxCounter& lanes, int lane, uint32_t threshold) {
  return (lane % 2 ? lanes.word[lane / 2] >> 16 : lanes.word[lane / 2] & 0xffff) >= threshold;
}

}  // namespace warpsmith
