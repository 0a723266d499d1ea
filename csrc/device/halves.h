#pragma once
#include <cstdint>

#include "device/platform.h"

// Words whose 16-bit halves are elements of their own. Any thread, no ordering.
namespace warpsmith::device {

// For each selected half all bits as its highest one: 0xffff or 0. `low` and `high` say which half of x (0, 1) or y
// (2, 3) the result's halves come from. One instruction. PTX ISA 9.7.8 "prmt", whose selector takes the sign of a byte
// where bit 3 of a digit is set.
constexpr uint32_t spread_selector(uint32_t low, uint32_t high) {
  return (2 * low + 9) * 0x11 | (2 * high + 9) * 0x1100;
}
__device__ __forceinline__ uint32_t spread_signs(uint32_t x, uint32_t y, uint32_t selector WARPSMITH_SITE) {
#ifdef WARPSMITH_SIM
  const uint64_t bytes = uint64_t{y} << 32 | x;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t digit = selector >> (4 * i) & 15;
    if (digit < 8) sim::fail("spread_signs: a digit of the selector lacks bit 3", site);
    if (bytes >> (8 * (digit & 7) + 7) & 1) result |= 0xffu << (8 * i);
  }
  return result;
#else
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "r"(selector));
  return result;
#endif
}

// Which halves of a word are at least `threshold` (0 to 65536), in the highest bit of each half. Three instructions for
// two comparisons; the other bits of the result are arbitrary.
struct HalvesThreshold {
  uint32_t low;   // in both halves: the threshold, without 32768 where it is as large
  uint32_t half;  // all ones: the threshold is below 32768
};
inline HalvesThreshold halves_threshold(uint32_t threshold) {
  return {(threshold < 0x8000 ? threshold : threshold - 0x8000) * 0x10001u, threshold < 0x8000 ? 0xffffffffu : 0u};
}
__device__ __forceinline__ uint32_t halves_reach(uint32_t word, const HalvesThreshold& threshold) {
  // No half borrows from the next one. The highest bit of the difference says whether the other 15 reach `low`.
  const uint32_t reached = (word | 0x80008000u) - threshold.low;
  return (word & reached) | ((word | reached) & threshold.half);  // one of the two is enough, or both are needed
}

}  // namespace warpsmith::device
