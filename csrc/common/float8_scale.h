#pragma once
#include <bit>
#include <cstdint>

#include "common/host_device.h"

// The rule by which a scale follows from the largest magnitude, for kernels and CPU loops. A value is stored as x /
// scale, rounded to an 8-bit float.
namespace warpsmith {

// An 8-bit format, as the rule and the conversions need it.
struct Float8Limits {
  uint32_t largest_bits;  // the largest finite value, as the bits of a float: 448 or 57344
  int largest_exponent;   // of that value, biased as in a float. The mantissa of both is 1.75
  bool has_infinity;
};
constexpr Float8Limits kE4m3Limits{0x43e00000u, 127 + 8, false};
constexpr Float8Limits kE5m2Limits{0x47600000u, 127 + 15, true};

namespace detail {
WARPSMITH_HOST_DEVICE float float_of(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return std::bit_cast<float>(bits);
#endif
}
WARPSMITH_HOST_DEVICE uint32_t bits_of(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  return std::bit_cast<uint32_t>(x);
#endif
}
}  // namespace detail

// Where the producer of y writes the rows of y as 8-bit floats of e4m3 by powers of two, with the bits that
// quantize_fp8(y, "row") gives.
struct Float8Rows {
  uint8_t* data = nullptr;    // [rows, columns], contiguous; null: not wanted
  float* scale = nullptr;     // [rows]
  int64_t* counts = nullptr;  // [2], to which is added: saturated elements (none), elements that are not finite
};

constexpr uint32_t kLeastScaleBits = 1u << 23;  // 2^-126: a smaller scale would have no finite reciprocal

// The least scale with amax / scale <= the format's largest value, so that nothing saturates: a power of two, or the
// least float. At least 2^-126. 1 for amax = 0. amax must be finite and not negative.
WARPSMITH_HOST_DEVICE float scale_of_amax(float amax, Float8Limits limits, bool power_of_two) {
  const uint32_t bits = detail::bits_of(amax);
  if (bits == 0) return 1.0f;
  uint32_t scale;
  if (power_of_two) {
    const int exponent =
        static_cast<int>(bits >> 23) - limits.largest_exponent + ((bits & 0x7fffffu) > 0x600000u ? 1 : 0) + 127;
    scale = exponent > 0 ? static_cast<uint32_t>(exponent) << 23 : 0;
  } else {
    const float largest = detail::float_of(limits.largest_bits);
    scale = detail::bits_of(amax / largest);
    if (amax / detail::float_of(scale) > largest) ++scale;  // it was rounded down
  }
  return detail::float_of(scale > kLeastScaleBits ? scale : kLeastScaleBits);
}

// Whether x * reciprocal_of(scale) has the bits of x / scale: a power of two whose reciprocal is a normal number.
WARPSMITH_HOST_DEVICE bool has_exact_reciprocal(float scale) {
  const uint32_t bits = detail::bits_of(scale);
  return (bits & 0x7fffffu) == 0 && bits >= kLeastScaleBits && bits <= 253u << 23;
}
WARPSMITH_HOST_DEVICE float reciprocal_of(float scale) {
  return detail::float_of((254u << 23) - detail::bits_of(scale));
}

}  // namespace warpsmith
