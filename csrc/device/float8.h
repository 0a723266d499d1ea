#pragma once
#include <cstdint>
#include <type_traits>

#include "common/float8.h"
#include "device/convert.h"

// Conversions between 8-bit floats and float. Any thread may call, no ordering. One instruction for two values from
// sm_89 on (PTX ISA 9.7.9 "cvt", .satfinite), arithmetic on bits before and on the host: the results are the same.
namespace warpsmith::device {
namespace detail {

template <class T> struct Float8Format;
template <> struct Float8Format<float8_e4m3> {
  static constexpr int mantissa = 3, bias = 7;
  static constexpr uint32_t largest = 0x7e, nan = 0x7f;
};
template <> struct Float8Format<float8_e5m2> {
  static constexpr int mantissa = 2, bias = 15;
  static constexpr uint32_t largest = 0x7b, nan = 0x7f;
};

// |x| in units of the last place of the subnormals, which is exact, for |x| below the smallest normal number.
template <class T> __device__ __forceinline__ float float8_subnormal_units(float magnitude) {
  using F = Float8Format<T>;
  return magnitude * __uint_as_float(static_cast<uint32_t>(127 + F::bias - 1 + F::mantissa) << 23);
}
// Bits of a float at or above the smallest normal number, `added` rounding it, moved to the format and saturated.
template <class T> __device__ __forceinline__ uint32_t float8_of_normal(uint32_t magnitude, uint32_t added) {
  using F = Float8Format<T>;
  const uint32_t moved = ((magnitude + added) >> (23 - F::mantissa)) - ((127u - F::bias) << F::mantissa);
  return moved < F::largest ? moved : F::largest;
}
template <class T> __device__ __forceinline__ bool float8_is_subnormal(uint32_t magnitude) {
  return magnitude < static_cast<uint32_t>(128 - Float8Format<T>::bias) << 23;
}

template <class T> __device__ __forceinline__ uint8_t round_float8(float x) {
  using F = Float8Format<T>;
  const uint32_t u = __float_as_uint(x), magnitude = u & 0x7fffffffu, sign = u >> 24 & 0x80u;
  if (magnitude > 0x7f800000u) return F::nan;
  uint32_t rounded;
  if (float8_is_subnormal<T>(magnitude)) {
    // Added to 2^23, the last bit of a float is 1: the addition rounds to nearest even.
    const float sum = __fadd_rn(float8_subnormal_units<T>(__uint_as_float(magnitude)), 0x1p23f);
    rounded = __float_as_uint(sum) & 0xffu;
  } else {
    const uint32_t last = magnitude >> (23 - F::mantissa) & 1;
    rounded = float8_of_normal<T>(magnitude, (1u << (22 - F::mantissa)) - 1 + last);
  }
  return static_cast<uint8_t>(rounded | sign);
}

}  // namespace detail

// Exact. NaN stays NaN.
__device__ __forceinline__ float to_float(float8_e5m2 x) {
  return to_float(float16{static_cast<uint16_t>(x.bits << 8)});
}
__device__ __forceinline__ float to_float(float8_e4m3 x) {
#if !defined(WARPSMITH_SIM) && __CUDA_ARCH__ >= 890
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(x.bits)));
  return to_float(float16{static_cast<uint16_t>(halves)});
#else
  if ((x.bits & 0x7f) == 0x7f) return __uint_as_float(0x7fffe000u);
  // As the bits of a float16 the value is 2^8 too small, subnormal or not.
  const auto half = static_cast<uint16_t>((x.bits & 0x80) << 8 | (x.bits & 0x7f) << 7);
  return to_float(float16{half}) * 256.0f;
#endif
}

// To nearest even. What is larger than the largest finite value, infinity included, becomes that value; NaN becomes
// 0x7f.
template <> __device__ __forceinline__ float8_e4m3 from_float<float8_e4m3>(float x) {
#if !defined(WARPSMITH_SIM) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
  return {static_cast<uint8_t>(pair)};
#else
  return {detail::round_float8<float8_e4m3>(x)};
#endif
}
template <> __device__ __forceinline__ float8_e5m2 from_float<float8_e5m2>(float x) {
#if !defined(WARPSMITH_SIM) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
  return {static_cast<uint8_t>(pair)};
#else
  return {detail::round_float8<float8_e5m2>(x)};
#endif
}

// Four values in one register, x0 in the lowest byte: the operand layout of mma and wgmma. Rounded as by from_float.
template <class T> __device__ __forceinline__ uint32_t pack(float x0, float x1, float x2, float x3) {
  static_assert(std::is_same_v<T, float8_e4m3> || std::is_same_v<T, float8_e5m2>);
#if !defined(WARPSMITH_SIM) && __CUDA_ARCH__ >= 890
  uint16_t low, high;
  if constexpr (std::is_same_v<T, float8_e4m3>) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(x1), "f"(x0));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(x3), "f"(x2));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(low) : "f"(x1), "f"(x0));
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(high) : "f"(x3), "f"(x2));
  }
  return low | static_cast<uint32_t>(high) << 16;
#else
  return from_float<T>(x0).bits | static_cast<uint32_t>(from_float<T>(x1).bits) << 8 |
         static_cast<uint32_t>(from_float<T>(x2).bits) << 16 | static_cast<uint32_t>(from_float<T>(x3).bits) << 24;
#endif
}

}  // namespace warpsmith::device
