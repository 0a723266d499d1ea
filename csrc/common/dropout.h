#pragma once
#include <cstdint>

#include "common/philox.h"

// The dropout mask. It is never stored: forward and backward generate it from a seed tensor of two int64, [seed,
// offset], drawn from torch's generator (python/warpsmith/_core/dropout.py). CPU, CUDA and
// python/warpsmith/reference/dropout.py give the same bits.
//
// Element e (the linear index in the logical, contiguous tensor) takes lane e % 8 of the Philox4x32-10 call with
// counter (e / 8, offset) and key seed. Lanes are the 16-bit halves of the four words, low half first. An element is
// kept, and multiplied by scale = 1 / (1 - p), if lane >= threshold.
namespace warpsmith {

constexpr int kDropoutLanes = 8;  // elements per Philox call

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

// Whether the element of a lane (0 to 7) is kept. If `lane` is a constant, this takes one instruction and a comparison.
WARPSMITH_HOST_DEVICE bool dropout_keeps(const PhiloxCounter& lanes, int lane, uint32_t threshold) {
  return (lane % 2 ? lanes.word[lane / 2] >> 16 : lanes.word[lane / 2] & 0xffff) >= threshold;
}

}  // namespace warpsmith
