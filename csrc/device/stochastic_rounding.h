#pragma once
#include <cstdint>

#include "common/half.h"
#include "device/platform.h"

// Rounds float to bfloat16 up or down with probability proportional to the distance, from 16 random bits: the
// expectation of the result is x. NaN becomes the canonical NaN, infinities stay, and a finite value may round to
// infinity only above the largest bfloat16. Any thread, no ordering.
namespace warpsmith::device {

__device__ __forceinline__ bfloat16 round_stochastic(float x, uint32_t random) {
  const uint32_t u = __float_as_uint(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
  if ((u & 0x7fffffffu) == 0x7f800000u) return {static_cast<uint16_t>(u >> 16)};
  return {static_cast<uint16_t>((u + (random & 0xffffu)) >> 16)};
}

}  // namespace warpsmith::device
