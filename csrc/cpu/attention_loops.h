#pragma once
#include <cstdint>

#include "common/half_host.h"
#include "common/vectorize.h"
#include "cpu/vector_math.h"

// The inner loops of attention on the CPU, over transposed tiles of logits: one row per key, with kTile lanes, one per
// query. So no loop sums across the lanes of a vector. F is float or double.
namespace warpsmith::cpu {

constexpr int64_t kTile = 64;  // queries, and keys, per tile

// Free functions, one per arithmetic type, because target_clones reaches neither lambdas nor templates.
#define WARPSMITH_ATTENTION_LOOPS(F)                                                                                   \
  WARPSMITH_VECTORIZE static void scale_logits(F* s, int64_t keys, F scale) {                                          \
    for (int64_t i = 0; i < keys * kTile; ++i) s[i] *= scale;                                                          \
  }                                                                                                                    \
  /* s = cap * tanh(scale * s / cap), and the derivative of that by scale * s */                                       \
  WARPSMITH_VECTORIZE static void cap_logits(F* __restrict__ s, F* __restrict__ slope, int64_t keys, F scale, F cap) { \
    const F factor = scale / cap;                                                                                      \
    for (int64_t i = 0; i < keys * kTile; ++i) {                                                                       \
      const F t = math::tanh(s[i] * factor);                                                                           \
      s[i] = cap * t;                                                                                                  \
      slope[i] = F(1) - t * t;                                                                                         \
    }                                                                                                                  \
  }                                                                                                                    \
  /* s -= slope * |distance + n - m| for key n and query m of the tile */                                              \
  WARPSMITH_VECTORIZE static void add_alibi(F* s, int64_t keys, F slope, F distance) {                                 \
    for (int64_t n = 0; n < keys; ++n) {                                                                               \
      const F of_key = distance + static_cast<F>(n);                                                                   \
      for (int m = 0; m < kTile; ++m) s[n * kTile + m] -= slope * std::fabs(of_key - static_cast<F>(m));               \
    }                                                                                                                  \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE static void add_tile(F* __restrict__ s, const F* __restrict__ bias, int64_t keys) {              \
    for (int64_t i = 0; i < keys * kTile; ++i) s[i] += bias[i];                                                        \
  }                                                                                                                    \
  /* s where its byte is kept, times scale; else 0 */                                                                  \
  WARPSMITH_VECTORIZE static void drop(F* __restrict__ s, const uint8_t* __restrict__ bytes, int64_t keys,             \
                                       uint32_t threshold, F scale) {                                                  \
    for (int64_t i = 0; i < keys * kTile; ++i) {                                                                       \
      const F kept = s[i] * scale;                                                                                     \
      s[i] = bytes[i] >= threshold ? kept : F(0);                                                                      \
    }                                                                                                                  \
  }
WARPSMITH_ATTENTION_LOOPS(float)
WARPSMITH_ATTENTION_LOOPS(double)
#undef WARPSMITH_ATTENTION_LOOPS

// Conversions of rows, one set of functions per storage type.
#define WARPSMITH_ATTENTION_ROWS(T, F)                                                                              \
  WARPSMITH_VECTORIZE static void widen(const T* __restrict__ x, F* __restrict__ y, int64_t count) {                \
    for (int64_t i = 0; i < count; ++i) y[i] = to_float(x[i]);                                                      \
  }                                                                                                                 \
  WARPSMITH_VECTORIZE static void narrow(const F* __restrict__ x, T* __restrict__ y, int64_t count, F factor) {     \
    for (int64_t i = 0; i < count; ++i) y[i] = from_float<T>(x[i] * factor);                                        \
  }                                                                                                                 \
  /* y[c][r] = x[r][c] for kTile rows of y's lanes; rows beyond `rows` are 0 */                                     \
  WARPSMITH_VECTORIZE static void transpose(const T* __restrict__ x, int64_t stride, int64_t rows, int64_t columns, \
                                            F* __restrict__ y) {                                                    \
    for (int64_t r = 0; r < rows; ++r)                                                                              \
      for (int64_t c = 0; c < columns; ++c) y[c * kTile + r] = to_float(x[r * stride + c]);                         \
    for (int64_t r = rows; r < kTile; ++r)                                                                          \
      for (int64_t c = 0; c < columns; ++c) y[c * kTile + r] = F(0);                                                \
  }
WARPSMITH_ATTENTION_ROWS(float, float)
WARPSMITH_ATTENTION_ROWS(double, double)
WARPSMITH_ATTENTION_ROWS(float16, float)
WARPSMITH_ATTENTION_ROWS(bfloat16, float)
#undef WARPSMITH_ATTENTION_ROWS

}  // namespace warpsmith::cpu
