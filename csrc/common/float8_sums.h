#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

#include "common/vectorize.h"

// How Hopper's tensor cores add products of 8-bit floats (wgmma, 32 terms an instruction), for the CPU and the
// simulated kernels. The sum so far and the 32 products are aligned to the largest exponent among them, cut behind 13
// fraction bits, added exactly, and the sum is cut to 13 fraction bits again; cut towards zero each time. The exponent
// of a product is the sum of its factors' exponents, and a zero has none. Source: Xie et al., MMA-Sim (2025), its model
// of wgmma on Hopper, which they compared with the card.
namespace warpsmith {

constexpr int kFloat8Terms = 32;

// The loops' indices are constants. Checked, they were most of the time of simulated products.
#if defined(__SANITIZE_ADDRESS__)
#define WARPSMITH_FLOAT8_LOOPS __attribute__((no_sanitize("address"), no_sanitize("undefined"), optimize("O2")))
#else
#define WARPSMITH_FLOAT8_LOOPS WARPSMITH_VECTORIZE
#endif

// 2 to the exponent of a value; of subnormals the exponent is that of `smallest`, the smallest normal one. 0 of 0.
inline float float8_power(float value, float smallest) {
  const float power = std::bit_cast<float>(std::bit_cast<uint32_t>(value) & 0x7f800000u);
  return value == 0 ? 0 : power < smallest ? smallest : power;
}

// sums[c] and the products a[k] b[k, c] over 32 k; rows of b and of its powers `stride` apart. Powers are those of
// float8_power.
constexpr int kFloat8Columns = 64;
WARPSMITH_FLOAT8_LOOPS static void add_float8_products(float* sums, const float* a, const float* a_powers,
                                                       const float* b, const float* b_powers, int stride) {
  float top[kFloat8Columns], unit[kFloat8Columns], plain[kFloat8Columns];
  int total[kFloat8Columns];
  for (int c = 0; c < kFloat8Columns; ++c) {
    top[c] = std::bit_cast<float>(std::bit_cast<uint32_t>(sums[c]) & 0x7f800000u);
    plain[c] = sums[c];
  }
  for (int k = 0; k < kFloat8Terms; ++k)
    for (int c = 0; c < kFloat8Columns; ++c) {
      const float power = a_powers[k] * b_powers[k * stride + c];
      top[c] = power > top[c] ? power : top[c];
      plain[c] += a[k] * b[k * stride + c];
    }
  constexpr float kUnits = 1 << 13, kSmallest = -0x1p20f, kLargest = 0x1p20f;  // beyond: infinite or NaN
  for (int c = 0; c < kFloat8Columns; ++c) {
    unit[c] = top[c] > 0 ? kUnits / top[c] : 0;
    const float units = sums[c] * unit[c];
    total[c] = kSmallest < units && units < kLargest ? static_cast<int>(units) : 0;
  }
  for (int k = 0; k < kFloat8Terms; ++k)
    for (int c = 0; c < kFloat8Columns; ++c) {
      const float units = a[k] * b[k * stride + c] * unit[c];
      total[c] += kSmallest < units && units < kLargest ? static_cast<int>(units) : 0;
    }
  for (int c = 0; c < kFloat8Columns; ++c) {
    const float sum = static_cast<float>(total[c]) * (top[c] / kUnits);
    const float cut = std::bit_cast<float>(std::bit_cast<uint32_t>(sum) & ~0x3ffu);
    sums[c] = std::abs(plain[c]) <= 0x1p126f ? cut : plain[c];  // not where a term is infinite or NaN
  }
}

}  // namespace warpsmith
