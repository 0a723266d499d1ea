#pragma once
#include <bit>
#include <cstdint>

#include "common/float8.h"
#include "common/float8_scale.h"
#include "common/half_host.h"

// Conversions of the CPU kernels between 8-bit floats and float. Plain C++ that the compiler vectorises.
namespace warpsmith {

template <class F> struct HostFloat8;
template <> struct HostFloat8<float8_e4m3> {
  static constexpr int mantissa = 3, bias = 7;
  static constexpr Float8Limits limits = kE4m3Limits;
};
template <> struct HostFloat8<float8_e5m2> {
  static constexpr int mantissa = 2, bias = 15;
  static constexpr Float8Limits limits = kE5m2Limits;
};

// To nearest even; what is larger than the largest finite value, infinity included, becomes that value. Not for NaN.
template <class F> inline uint8_t round_float8(float x) {
  using H = HostFloat8<F>;
  const uint32_t u = std::bit_cast<uint32_t>(x), any = u & 0x7fffffff;
  const uint32_t magnitude = any < H::limits.largest_bits ? any : H::limits.largest_bits;
  const uint32_t last = magnitude >> (23 - H::mantissa) & 1;
  const uint32_t normal =
      ((magnitude + (1u << (22 - H::mantissa)) - 1 + last) >> (23 - H::mantissa)) - ((127u - H::bias) << H::mantissa);
  // In units of the last place of the subnormals. Added to 2^23, the last bit of a float is 1.
  const float units = std::bit_cast<float>(magnitude) *
                      std::bit_cast<float>(static_cast<uint32_t>(127 + H::bias - 1 + H::mantissa) << 23);
  const uint32_t subnormal = std::bit_cast<uint32_t>(units + 0x1p23f) & 0xff;
  const bool is_subnormal = magnitude < static_cast<uint32_t>(128 - H::bias) << 23;
  return static_cast<uint8_t>((is_subnormal ? subnormal : normal) | (u >> 24 & 0x80));
}

// Exact. NaN stays NaN. As the upper bits of a float the value is a power of two too small, subnormal or not.
inline float to_float(float8_e5m2 x) {
  const uint32_t magnitude = x.bits & 0x7f, sign = static_cast<uint32_t>(x.bits & 0x80) << 24;
  const uint32_t finite = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude << 21) * 0x1p112f);
  const uint32_t special = magnitude == 0x7c ? 0x7f800000u : 0x7fc00000u;
  return std::bit_cast<float>((magnitude < 0x7c ? finite : special) | sign);
}
inline float to_float(float8_e4m3 x) {
  const uint32_t magnitude = x.bits & 0x7f, sign = static_cast<uint32_t>(x.bits & 0x80) << 24;
  const uint32_t finite = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude << 20) * 0x1p120f);
  return std::bit_cast<float>((magnitude < 0x7f ? finite : 0x7fc00000u) | sign);
}

}  // namespace warpsmith
