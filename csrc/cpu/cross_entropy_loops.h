#pragma once
#include <cstdint>
#include <cstring>
#include <limits>

#include "common/half_host.h"
#include "common/vectorize.h"
#include "cpu/vector_math.h"

// The loops of cross_entropy's CPU body, over a row or part of a row. T: storage type of the logits; Math: type of the
// arithmetic. Only for cross_entropy.cpp.
namespace warpsmith {
namespace {

constexpr int kLanes = 16;  // independent partial results: one AVX-512 register of floats
constexpr int kSeries = 4;  // vectors of results, where one step would wait for the previous one

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

// A vector type, for loops over arrays that g++ vectorises badly.
template <class M> using Lanes __attribute__((vector_size(kLanes * sizeof(M)))) = M;

// Free functions, one per dtype: target_clones reaches neither lambdas nor templates.
#define WARPSMITH_CROSS_ENTROPY_MATH(Math)                                                          \
  WARPSMITH_VECTORIZE Math max_of(const Math* z, int64_t count) {                                   \
    Lanes<Math> lane[kSeries], x;                                                                   \
    for (auto& l : lane) l = Lanes<Math>{} - std::numeric_limits<Math>::infinity();                 \
    int64_t j = 0;                                                                                  \
    for (; j + kSeries * kLanes <= count; j += kSeries * kLanes)                                    \
      for (int k = 0; k < kSeries; ++k) {                                                           \
        std::memcpy(&x, z + j + k * kLanes, sizeof(x));                                             \
        lane[k] = x > lane[k] ? x : lane[k];                                                        \
      }                                                                                             \
    for (; j + kLanes <= count; j += kLanes) {                                                      \
      std::memcpy(&x, z + j, sizeof(x));                                                            \
      lane[0] = x > lane[0] ? x : lane[0];                                                          \
    }                                                                                               \
    Math largest = -std::numeric_limits<Math>::infinity();                                          \
    for (const auto& l : lane)                                                                      \
      for (int k = 0; k < kLanes; ++k) largest = l[k] > largest ? l[k] : largest;                   \
    for (; j < count; ++j) largest = z[j] > largest ? z[j] : largest;                               \
    return largest;                                                                                 \
  }                                                                                                 \
  /* sum of exp(z - m), also stored in e where that is not null */                                  \
  WARPSMITH_VECTORIZE Math sum_exp(const Math* z, Math* e, int64_t count, Math m) {                 \
    Math lane[kLanes] = {};                                                                         \
    int64_t j = 0;                                                                                  \
    if (e) {                                                                                        \
      for (; j + kLanes <= count; j += kLanes)                                                      \
        for (int k = 0; k < kLanes; ++k) {                                                          \
          e[j + k] = math::exp_nonpositive(z[j + k] - m);                                           \
          lane[k] += e[j + k];                                                                      \
        }                                                                                           \
      for (; j < count; ++j) lane[0] += e[j] = math::exp_nonpositive(z[j] - m);                     \
    } else {                                                                                        \
      for (; j + kLanes <= count; j += kLanes)                                                      \
        for (int k = 0; k < kLanes; ++k) lane[k] += math::exp_nonpositive(z[j + k] - m);            \
      for (; j < count; ++j) lane[0] += math::exp_nonpositive(z[j] - m);                            \
    }                                                                                               \
    Math sum = 0;                                                                                   \
    for (int k = 0; k < kLanes; ++k) sum += lane[k];                                                \
    return sum;                                                                                     \
  }                                                                                                 \
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
  WARPSMITH_VECTORIZE void widen(const T* x, Math* z, int64_t count, Math cap) {                                  \
    if (cap == 0)                                                                                                 \
      for (int64_t j = 0; j < count; ++j) z[j] = Math(to_float(x[j]));                                            \
    else                                                                                                          \
      for (int64_t j = 0; j < count; ++j) z[j] = cap * math::tanh(Math(to_float(x[j])) / cap);                    \
  }                                                                                                               \
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
