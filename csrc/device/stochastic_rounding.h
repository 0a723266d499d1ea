#pragma once
#include <cstdint>

#include "common/half.h"
#include "device/platform.h"

// Rounds float to bfloat16 up or down with probability proportional to the distance, from 16 random bits: the
// expectation of the result is x. NaN becomes the canonical NaN, infinities stay, and a finite value may round to
// infinity only above the largest bfloat16. Any thread, no ordering.
namespace warpsmith::device {

__device__ __forceinline__ bfloat16 round_stochastic(float x, uint32_t random) {
  const uint32_t sum = __float_as_uint(x) + (random & 0xffffu);  // no carry reaches an infinity's upper half
  return {static_cast<uint16_t>(x != x ? 0x7fffu : sum >> 16)};
}

// Of two that are not NaN, `low` in the low half. `random_*`: below 2^16.
__device__ __forceinline__ uint32_t pack_stochastic(float low, float high, uint32_t random_low, uint32_t random_high) {
  return __byte_perm(__float_as_uint(low) + random_low, __float_as_uint(high) + random_high, 0x7632);
}

}  // namespace warpsmith::device
