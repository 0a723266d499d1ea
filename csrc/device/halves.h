#pragma once
#include <cstdint>
#include <type_traits>

#include "device/convert.h"
#include "device/platform.h"

// Words whose 16-bit halves are elements of their own. Any thread, no ordering.
namespace warpsmith::device {

// For each half of the result all bits as the highest bit of a byte: 0xffff or 0. `low` and `high` say which byte of x
// (0 to 3) or y (4 to 7). One instruction. PTX ISA 9.7.8 "prmt", whose selector takes the sign of a byte where bit 3 of
// a digit is set.
constexpr uint32_t spread_selector(uint32_t low, uint32_t high) { return (low + 8) * 0x11 | (high + 8) * 0x1100; }
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

// Which bytes of a word are at least `threshold` (0 to 256), in the highest bit of each byte. Three instructions for
// four comparisons; the other bits of the result are arbitrary.
struct BytesThreshold {
  uint32_t low;   // in each byte: the threshold, without 128 where it is as large
  uint32_t half;  // all ones: the threshold is below 128
};
inline BytesThreshold bytes_threshold(uint32_t threshold) {
  return {(threshold < 128 ? threshold : threshold - 128) * 0x01010101u, threshold < 128 ? 0xffffffffu : 0u};
}
__device__ __forceinline__ uint32_t bytes_reach(uint32_t word, const BytesThreshold& threshold) {
  // No byte borrows from the next one. The highest bit of the difference says whether the other 7 reach `low`.
  const uint32_t reached = (word | 0x80808080u) - threshold.low;
  return (word & reached) | ((word | reached) & threshold.half);  // one of the two is enough, or both are needed
}

// Gates: 1.0 (float16) in each half that passes, else 0. A product with a gate keeps or drops an element. Read as
// bfloat16, the 1.0 of float16 is 2^-7, so a kept bfloat16 becomes 2^-7 times itself, which is exact.
template <class T> constexpr float kGate = 1.0f;
template <> constexpr float kGate<bfloat16> = 0x1p-7f;

// The gates of two bytes of a word, bytes 2 `pair` and 2 `pair` + 1: whether they are at least the threshold (1 to 256)
// that byte_threshold() converts to the float16 1,023 + threshold. One permutation makes the float16 values 1,024 +
// byte, whose upper byte is that of the threshold. The differences are integers, which saturate to 0 or 1. PTX
// ISA 9.7.4 "sub".
inline uint32_t byte_threshold(uint32_t threshold) { return (0x63ffu + threshold) * 0x10001u; }
__device__ __forceinline__ uint32_t byte_gates(uint32_t word, int pair, uint32_t threshold) {
  const uint32_t bytes = __byte_perm(word, threshold, pair == 0 ? 0x5150u : 0x5352u);
#ifdef WARPSMITH_SIM
  const auto gate = [](uint32_t x, uint32_t y) {
    return to_float(float16{static_cast<uint16_t>(x)}) > to_float(float16{static_cast<uint16_t>(y)}) ? 0x3c00u : 0u;
  };
  return gate(bytes & 0xffff, threshold & 0xffff) | gate(bytes >> 16, threshold >> 16) << 16;
#else
  uint32_t gates;
  asm("sub.rn.sat.f16x2 %0, %1, %2;" : "=r"(gates) : "r"(bytes), "r"(threshold));
  return gates;
#endif
}

// Multiplies both halves: one instruction for two elements. A NaN becomes the canonical NaN 0x7fff. PTX ISA 9.7.4
// "mul".
template <class T> __device__ __forceinline__ uint32_t multiply_halves(uint32_t a, uint32_t b);

template <> __device__ __forceinline__ uint32_t multiply_halves<bfloat16>(uint32_t a, uint32_t b) {
#ifdef WARPSMITH_SIM
  return pack<bfloat16>(low_half<bfloat16>(a) * low_half<bfloat16>(b), high_half<bfloat16>(a) * high_half<bfloat16>(b));
#else
  uint32_t y;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
#endif
}
template <> __device__ __forceinline__ uint32_t multiply_halves<float16>(uint32_t a, uint32_t b) {
#ifdef WARPSMITH_SIM
  return pack<float16>(low_half<float16>(a) * low_half<float16>(b), high_half<float16>(a) * high_half<float16>(b));
#else
  uint32_t y;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
#endif
}

}  // namespace warpsmith::device
