#pragma once
#include "tiles/activation_math.cuh"

// SiLU of a vector's channels, of values that are stored as T.
namespace warpsmith::group_norm {

// The sigmoids of N values: two share a reciprocal, that of their product. Where it is beyond float, as the
// exponentials of values below -43 may make it, or NaN, each has its own. Relative error 2^-20.
template <int N> __device__ __forceinline__ void sigmoids(const float (&v)[N], float (&s)[N]) {
  static_assert(N % 2 == 0);
  float below[N];
  bool within = true;
#pragma unroll
  for (int k = 0; k < N; ++k) below[k] = 1.0f + device::exp2(v[k] * -1.44269504f);
#pragma unroll
  for (int k = 0; k < N; k += 2) {
    const float product = below[k] * below[k + 1], share = device::reciprocal(product);
    s[k] = share * below[k + 1];
    s[k + 1] = share * below[k];
    within = within && product < 0x1p126f;  // beyond which the reciprocal is flushed to 0
  }
  if (within) return;
#pragma unroll
  for (int k = 0; k < N; ++k) s[k] = device::reciprocal(below[k]);
}

// v times its sigmoid.
template <class T, int N> __device__ __forceinline__ void silu(float (&v)[N]) {
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
    float s[N];
    sigmoids(v, s);
#pragma unroll
    for (int k = 0; k < N; ++k) v[k] *= s[k];
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k) v[k] = activation::Silu<activation::DeviceMath<T>>(v[k]).value();
  }
}

// g times the derivative at v. Each has a reciprocal of its own: what is beside it takes as many slots of issue as both
// special functions take of their unit.
template <class T, int N> __device__ __forceinline__ void times_silu_derivative(float (&g)[N], const float (&v)[N]) {
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if constexpr (sizeof(T) == 2) {
      const float s = device::sigmoid(v[k]);
      g[k] *= fmaf(fmaf(-v[k], s, v[k]), s, s);  // s + s v (1 - s), an operation less where 1 - s need not be exact
    } else {
      g[k] = activation::Silu<activation::DeviceMath<T>>(v[k]).times_derivative(g[k]);
    }
  }
}

}  // namespace warpsmith::group_norm
