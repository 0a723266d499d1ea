#pragma once
#include "device/platform.h"

// Fast arithmetic with stated error. Any thread, no ordering. The host bodies are exact to rounding, so tests that run
// there see the algorithm and not the approximation. Error bounds: PTX ISA 9.7.3 "ex2", "lg2", "rcp", "rsqrt", "tanh".
namespace warpsmith::device {

// 2^x, subnormal results flushed to 0; max relative error 2^-22.
__device__ __forceinline__ float exp2(float x) {
#ifdef WARPSMITH_SIM
  const float y = exp2f(x);
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
  return log2f(fabsf(x) < 1.17549435e-38f ? 0.0f : x);
#else
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// 1 / x within 1 ulp; subnormal inputs and results are flushed to zero, keeping the sign.
__device__ __forceinline__ float reciprocal(float x) {
#ifdef WARPSMITH_SIM
  const float y = 1.0f / (fabsf(x) < 1.17549435e-38f ? copysignf(0.0f, x) : x);
  return fabsf(y) < 1.17549435e-38f ? copysignf(0.0f, y) : y;
#else
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// 1 / sqrt(x), max relative error 2^-22.9; subnormal inputs kept.
__device__ __forceinline__ float rsqrt(float x) { return rsqrtf(x); }

// tanh(x), max relative error 2^-11.
__device__ __forceinline__ float fast_tanh(float x) {
#ifdef WARPSMITH_SIM
  return tanhf(x);
#else
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

}  // namespace warpsmith::device
