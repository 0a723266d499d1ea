#pragma once
#include <cstdint>

#include "common/host_device.h"

// 8-bit states. Each block of 256 elements, in memory order, has a float32 scale, which is its largest magnitude. Each
// element has a code: the code whose dynamic_value is nearest to element / scale. The CPU and kernels share this
// arithmetic. Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022.
namespace warpsmith {

constexpr int kQuantBlock = 256;
constexpr int kCodes = 256;
constexpr int64_t quant_blocks(int64_t numel) { return (numel + kQuantBlock - 1) / kQuantBlock; }

// The value of a code, ascending in [-1, 1] (signed) or [0, 1]. The values are 0, 1 and, in each of the seven decades
// below 1, the middles of n equal parts of [0.1, 1] of the decade. n doubles from decade to decade: from 1 to 64 for
// each sign, or from 2 to 128. Each value is one rounding of an exact fraction, so every machine has the same bits.
constexpr WARPSMITH_HOST_DEVICE float dynamic_value(int code, bool is_signed) {
  const int zero = is_signed ? 127 : 0;
  if (code == zero) return 0.0f;
  if (code == kCodes - 1) return 1.0f;
  const int first = is_signed ? 1 : 2;  // n of the lowest decade
  const int place = (code > zero ? code - zero : zero - code) - 1 + first;
  int n = first, denominator = 20 * 1000000;
  while (2 * n <= place) {
    n *= 2;
    denominator /= 10;
  }
  const double value =
      static_cast<double>(2 * n + 18 * (place - n) + 9) / (static_cast<double>(n) * static_cast<double>(denominator));
  return static_cast<float>(code > zero ? value : -value);
}

// The border halfway between a code and the next. An element on the border gets the lower code.
constexpr WARPSMITH_HOST_DEVICE float dynamic_border(int code, bool is_signed) {
  if (code == kCodes - 1) return 1.0f;
  return (dynamic_value(code, is_signed) + dynamic_value(code + 1, is_signed)) * 0.5f;
}

// The code of x, from the borders of all codes. An unsigned code is 0 only for x = 0: if a second moment were rounded
// to 0 while the first moment is not, the step could have any size.
WARPSMITH_HOST_DEVICE int dynamic_code(const float* borders, float x, bool is_signed) {
  int code = 0;
  for (int half = kCodes / 2; half > 0; half /= 2) code += borders[code + half - 1] < x ? half : 0;
  return !is_signed && code == 0 && x > 0.0f ? 1 : code;
}

// value / scale; 0 if all elements of the block are 0.
WARPSMITH_HOST_DEVICE float scaled(float value, float scale) { return scale == 0.0f ? 0.0f : value / scale; }

}  // namespace warpsmith
