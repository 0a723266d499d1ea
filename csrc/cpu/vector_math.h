#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "common/host_device.h"
#include "common/normal_distribution.h"

// Elementary functions that the compiler turns into vector code inside a loop: no branches, tables or calls. float: the
// bounds beside each function hold for every input (tests/sim/sim_math.cpp), infinities and NaN as the standard
// library's. double: the standard library's functions, for gradcheck. The coefficients are minimax fits as in
// common/normal_distribution.h. Needs IEEE arithmetic, i.e. no -ffast-math.
namespace warpsmith::math {

constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, held in the low bits

// e^x = 2^n e^r with n = shifted - kToInteger: e^r, for |x| up to 104.
WARPSMITH_HOST_DEVICE float exp_of_rest(float x, float shifted) {
  const float n = shifted - kToInteger;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts, the first of 10 bits
  float p = 0.00019919897569911594f;
  p = p * r + 0.0013947212667614335f;
  p = p * r + 0.00833326162723986f;
  p = p * r + 0.04166625398909833f;
  p = p * r + 0.16666666872302496f;
  p = p * r + 0.5f;
  return 1.0f + (r + r * r * p);
}

// e^x within 1 ulp, subnormal results included.
WARPSMITH_HOST_DEVICE float exp(float x) {
  // Beyond these the result is 0 or infinity; a NaN passes both comparisons.
  x = x < -104.0f ? -104.0f : x;
  x = x > 89.0f ? 89.0f : x;
  const float shifted = x * 1.44269504f + kToInteger;
  // 2^n as two factors, because n reaches from -150 to 128.
  const int32_t i = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(kToInteger);
  const int32_t half = i >> 1;
  return exp_of_rest(x, shifted) * std::bit_cast<float>((half + 127) << 23) *
         std::bit_cast<float>((i - half + 127) << 23);
}

// e^x for x <= 0, the exponential of most kernels, in two thirds of the instructions: within 1 ulp down to -87, below,
// where results soon leave the normal numbers, 0.
WARPSMITH_HOST_DEVICE float exp_nonpositive(float x) {
  const float shifted = x * 1.44269504f + kToInteger;
  // The shift leaves n alone of `shifted`. A product and not a sum of bits, so that a NaN stays one.
  const float power = std::bit_cast<float>((std::bit_cast<uint32_t>(shifted) << 23) + 0x3f800000u);
  return x < -87.0f ? 0.0f : exp_of_rest(x, shifted) * power;
}

// The natural logarithm within 1 ulp, of subnormal numbers too.
WARPSMITH_HOST_DEVICE float log(float x) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const bool tiny = x < std::numeric_limits<float>::min();
  const uint32_t bits = std::bit_cast<uint32_t>(tiny ? x * 0x1p23f : x);
  // The mantissa then lies in [sqrt(1/2), sqrt(2)).
  const int32_t exponent = static_cast<int32_t>(bits - 0x3f3504f3u) >> 23;
  const float f = std::bit_cast<float>(bits - (static_cast<uint32_t>(exponent) << 23)) - 1.0f;
  const float k = static_cast<float>(exponent) - (tiny ? 23.0f : 0.0f);
  float p = 0.0675751087083345f;
  p = p * f - 0.11694319152895605f;
  p = p * f + 0.1189353133518231f;
  p = p * f - 0.12403087597626311f;
  p = p * f + 0.1421855216924682f;
  p = p * f - 0.1666809006649754f;
  p = p * f + 0.20002167176031124f;
  p = p * f - 0.2500000871806298f;
  p = p * f + 0.33333311964781237f;
  const float square = f * f;
  const float y = square * f * p - k * 2.12194440e-4f - 0.5f * square + f + k * 0.693359375f;
  const float special = x == 0.0f ? -kInfinity : std::numeric_limits<float>::quiet_NaN();
  return x > 0.0f ? (x < kInfinity ? y : x) : special;
}

// tanh within 2 ulp.
WARPSMITH_HOST_DEVICE float tanh(float x) {
  const float a = std::fabs(x), z = x * x;
  float p = 0.002142961628533472f;
  p = p * z - 0.008177398004693689f;
  p = p * z + 0.021700703131071863f;
  p = p * z - 0.053946763047078766f;
  p = p * z + 0.13333206008298795f;
  p = p * z - 0.3333333080273233f;
  const float near_zero = x + x * z * p;
  const float far = std::copysign(1.0f - 2.0f / (exp(2.0f * a) + 1.0f), x);
  return a < 0.625f ? near_zero : far;
}

// e^(-x^2 / 2): the standard normal density but for its factor; normal_cdf needs it as well.
WARPSMITH_HOST_DEVICE float normal_bell(float x) { return exp_nonpositive(-0.5f * (x * x)); }

// The standard normal distribution function; `bell`: normal_bell(x). Within 4 ulp above -1; below, the relative error
// is that of x^2 / 2: at most 2^-24 (10 + x^2 / 2), down to -13, below which there are no normal numbers. One
// polynomial for all x, where device code has two (common/normal_distribution.h): a vector would compute both. It is
// q(u) of e^(x^2 / 2) Phi(-|x|) = (1 - u) q(u), u = 0.35 |x| / (1 + 0.35 |x|): q begins with exactly 1/2 and stays
// above 0.14, so nothing cancels far out; fitted to 4e-8 by least squares with Lawson's weights.
WARPSMITH_HOST_DEVICE float normal_cdf(float x, float bell) {
  // Not more than 20, where infinity would give NaN, as integers: that is one instruction, of floats it is several.
  const int32_t bits = std::bit_cast<int32_t>(std::fabs(x)), limit = std::bit_cast<int32_t>(20.0f);
  const float a = 0.35f * std::bit_cast<float>(bits < limit ? bits : limit), u = a / (1.0f + a);
  float q = -0.02887466922402382f;
  q = q * u + 0.08824428170919418f;
  q = q * u - 0.06262113898992538f;
  q = q * u - 0.017182931303977966f;
  q = q * u - 0.06369176506996155f;
  q = q * u + 0.10252054780721664f;
  q = q * u + 0.2610608637332916f;
  q = q * u - 0.6398329138755798f;
  q = q * u + 0.5f;
  const float tail = bell * (q - u * q);
  return x > 0.0f ? 1.0f - tail : tail;
}

// The error function within 2 ulp.
WARPSMITH_HOST_DEVICE float erf(float x) {
  const float a = std::fabs(x), z = x * x;
  float p = 7.853854292556804e-05f;
  p = p * z - 0.0008010191486143223f;
  p = p * z + 0.005188327442136249f;
  p = p * z - 0.02685381180699319f;
  p = p * z + 0.11283585145543093f;
  p = p * z - 0.37612625823961693f;
  p = p * z + 0.12837916572667063f;
  const float tail = exp(-z) * normal_tail(1.0f / (1.0f + kNormalTailSlope * 1.41421356f * a));
  return a < 1.0f ? x + x * p : std::copysign(1.0f - 2.0f * tail, x);
}

// 1 / (1 + e^-x) within 2.5 ulp.
WARPSMITH_HOST_DEVICE float sigmoid(float x) {
  const float e = exp(-std::fabs(x));
  return (x >= 0.0f ? 1.0f : e) / (1.0f + e);
}

inline double exp(double x) { return std::exp(x); }
inline double exp_nonpositive(double x) { return std::exp(x); }
inline double log(double x) { return std::log(x); }
inline double tanh(double x) { return std::tanh(x); }
inline double normal_bell(double x) { return std::exp(-0.5 * x * x); }
inline double normal_cdf(double x, double) { return 0.5 * std::erfc(-0.70710678118654752440 * x); }
inline double erf(double x) { return std::erf(x); }
inline double sigmoid(double x) {
  const double e = std::exp(-std::fabs(x));
  return (x >= 0.0 ? 1.0 : e) / (1.0 + e);
}

}  // namespace warpsmith::math
