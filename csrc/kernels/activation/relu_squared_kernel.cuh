#pragma once
#include "kernels/activation/elementwise.cuh"
#include "kernels/activation/functions.h"
#include "kernels/activation/relu_squared.h"

// relu_squared as an elementwise op: forward reads x and writes y, backward reads dy and x and writes dx; arithmetic is
// float, each result is rounded once.
namespace warpsmith::activation {

struct ReluSquaredForward {
  static constexpr int I = 1, O = 1;
  template <class T, int N>
  __device__ __forceinline__ void apply(const float (&x)[I][N], float (&y)[O][N], int64_t) const {
#pragma unroll
    for (int k = 0; k < N; ++k) y[0][k] = ReluSquared<DeviceMath<T>>(x[0][k]).value();
  }
};

struct ReluSquaredBackward {
  static constexpr int I = 2, O = 1;
  template <class T, int N>
  __device__ __forceinline__ void apply(const float (&x)[I][N], float (&y)[O][N], int64_t) const {
#pragma unroll
    for (int k = 0; k < N; ++k) y[0][k] = ReluSquared<DeviceMath<T>>(x[1][k]).times_derivative(x[0][k]);
  }
};

}  // namespace warpsmith::activation
