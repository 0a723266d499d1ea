#pragma once
#include "cpu/softmax_loops.h"

// The loops of cross_entropy's CPU body, over a row or part of a row. T: storage type of the logits; Math: type of the
// arithmetic. Only for cross_entropy.cpp.
namespace warpsmith {
namespace {

// The gradient of an element z: (k * e + q * e * (z - c - rest) - s * weight) * slope, with e = exp(z - c) and slope
// the softcap's derivative 1 - (z / cap)^2. The caller adds the target's own term.
template <class Math> struct Gradient {
  Math c, k, s, q, rest, cap, inverse_cap;
  bool plain() const { return s == 0 && q == 0 && cap == 0; }
};

// Computed from the distance to the cap, an exact difference: near the cap, 1 minus a square would be rounding error.
template <class Math> __attribute__((always_inline)) inline Math slope(const Gradient<Math>& g, Math z) {
  const Math left = (g.cap - (z < 0 ? -z : z)) * g.inverse_cap;
  return g.cap == 0 ? Math(1) : left * (2 - left);
}

// Clamps a difference so that its product with an exponential of 0 is 0, not NaN. (A branch on the exponential would
// keep loops from being vectorised.)
template <class Math> __attribute__((always_inline)) inline Math not_infinite(Math difference) {
  constexpr Math kLeast = sizeof(Math) == 4 ? Math(-104) : Math(-1000);  // of float: exp_nonpositive is 0 there
  return difference < kLeast ? kLeast : difference;
}

template <class Math>
__attribute__((always_inline)) inline Math element_gradient(const Gradient<Math>& g, Math z, Math weight) {
  const Math d = not_infinite(z - g.c), e = math::exp_nonpositive(d);
  return (g.k * e + g.q * e * (d - g.rest) - g.s * weight) * slope(g, z);
}

// Free functions, one per dtype: target_clones reaches neither lambdas nor templates.
#define WARPSMITH_CROSS_ENTROPY_MATH(Math)                                                          \
  /* sum of exp(z - m) * (z - m) */                                                                 \
  WARPSMITH_VECTORIZE Math sum_product(const Math* z, int64_t count, Math m) {                      \
    Math lane[kLanes] = {};                                                                         \
    int64_t j = 0;                                                                                  \
    for (; j + kLanes <= count; j += kLanes)                                                        \
      for (int k = 0; k < kLanes; ++k) {                                                            \
        const Math d = not_infinite(z[j + k] - m);                                                  \
        lane[k] += math::exp_nonpositive(d) * d;                                                    \
      }                                                                                             \
    for (; j < count; ++j) {                                                                        \
      const Math d = not_infinite(z[j] - m);                                                        \
      lane[0] += math::exp_nonpositive(d) * d;                                                      \
    }                                                                                               \
    Math sum = 0;                                                                                   \
    for (int k = 0; k < kLanes; ++k) sum += lane[k];                                                \
    return sum;                                                                                     \
  }                                                                                                 \
  /* sum of weight * (z - m) */                                                                     \
  WARPSMITH_VECTORIZE Math sum_weighted(const Math* z, const Math* weight, int64_t count, Math m) { \
    Math lane[kLanes] = {};                                                                         \
    int64_t j = 0;                                                                                  \
    if (weight)                                                                                     \
      for (; j + kLanes <= count; j += kLanes)                                                      \
        for (int k = 0; k < kLanes; ++k) lane[k] += weight[j + k] * (z[j + k] - m);                 \
    else                                                                                            \
      for (; j + kLanes <= count; j += kLanes)                                                      \
        for (int k = 0; k < kLanes; ++k) lane[k] += z[j + k] - m;                                   \
    for (; j < count; ++j) lane[0] += (weight ? weight[j] : Math(1)) * (z[j] - m);                  \
    Math sum = 0;                                                                                   \
    for (int k = 0; k < kLanes; ++k) sum += lane[k];                                                \
    return sum;                                                                                     \
  }
WARPSMITH_CROSS_ENTROPY_MATH(float)
WARPSMITH_CROSS_ENTROPY_MATH(double)
#undef WARPSMITH_CROSS_ENTROPY_MATH

#define WARPSMITH_CROSS_ENTROPY(T, Math)                                                                          \
  WARPSMITH_VECTORIZE void scale(T* x, int64_t count, Math factor) {                                              \
    for (int64_t j = 0; j < count; ++j) x[j] = from_float<T>(Math(to_float(x[j])) * factor);                      \
  }                                                                                                               \
  WARPSMITH_VECTORIZE void scaled(const Math* e, T* out, int64_t count, Math factor) {                            \
    for (int64_t j = 0; j < count; ++j) out[j] = from_float<T>(e[j] * factor);                                    \
  }                                                                                                               \
  WARPSMITH_VECTORIZE void gradient(const Math* z, const Math* weight, T* out, int64_t count, Gradient<Math> g) { \
    if (g.plain())                                                                                                \
      for (int64_t j = 0; j < count; ++j) out[j] = from_float<T>(g.k * math::exp_nonpositive(z[j] - g.c));        \
    else if (weight)                                                                                              \
      for (int64_t j = 0; j < count; ++j) out[j] = from_float<T>(element_gradient(g, z[j], weight[j]));           \
    else                                                                                                          \
      for (int64_t j = 0; j < count; ++j) out[j] = from_float<T>(element_gradient(g, z[j], Math(1)));             \
  }
WARPSMITH_CROSS_ENTROPY(float, float)
WARPSMITH_CROSS_ENTROPY(double, double)
WARPSMITH_CROSS_ENTROPY(float16, float)
WARPSMITH_CROSS_ENTROPY(bfloat16, float)
#undef WARPSMITH_CROSS_ENTROPY

}  // namespace
}  // namespace warpsmith
