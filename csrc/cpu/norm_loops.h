#pragma once
#include <cstdint>
#include <cstring>

#include "common/half_host.h"
#include "common/vectorize.h"

// The loops of the norm family's CPU body, over a row or a piece of one, in M, float or double. For norm.cpp alone.
namespace warpsmith {
namespace {

constexpr int kLanes = 16;  // independent partial sums: one AVX-512 register of floats
constexpr int kSeries = 4;  // of them, where a step is so short that it would wait for the one before

// As a tree: one after the other the additions would wait for each other, as long as a pass over 500 columns.
template <class M> inline __attribute__((always_inline)) M add_lanes(const M* lane) {
  M sums[kLanes / 2];
  for (int k = 0; k < kLanes / 2; ++k) sums[k] = lane[k] + lane[k + kLanes / 2];
  for (int count = kLanes / 4; count > 0; count /= 2)
    for (int k = 0; k < count; ++k) sums[k] += sums[k + count];
  return sums[0];
}

// As a vector type, for a loop with two sums: g++ does not vectorise it over arrays (5 times slower).
template <class M> using Lanes __attribute__((vector_size(kLanes * sizeof(M)))) = M;
template <class M> inline __attribute__((always_inline)) void load(Lanes<M>& to, const M* from) {
  std::memcpy(&to, from, sizeof(to));
}

template <class M> inline __attribute__((always_inline)) void add_series(M* lane, const Lanes<M>* series) {
  const Lanes<M> total = (series[0] + series[1]) + (series[2] + series[3]);
  std::memcpy(lane, &total, sizeof(total));
}

// Free functions, one an arithmetic type: target_clones reaches neither lambdas nor templates.
#define WARPSMITH_NORM_LOOPS(M)                                                                                        \
  WARPSMITH_VECTORIZE M sum(const M* x, int64_t count) {                                                               \
    Lanes<M> series[kSeries] = {}, a;                                                                                  \
    int64_t c = 0;                                                                                                     \
    for (; c + kSeries * kLanes <= count; c += kSeries * kLanes)                                                       \
      for (int k = 0; k < kSeries; ++k) {                                                                              \
        load<M>(a, x + c + k * kLanes);                                                                                \
        series[k] += a;                                                                                                \
      }                                                                                                                \
    for (; c + kLanes <= count; c += kLanes) {                                                                         \
      load<M>(a, x + c);                                                                                               \
      series[0] += a;                                                                                                  \
    }                                                                                                                  \
    M lane[kLanes];                                                                                                    \
    add_series<M>(lane, series);                                                                                       \
    for (; c < count; ++c) lane[c % kLanes] += x[c];                                                                   \
    return add_lanes(lane);                                                                                            \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE M sum_of_squares(const M* x, int64_t count) {                                                    \
    Lanes<M> series[kSeries] = {}, a;                                                                                  \
    int64_t c = 0;                                                                                                     \
    for (; c + kSeries * kLanes <= count; c += kSeries * kLanes)                                                       \
      for (int k = 0; k < kSeries; ++k) {                                                                              \
        load<M>(a, x + c + k * kLanes);                                                                                \
        series[k] += a * a;                                                                                            \
      }                                                                                                                \
    for (; c + kLanes <= count; c += kLanes) {                                                                         \
      load<M>(a, x + c);                                                                                               \
      series[0] += a * a;                                                                                              \
    }                                                                                                                  \
    M lane[kLanes];                                                                                                    \
    add_series<M>(lane, series);                                                                                       \
    for (; c < count; ++c) lane[c % kLanes] += x[c] * x[c];                                                            \
    return add_lanes(lane);                                                                                            \
  }                                                                                                                    \
  /* sum of squares about `mean`, and the sum of the differences from it */                                            \
  WARPSMITH_VECTORIZE M sum_about(const M* x, int64_t count, M mean, M* differences) {                                 \
    Lanes<M> squares[kSeries] = {}, plain[kSeries] = {}, a;                                                            \
    int64_t c = 0;                                                                                                     \
    for (; c + kSeries * kLanes <= count; c += kSeries * kLanes)                                                       \
      for (int k = 0; k < kSeries; ++k) {                                                                              \
        load<M>(a, x + c + k * kLanes);                                                                                \
        a -= mean;                                                                                                     \
        squares[k] += a * a;                                                                                           \
        plain[k] += a;                                                                                                 \
      }                                                                                                                \
    for (; c + kLanes <= count; c += kLanes) {                                                                         \
      load<M>(a, x + c);                                                                                               \
      a -= mean;                                                                                                       \
      squares[0] += a * a;                                                                                             \
      plain[0] += a;                                                                                                   \
    }                                                                                                                  \
    M sums[2][kLanes];                                                                                                 \
    add_series<M>(sums[0], squares);                                                                                   \
    add_series<M>(sums[1], plain);                                                                                     \
    for (; c < count; ++c) {                                                                                           \
      const M d = x[c] - mean;                                                                                         \
      sums[0][c % kLanes] += d * d;                                                                                    \
      sums[1][c % kLanes] += d;                                                                                        \
    }                                                                                                                  \
    *differences += add_lanes(sums[1]);                                                                                \
    return add_lanes(sums[0]);                                                                                         \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void add(const M* x, const M* y, M* out, int64_t count) {                                        \
    for (int64_t c = 0; c < count; ++c) out[c] = x[c] + y[c];                                                          \
  }                                                                                                                    \
  /* add, and the sum of what it gives */                                                                              \
  WARPSMITH_VECTORIZE M add_and_sum(const M* x, const M* y, M* out, int64_t count) {                                   \
    Lanes<M> lane = {};                                                                                                \
    int64_t c = 0;                                                                                                     \
    for (; c + kLanes <= count; c += kLanes) {                                                                         \
      Lanes<M> a, b;                                                                                                   \
      load<M>(a, x + c);                                                                                               \
      load<M>(b, y + c);                                                                                               \
      a += b;                                                                                                          \
      std::memcpy(out + c, &a, sizeof(a));                                                                             \
      lane += a;                                                                                                       \
    }                                                                                                                  \
    for (; c < count; ++c) lane[c % kLanes] += out[c] = x[c] + y[c];                                                   \
    M sums[kLanes];                                                                                                    \
    std::memcpy(sums, &lane, sizeof(lane));                                                                            \
    return add_lanes(sums);                                                                                            \
  }                                                                                                                    \
  /* y plus scale * x of the elements whose lane is kept; and these alone */                                           \
  WARPSMITH_VECTORIZE void add_kept(const uint16_t* lanes, uint32_t threshold, M scale, const M* x, const M* y,        \
                                    M* out, int64_t count) {                                                           \
    for (int64_t c = 0; c < count; ++c) {                                                                              \
      const M sum = x[c] * scale + y[c];                                                                               \
      out[c] = lanes[c] >= threshold ? sum : y[c];                                                                     \
    }                                                                                                                  \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void take_kept(const uint16_t* lanes, uint32_t threshold, M scale, const M* x, M* out,           \
                                     int64_t count) {                                                                  \
    for (int64_t c = 0; c < count; ++c) {                                                                              \
      const M kept = x[c] * scale;                                                                                     \
      out[c] = lanes[c] >= threshold ? kept : M(0);                                                                    \
    }                                                                                                                  \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void scale(const M* s, const M* weight, M* y, int64_t count, M rstd) {                           \
    for (int64_t c = 0; c < count; ++c) y[c] = s[c] * rstd * weight[c];                                                \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void scale_and_shift(const M* s, const M* weight, const M* bias, M* y, int64_t count, M mean,    \
                                           M rstd) {                                                                   \
    for (int64_t c = 0; c < count; ++c) y[c] = (s[c] - mean) * rstd * weight[c] + bias[c];                             \
  }                                                                                                                    \
  /* g = dy * weight: sums of g * s_hat and of g */                                                                    \
  WARPSMITH_VECTORIZE void gradient_sums(const M* dy, const M* weight, const M* s, int64_t count, M mean, M rstd,      \
                                         M* with_s_hat, M* alone) {                                                    \
    Lanes<M> lane = {}, plain = {};                                                                                    \
    int64_t c = 0;                                                                                                     \
    for (; c + kLanes <= count; c += kLanes) {                                                                         \
      Lanes<M> g, w, s_hat;                                                                                            \
      load<M>(g, dy + c);                                                                                              \
      load<M>(w, weight + c);                                                                                          \
      load<M>(s_hat, s + c);                                                                                           \
      g *= w;                                                                                                          \
      s_hat = (s_hat - mean) * rstd;                                                                                   \
      lane += g * s_hat;                                                                                               \
      plain += g;                                                                                                      \
    }                                                                                                                  \
    for (; c < count; ++c) {                                                                                           \
      const M g = dy[c] * weight[c];                                                                                   \
      lane[c % kLanes] += g * ((s[c] - mean) * rstd);                                                                  \
      plain[c % kLanes] += g;                                                                                          \
    }                                                                                                                  \
    M sums[2][kLanes];                                                                                                 \
    std::memcpy(sums[0], &lane, sizeof(lane));                                                                         \
    std::memcpy(sums[1], &plain, sizeof(plain));                                                                       \
    *with_s_hat += add_lanes(sums[0]);                                                                                 \
    *alone += add_lanes(sums[1]);                                                                                      \
  }                                                                                                                    \
  /* gradient_sums, and the gradients of weight and bias in the same pass */                                           \
  WARPSMITH_VECTORIZE void gradient_sums_and_gradients(const M* dy, const M* weight, const M* s, M* dweight, M* dbias, \
                                                       int64_t count, M mean, M rstd, M* with_s_hat, M* alone) {       \
    Lanes<M> lane = {}, plain = {};                                                                                    \
    int64_t c = 0;                                                                                                     \
    for (; c + kLanes <= count; c += kLanes) {                                                                         \
      Lanes<M> d, w, s_hat, dw, db;                                                                                    \
      load<M>(d, dy + c);                                                                                              \
      load<M>(w, weight + c);                                                                                          \
      load<M>(s_hat, s + c);                                                                                           \
      load<M>(dw, dweight + c);                                                                                        \
      load<M>(db, dbias + c);                                                                                          \
      s_hat = (s_hat - mean) * rstd;                                                                                   \
      dw += d * s_hat;                                                                                                 \
      db += d;                                                                                                         \
      std::memcpy(dweight + c, &dw, sizeof(dw));                                                                       \
      std::memcpy(dbias + c, &db, sizeof(db));                                                                         \
      d *= w;                                                                                                          \
      lane += d * s_hat;                                                                                               \
      plain += d;                                                                                                      \
    }                                                                                                                  \
    for (; c < count; ++c) {                                                                                           \
      const M s_hat = (s[c] - mean) * rstd, g = dy[c] * weight[c];                                                     \
      dweight[c] += dy[c] * s_hat;                                                                                     \
      dbias[c] += dy[c];                                                                                               \
      lane[c % kLanes] += g * s_hat;                                                                                   \
      plain[c % kLanes] += g;                                                                                          \
    }                                                                                                                  \
    M sums[2][kLanes];                                                                                                 \
    std::memcpy(sums[0], &lane, sizeof(lane));                                                                         \
    std::memcpy(sums[1], &plain, sizeof(plain));                                                                       \
    *with_s_hat += add_lanes(sums[0]);                                                                                 \
    *alone += add_lanes(sums[1]);                                                                                      \
  }                                                                                                                    \
  /* rstd * (g - s_hat * a - b): of terms that cancel, none is larger than it must be */                               \
  WARPSMITH_VECTORIZE void input_gradient(const M* dy, const M* weight, const M* s, M* ds, int64_t count, M mean,      \
                                          M rstd, M a, M b) {                                                          \
    for (int64_t c = 0; c < count; ++c) ds[c] = rstd * (dy[c] * weight[c] - (s[c] - mean) * rstd * a - b);             \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void add_weight_gradient(const M* dy, const M* s, M* dweight, int64_t count, M mean, M rstd) {   \
    for (int64_t c = 0; c < count; ++c) dweight[c] += dy[c] * ((s[c] - mean) * rstd);                                  \
  }
WARPSMITH_NORM_LOOPS(float)
WARPSMITH_NORM_LOOPS(double)
#undef WARPSMITH_NORM_LOOPS

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
