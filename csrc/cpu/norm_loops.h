#pragma once
#include <cstdint>
#include <cstring>

#include "common/half_host.h"
#include "common/vectorize.h"

// The loops of the norm family's CPU body, over a row or part of a row. Only for norm.cpp.
//
// M is the type of the arithmetic, float or double. S is the storage type of the row that is normalised, and T that of
// the activation: M itself, or bfloat16, whose conversion costs an instruction. Rows of float16 are widened into
// scratch memory first. A null weight stands for ones.
namespace warpsmith {
namespace {

#define WARPSMITH_INLINE inline __attribute__((always_inline))

constexpr int kLanes = 16;  // independent partial sums: one AVX-512 register of floats
constexpr int kSeries = 4;  // vectors of partial sums, in loops so short that each step would wait for the previous one

// Adds lanes as a tree. One after the other, the additions would take as long as a pass over 500 columns.
template <class M> WARPSMITH_INLINE M add_lanes(const M* lane) {
  M sums[kLanes / 2];
  for (int k = 0; k < kLanes / 2; ++k) sums[k] = lane[k] + lane[k + kLanes / 2];
  for (int count = kLanes / 4; count > 0; count /= 2)
    for (int k = 0; k < count; ++k) sums[k] += sums[k + count];
  return sums[0];
}

// A vector type, for loops with two sums: over arrays g++ does not vectorise these (5 times slower).
template <class M> using Lanes __attribute__((vector_size(kLanes * sizeof(M)))) = M;
template <class M> WARPSMITH_INLINE void load(Lanes<M>& to, const M* from) { std::memcpy(&to, from, sizeof(to)); }
template <class M> WARPSMITH_INLINE void load(Lanes<float>& to, const bfloat16* from) {
  Lanes<uint16_t> bits;
  std::memcpy(&bits, from, sizeof(bits));
  const Lanes<uint32_t> wide = __builtin_convertvector(bits, Lanes<uint32_t>) << 16;
  std::memcpy(&to, &wide, sizeof(to));
}

template <class M> WARPSMITH_INLINE void add_series(M* lane, const Lanes<M>* series) {
  const Lanes<M> total = (series[0] + series[1]) + (series[2] + series[3]);
  std::memcpy(lane, &total, sizeof(total));
}

// The sum of x, or of its squares.
template <class M, bool kSquares, class S> WARPSMITH_INLINE M sum_body(const S* x, int64_t count) {
  Lanes<M> series[kSeries] = {}, a;
  int64_t c = 0;
  for (; c + kSeries * kLanes <= count; c += kSeries * kLanes)
    for (int k = 0; k < kSeries; ++k) {
      load<M>(a, x + c + k * kLanes);
      if constexpr (kSquares)
        series[k] += a * a;
      else
        series[k] += a;
    }
  for (; c + kLanes <= count; c += kLanes) {
    load<M>(a, x + c);
    if constexpr (kSquares)
      series[0] += a * a;
    else
      series[0] += a;
  }
  M lane[kLanes];
  add_series<M>(lane, series);
  for (; c < count; ++c) {
    const M value = to_float(x[c]);
    lane[c % kLanes] += kSquares ? value * value : value;
  }
  return add_lanes(lane);
}

// The sum of squares about `mean`; adds the sum of the differences from it.
template <class M, class S> WARPSMITH_INLINE M sum_about_body(const S* x, int64_t count, M mean, M* differences) {
  Lanes<M> squares[kSeries] = {}, plain[kSeries] = {}, a;
  int64_t c = 0;
  for (; c + kSeries * kLanes <= count; c += kSeries * kLanes)
    for (int k = 0; k < kSeries; ++k) {
      load<M>(a, x + c + k * kLanes);
      a -= mean;
      squares[k] += a * a;
      plain[k] += a;
    }
  for (; c + kLanes <= count; c += kLanes) {
    load<M>(a, x + c);
    a -= mean;
    squares[0] += a * a;
    plain[0] += a;
  }
  M sums[2][kLanes];
  add_series<M>(sums[0], squares);
  add_series<M>(sums[1], plain);
  for (; c < count; ++c) {
    const M d = to_float(x[c]) - mean;
    sums[0][c % kLanes] += d * d;
    sums[1][c % kLanes] += d;
  }
  *differences += add_lanes(sums[1]);
  return add_lanes(sums[0]);
}

template <bool kWeight, class M, class S, class T>
WARPSMITH_INLINE void scale_body(const S* s, const M* weight, T* y, int64_t count, M rstd) {
  for (int64_t c = 0; c < count; ++c) {
    const M hat = to_float(s[c]) * rstd;
    y[c] = from_float<T>(kWeight ? hat * weight[c] : hat);
  }
}

// g = dy * weight: adds the sums of g * s_hat and (layer) of g. kGradients: adds the gradients of weight and bias to
// dweight and dbias in the same pass.
template <bool kLayer, bool kWeight, bool kGradients, class M, class T, class S>
WARPSMITH_INLINE void gradient_sums_body(const T* dy, const M* weight, const S* s, M* dweight, M* dbias, int64_t count,
                                         M mean, M rstd, M* with_s_hat, M* alone) {
  Lanes<M> lane = {}, plain = {};
  int64_t c = 0;
  for (; c + kLanes <= count; c += kLanes) {
    Lanes<M> g, w, s_hat, dw, db;
    load<M>(g, dy + c);
    load<M>(s_hat, s + c);
    s_hat = kLayer ? (s_hat - mean) * rstd : s_hat * rstd;
    if constexpr (kGradients) {
      load<M>(dw, dweight + c);
      load<M>(db, dbias + c);
      dw += g * s_hat;
      db += g;
      std::memcpy(dweight + c, &dw, sizeof(dw));
      std::memcpy(dbias + c, &db, sizeof(db));
    }
    if constexpr (kWeight) {
      load<M>(w, weight + c);
      g *= w;
    }
    lane += g * s_hat;
    if constexpr (kLayer) plain += g;
  }
  M sums[2][kLanes];
  std::memcpy(sums[0], &lane, sizeof(lane));
  std::memcpy(sums[1], &plain, sizeof(plain));
  for (; c < count; ++c) {
    const M d = to_float(dy[c]), x = to_float(s[c]), s_hat = (kLayer ? x - mean : x) * rstd;
    const M g = kWeight ? d * weight[c] : d;
    if constexpr (kGradients) {
      dweight[c] += d * s_hat;
      dbias[c] += d;
    }
    sums[0][c % kLanes] += g * s_hat;
    if constexpr (kLayer) sums[1][c % kLanes] += g;
  }
  *with_s_hat += add_lanes(sums[0]);
  if constexpr (kLayer) *alone += add_lanes(sums[1]);
}

// rstd * (g - s_hat * a - b), in an order in which no intermediate term is larger than necessary.
template <bool kLayer, bool kWeight, class M, class T, class S, class Out>
WARPSMITH_INLINE void input_gradient_body(const T* dy, const M* weight, const S* s, Out* ds, int64_t count, M mean,
                                          M rstd, M a, M b) {
  for (int64_t c = 0; c < count; ++c) {
    const M x = to_float(s[c]), g = kWeight ? to_float(dy[c]) * weight[c] : M(to_float(dy[c]));
    ds[c] = from_float<Out>(kLayer ? rstd * (g - (x - mean) * rstd * a - b) : rstd * (g - x * rstd * a));
  }
}

// Free functions, because target_clones reaches neither lambdas nor templates. Overloaded by storage type.
#define WARPSMITH_LOOPS_OF_ROWS(M, S)                                                                     \
  WARPSMITH_VECTORIZE M sum(const S* x, int64_t count) { return sum_body<M, false>(x, count); }           \
  WARPSMITH_VECTORIZE M sum_of_squares(const S* x, int64_t count) { return sum_body<M, true>(x, count); } \
  WARPSMITH_VECTORIZE M sum_about(const S* x, int64_t count, M mean, M* differences) {                    \
    return sum_about_body(x, count, mean, differences);                                                   \
  }                                                                                                       \
  WARPSMITH_VECTORIZE void add_to(const S* x, M* sum, int64_t count) {                                    \
    for (int64_t c = 0; c < count; ++c) sum[c] += to_float(x[c]);                                         \
  }
WARPSMITH_LOOPS_OF_ROWS(float, float)
WARPSMITH_LOOPS_OF_ROWS(float, bfloat16)
WARPSMITH_LOOPS_OF_ROWS(double, double)
#undef WARPSMITH_LOOPS_OF_ROWS

#define WARPSMITH_LOOPS_OF_TYPES(M, S, T)                                                                              \
  WARPSMITH_VECTORIZE void scale(const S* s, const M* weight, T* y, int64_t count, M rstd) {                           \
    weight ? scale_body<true>(s, weight, y, count, rstd) : scale_body<false>(s, weight, y, count, rstd);               \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void scale_and_shift(const S* s, const M* weight, const M* bias, T* y, int64_t count, M mean,    \
                                           M rstd) {                                                                   \
    for (int64_t c = 0; c < count; ++c) y[c] = from_float<T>((to_float(s[c]) - mean) * rstd * weight[c] + bias[c]);    \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void gradient_sums(bool layer, const T* dy, const M* weight, const S* s, int64_t count, M mean,  \
                                         M rstd, M* with_s_hat, M* alone) {                                            \
    M* const none = nullptr;                                                                                           \
    if (layer)                                                                                                         \
      gradient_sums_body<true, true, false>(dy, weight, s, none, none, count, mean, rstd, with_s_hat, alone);          \
    else if (weight)                                                                                                   \
      gradient_sums_body<false, true, false>(dy, weight, s, none, none, count, mean, rstd, with_s_hat, alone);         \
    else                                                                                                               \
      gradient_sums_body<false, false, false>(dy, weight, s, none, none, count, mean, rstd, with_s_hat, alone);        \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void gradient_sums_and_gradients(const T* dy, const M* weight, const S* s, M* dweight, M* dbias, \
                                                       int64_t count, M mean, M rstd, M* with_s_hat, M* alone) {       \
    gradient_sums_body<true, true, true>(dy, weight, s, dweight, dbias, count, mean, rstd, with_s_hat, alone);         \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void add_weight_gradient(const T* dy, const S* s, M* dweight, int64_t count, M mean, M rstd) {   \
    for (int64_t c = 0; c < count; ++c) dweight[c] += to_float(dy[c]) * ((to_float(s[c]) - mean) * rstd);              \
  }
WARPSMITH_LOOPS_OF_TYPES(float, float, float)
WARPSMITH_LOOPS_OF_TYPES(float, float, bfloat16)
WARPSMITH_LOOPS_OF_TYPES(float, bfloat16, bfloat16)
WARPSMITH_LOOPS_OF_TYPES(double, double, double)
#undef WARPSMITH_LOOPS_OF_TYPES

#define WARPSMITH_INPUT_GRADIENT(M, S, T, Out)                                                           \
  WARPSMITH_VECTORIZE void input_gradient(bool layer, const T* dy, const M* weight, const S* s, Out* ds, \
                                          int64_t count, M mean, M rstd, M a, M b) {                     \
    if (layer)                                                                                           \
      input_gradient_body<true, true>(dy, weight, s, ds, count, mean, rstd, a, b);                       \
    else if (weight)                                                                                     \
      input_gradient_body<false, true>(dy, weight, s, ds, count, mean, rstd, a, b);                      \
    else                                                                                                 \
      input_gradient_body<false, false>(dy, weight, s, ds, count, mean, rstd, a, b);                     \
  }
WARPSMITH_INPUT_GRADIENT(float, float, float, float)
WARPSMITH_INPUT_GRADIENT(float, float, bfloat16, float)
WARPSMITH_INPUT_GRADIENT(float, bfloat16, bfloat16, float)
WARPSMITH_INPUT_GRADIENT(float, bfloat16, bfloat16, bfloat16)
WARPSMITH_INPUT_GRADIENT(double, double, double, double)
#undef WARPSMITH_INPUT_GRADIENT

// Additions: of rows; of the scaled elements that dropout keeps; of the kept elements alone.
#define WARPSMITH_LOOPS_OF_SUMS(M)                                                                              \
  WARPSMITH_VECTORIZE void add(const M* x, const M* y, M* out, int64_t count) {                                 \
    for (int64_t c = 0; c < count; ++c) out[c] = x[c] + y[c];                                                   \
  }                                                                                                             \
  /* add, and the sum of what it gives */                                                                       \
  WARPSMITH_VECTORIZE M add_and_sum(const M* x, const M* y, M* out, int64_t count) {                            \
    Lanes<M> lane = {};                                                                                         \
    int64_t c = 0;                                                                                              \
    for (; c + kLanes <= count; c += kLanes) {                                                                  \
      Lanes<M> a, b;                                                                                            \
      load<M>(a, x + c);                                                                                        \
      load<M>(b, y + c);                                                                                        \
      a += b;                                                                                                   \
      std::memcpy(out + c, &a, sizeof(a));                                                                      \
      lane += a;                                                                                                \
    }                                                                                                           \
    for (; c < count; ++c) lane[c % kLanes] += out[c] = x[c] + y[c];                                            \
    M sums[kLanes];                                                                                             \
    std::memcpy(sums, &lane, sizeof(lane));                                                                     \
    return add_lanes(sums);                                                                                     \
  }                                                                                                             \
  WARPSMITH_VECTORIZE void add_kept(const uint16_t* lanes, uint32_t threshold, M scale, const M* x, const M* y, \
                                    M* out, int64_t count) {                                                    \
    for (int64_t c = 0; c < count; ++c) {                                                                       \
      const M sum = x[c] * scale + y[c];                                                                        \
      out[c] = lanes[c] >= threshold ? sum : y[c];                                                              \
    }                                                                                                           \
  }                                                                                                             \
  WARPSMITH_VECTORIZE void take_kept(const uint16_t* lanes, uint32_t threshold, M scale, const M* x, M* out,    \
                                     int64_t count) {                                                           \
    for (int64_t c = 0; c < count; ++c) {                                                                       \
      const M kept = x[c] * scale;                                                                              \
      out[c] = lanes[c] >= threshold ? kept : M(0);                                                             \
    }                                                                                                           \
  }
WARPSMITH_LOOPS_OF_SUMS(float)
WARPSMITH_LOOPS_OF_SUMS(double)
#undef WARPSMITH_LOOPS_OF_SUMS

#define WARPSMITH_NORM_CONVERSIONS(T)                                        \
  WARPSMITH_VECTORIZE void widen(const T* from, float* to, int64_t count) {  \
    for (int64_t c = 0; c < count; ++c) to[c] = to_float(from[c]);           \
  }                                                                          \
  WARPSMITH_VECTORIZE void narrow(const float* from, T* to, int64_t count) { \
    for (int64_t c = 0; c < count; ++c) to[c] = from_float<T>(from[c]);      \
  }
WARPSMITH_NORM_CONVERSIONS(float16)
WARPSMITH_NORM_CONVERSIONS(bfloat16)
#undef WARPSMITH_NORM_CONVERSIONS

}  // namespace
}  // namespace warpsmith
