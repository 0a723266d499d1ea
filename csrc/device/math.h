#pragma once
#include "common/normal_distribution.h"
#include "device/platform.h"

// Fast arithmetic with stated error. Any thread, no ordering. The host bodies are exact to rounding or, where a test
// asks for it (sim::Options::approximation), as far off as the bound allows. Error bounds: PTX ISA 9.7.3 "ex2", "lg2",
// "rcp", "rsqrt", "tanh".
namespace warpsmith::device {

// 2^x, subnormal results flushed to 0; max relative error 2^-22.
__device__ __forceinline__ float exp2(float x) {
#ifdef WARPSMITH_SIM
  const float y = sim::approximate(std::exp2(static_cast<double>(x)), x, 0x1p-22);
  return y < 1.17549435e-38f ? 0.0f : y;
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// log2(x), subnormal inputs taken as 0; absolute error 2^-22 for x in [0.5, 2], relative 2^-22 elsewhere.
__device__ __forceinline__ float log2(float x) {
#ifdef WARPSMITH_SIM
  const double exact = std::log2(fabsf(x) < 1.17549435e-38f ? 0.0 : static_cast<double>(x));
  return x >= 0.5f && x <= 2 ? sim::approximate(exact, x, 0, 0x1p-22) : sim::approximate(exact, x, 0x1p-22);
#else
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// 1 / x within 1 ulp; subnormal inputs and results are flushed to zero, keeping the sign.
__device__ __forceinline__ float reciprocal(float x) {
#ifdef WARPSMITH_SIM
  const double exact = 1 / static_cast<double>(fabsf(x) < 1.17549435e-38f ? copysignf(0.0f, x) : x);
  const double ulp = std::isfinite(exact) && exact != 0 ? std::ldexp(1.0, std::ilogb(exact) - 23) : 0;
  const float y = sim::approximate(exact, x, 0, ulp);
  return fabsf(y) < 1.17549435e-38f ? copysignf(0.0f, y) : y;
#else
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// 1 / sqrt(x), max relative error 2^-22.9; subnormal inputs kept.
__device__ __forceinline__ float rsqrt(float x) { return rsqrtf(x); }

// The smaller of both, NaN if one is. PTX ISA 9.7.3 "min".
__device__ __forceinline__ float smaller_or_nan(float a, float b) {
#ifdef WARPSMITH_SIM
  return a != a || b != b ? std::numeric_limits<float>::quiet_NaN() : fminf(a, b);
#else
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#endif
}

// a * b rounded, whatever is added to it: nvcc would make one fused operation of a product and a sum.
__device__ __forceinline__ float rounded_product(float a, float b) {
#ifdef WARPSMITH_SIM
  return a * b;
#else
  return __fmul_rn(a, b);
#endif
}

// What follows is composed of the above. Errors are those of the composition on top of the primitives' own.

// e^x, subnormal results flushed to 0; relative error 2^-22 + 2^-23 |x|.
__device__ __forceinline__ float exp(float x) { return exp2(x * 1.44269504f); }

// 1 / (1 + e^-x), subnormal results flushed to 0; relative error 2^-21, and 2^-23 |x| more below 0. Two of the four
// instructions are special functions.
__device__ __forceinline__ float sigmoid(float x) { return reciprocal(1.0f + exp2(x * -1.44269504f)); }

// tanh(x), relative error 2^-21. tanh.approx is one instruction and 2^-11.
__device__ __forceinline__ float tanh(float x) {
  const float a = fabsf(x), z = x * x;
  float p = 0.002142961628533472f;
  p = p * z - 0.008177398004693689f;
  p = p * z + 0.021700703131071863f;
  p = p * z - 0.053946763047078766f;
  p = p * z + 0.13333206008298795f;
  p = p * z - 0.3333333080273233f;
  const float far = 1.0f - 2.0f * reciprocal(1.0f + exp2(2.88539008f * a));
  return a < 0.625f ? x + x * z * p : copysignf(far, x);
}

// e^(-x^2 / 2): the standard normal density but for its factor; normal_cdf needs it as well.
__device__ __forceinline__ float normal_bell(float x) { return exp2(-0.72134752f * x * x); }

// The standard normal distribution function for values that are rounded to 16 bits: error 2^-21 above 0 (0.5 ulp of
// float16 is 2^-12), relative error 2^-20 + 2^-23 x^2 below. `bell`: normal_bell(x).
__device__ __forceinline__ float fast_normal_cdf(float x, float bell) {
  const float tail = bell * normal_tail(reciprocal(1.0f + kNormalTailSlope * fabsf(x)));
  return x > 0.0f ? 1.0f - tail : tail;
}

// The same for float, with a second polynomial near 0: relative error 2^-21 above -1.
__device__ __forceinline__ float normal_cdf(float x, float bell) {
  return fabsf(x) < 1.0f ? 0.5f + x * normal_center(x * x) : fast_normal_cdf(x, bell);
}

}  // namespace warpsmith::device
