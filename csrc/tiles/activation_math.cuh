#pragma once
#include "common/activation_functions.h"
#include "device/math.h"

namespace warpsmith::activation {

// The elementary functions of device code, accurate enough for results stored as T.
template <class T> struct DeviceMath {
  using Float = float;
  __device__ static __forceinline__ SigmoidAndRest<float> sigmoid(float x) {
    if constexpr (sizeof(T) == 2) {
      const float s = device::sigmoid(x);
      return {s, 1.0f - s};
    }
    const float e = fminf(device::exp(-x), 1e38f);  // so that the product below is 1 where 1 / e has no number
    const float s = device::reciprocal(1.0f + e);
    return {s, e * s};
  }
  __device__ static __forceinline__ float normal_bell(float x) { return device::normal_bell(x); }
  __device__ static __forceinline__ float normal_cdf(float x, float bell) {
    if constexpr (sizeof(T) == 2) return device::fast_normal_cdf(x, bell);
    return device::normal_cdf(x, bell);
  }
};

}  // namespace warpsmith::activation
