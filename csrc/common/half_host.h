#pragma once
#include <bit>
#include <cstdint>

#include "common/half.h"

// Conversions of the CPU kernels. Plain C++ that the compiler vectorises; NaN stays NaN, rounding is to nearest even.
namespace warpsmith {

// Before 13, g++ knows _Float16 on x86 but not on aarch64, whose own name for it is __fp16.
#if defined(__aarch64__) && !defined(__clang__) && __GNUC__ < 13
using HostHalf = __fp16;
#else
using HostHalf = _Float16;
#endif

inline float to_float(float x) { return x; }
inline double to_float(double x) { return x; }
inline float to_float(bfloat16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
inline float to_float(float16 x) { return static_cast<float>(std::bit_cast<HostHalf>(x.bits)); }

// The type in which CPU kernels compute with a storage type: double for double, else float.
template <class T> using Arithmetic = decltype(to_float(T{}));

template <class T> T from_float(float x);
template <> inline float from_float<float>(float x) { return x; }
template <> inline float16 from_float<float16>(float x) { return {std::bit_cast<uint16_t>(static_cast<HostHalf>(x))}; }
template <> inline bfloat16 from_float<bfloat16>(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint32_t nearest_even = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  // On bits, not `x != x`: -ffast-math style flags must not be able to fold it away.
  return {static_cast<uint16_t>((u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : nearest_even)};
}
// Up or down with the probability of the part that is dropped, by the low 16 bits of `random`: as
// device/stochastic_rounding.h.
inline bfloat16 round_stochastic(float x, uint32_t random) {
  const uint32_t u = std::bit_cast<uint32_t>(x), magnitude = u & 0x7fffffff;
  const uint32_t rounded = (u + (magnitude < 0x7f800000 ? random & 0xffff : 0)) >> 16;
  return {static_cast<uint16_t>(magnitude > 0x7f800000 ? 0x7fc0 : rounded)};
}
template <class T> T from_float(double x);
template <> inline double from_float<double>(double x) { return x; }

}  // namespace warpsmith
