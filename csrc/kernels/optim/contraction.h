#pragma once
#include <cmath>
#include <type_traits>

#include "common/host_device.h"

// Sums of products of which the compiler does not choose the roundings. nvcc contracts a b + c to one rounding where
// the surrounding code lets it: one functor in two kernels then gave different bits (SGD, RMSprop, Lion; H200,
// 2026-11-23). On the CPU the compiler decides, for each loop as a whole.
namespace warpsmith {

// a b + c. Kernels: one rounding.
template <class T> WARPSMITH_HOST_DEVICE T product_plus(T a, T b, T c) {
#if defined(__CUDA_ARCH__) || defined(WARPSMITH_SIM)
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

// a b, rounded, before it goes into a sum.
template <class T> WARPSMITH_HOST_DEVICE T product(T a, T b) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<T, float>)
    return __fmul_rn(a, b);
  else
    return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

// m + weight (g - m), in two forms: one is exact at weight 0, the other at weight 1.
template <class T> WARPSMITH_HOST_DEVICE T lerp(T m, T g, T weight) {
  return product_plus(weight < T(0.5) ? weight : weight - T(1), g - m, weight < T(0.5) ? m : g);
}

}  // namespace warpsmith
