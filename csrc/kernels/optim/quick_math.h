#pragma once
#include "device/math.h"

// Square root and division of kernels, without a branch: the compiler's own begin with a test for numbers out of range
// and a jump, at which a thread waits for one element after another. What is here has the compiler's bits wherever its
// test passes:
//
// - root: from 2^-101 on. Below, within 2 units in the last place; 0 of 0.
// - quotient: for a divisor in [2^-126, 2^126] and a numerator above 2^-100 in magnitude, where the quotient is a
// normal
//   number. Of smaller numerators within 2 units in the last place. 0 of 0.
//
// Whatever else should be a number or an infinity is NaN: the caller then computes again with IeeeMath. Source of the
// corrections: P. Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990.
namespace warpsmith::optim {

struct QuickMath {
  __device__ __forceinline__ static float root(float x) {
    const float inverse = device::smaller_or_nan(device::rsqrt(x), 0x1p75f), guess = x * inverse;  // finite of 0
    return fmaf(fmaf(-guess, guess, x), 0.5f * inverse, guess);
  }

  __device__ __forceinline__ static float quotient(float a, float b) {
    const float guess = device::reciprocal(b), inverse = fmaf(fmaf(-b, guess, 1.0f), guess, guess);
    const float result = a * inverse;
    return fmaf(fmaf(-b, result, a), inverse, result);
  }
};

}  // namespace warpsmith::optim
