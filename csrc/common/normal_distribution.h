#pragma once
#include "common/host_device.h"

namespace warpsmith {

// The standard normal distribution function from two polynomials, for CPU and device code. Minimax fits (Lawson's
// iteration on 400 Chebyshev nodes).

// (Phi(x) - 1/2) / x from z = x^2 for |x| <= 1. Error in Phi: 1e-8 of it.
WARPSMITH_HOST_DEVICE float normal_center(float z) {
  float p = 9.284269834224658e-05f;
  p = p * z - 0.0011662112889515013f;
  p = p * z + 0.009964832153184444f;
  p = p * z - 0.06648892369117351f;
  return p * z + 0.398942214797773f;
}

// e^(a^2 / 2) Phi(-a) from t = 1 / (1 + kNormalTailSlope * a), a >= 0: what the exponential does not carry is so smooth
// in t that one polynomial serves up to a = 13, behind which float underflows. Relative error 2.2e-7 up to a = 4, 7e-7
// beyond.
constexpr float kNormalTailSlope = 0.34f;

WARPSMITH_HOST_DEVICE float normal_tail(float t) {
  float p = 0.0473448553484058f;
  p = p * t - 0.21227937836002378f;
  p = p * t + 0.2867846610627529f;
  p = p * t - 0.054160723715745346f;
  p = p * t + 0.17044821916758313f;
  p = p * t + 0.12507538521999798f;
  p = p * t + 0.1368442024655421f;
  return p * t - 5.7330526242238555e-05f;
}

}  // namespace warpsmith
