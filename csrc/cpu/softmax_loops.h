#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "common/half_host.h"
#include "common/vectorize.h"
#include "cpu/vector_math.h"

// Loops over a row of exponentials, or part of it, of cross_entropy and softmax. T: storage type; Math: type of the
// arithmetic.
namespace warpsmith {
namespace {

constexpr int kLanes = 16;  // independent partial results: one AVX-512 register of floats
constexpr int kSeries = 4;  // vectors of results, where one step would wait for the previous one

// A vector type, for loops over arrays that g++ vectorises badly.
template <class M> using Lanes __attribute__((vector_size(kLanes * sizeof(M)))) = M;

constexpr int64_t kGrainElems = 8 * 1024;  // least elements per thread
// A long row is a sum of pieces, added in double as lanes are: rounding errors grow with the terms of a lane.
constexpr int64_t kPieceColumns = 1024;

template <class Math, class Piece> Math sum_of_pieces(int64_t columns, Piece&& piece) {
  double total = 0;
  for (int64_t c = 0; c < columns; c += kPieceColumns) total += piece(c, std::min(kPieceColumns, columns - c));
  return static_cast<Math>(total);
}

inline int64_t rows_per_task(int64_t columns) {
  return std::max<int64_t>(1, kGrainElems / std::max<int64_t>(1, columns));
}

// Free functions, one per dtype: target_clones reaches neither lambdas nor templates.
#define WARPSMITH_EXPONENTIALS(Math)                                                     \
  WARPSMITH_VECTORIZE Math max_of(const Math* z, int64_t count) {                        \
    Lanes<Math> lane[kSeries], x;                                                        \
    for (auto& l : lane) l = Lanes<Math>{} - std::numeric_limits<Math>::infinity();      \
    int64_t j = 0;                                                                       \
    for (; j + kSeries * kLanes <= count; j += kSeries * kLanes)                         \
      for (int k = 0; k < kSeries; ++k) {                                                \
        std::memcpy(&x, z + j + k * kLanes, sizeof(x));                                  \
        lane[k] = x > lane[k] ? x : lane[k];                                             \
      }                                                                                  \
    for (; j + kLanes <= count; j += kLanes) {                                           \
      std::memcpy(&x, z + j, sizeof(x));                                                 \
      lane[0] = x > lane[0] ? x : lane[0];                                               \
    }                                                                                    \
    Math largest = -std::numeric_limits<Math>::infinity();                               \
    for (const auto& l : lane)                                                           \
      for (int k = 0; k < kLanes; ++k) largest = l[k] > largest ? l[k] : largest;        \
    for (; j < count; ++j) largest = z[j] > largest ? z[j] : largest;                    \
    return largest;                                                                      \
  }                                                                                      \
  /* sum of exp(z - m), also stored in e where that is not null */                       \
  WARPSMITH_VECTORIZE double sum_exp(const Math* z, Math* e, int64_t count, Math m) {    \
    Math lane[kLanes] = {};                                                              \
    int64_t j = 0;                                                                       \
    if (e) {                                                                             \
      for (; j + kLanes <= count; j += kLanes)                                           \
        for (int k = 0; k < kLanes; ++k) {                                               \
          e[j + k] = math::exp_nonpositive(z[j + k] - m);                                \
          lane[k] += e[j + k];                                                           \
        }                                                                                \
      for (; j < count; ++j) lane[0] += e[j] = math::exp_nonpositive(z[j] - m);          \
    } else {                                                                             \
      for (; j + kLanes <= count; j += kLanes)                                           \
        for (int k = 0; k < kLanes; ++k) lane[k] += math::exp_nonpositive(z[j + k] - m); \
      for (; j < count; ++j) lane[0] += math::exp_nonpositive(z[j] - m);                 \
    }                                                                                    \
    double sum = 0;                                                                      \
    for (int k = 0; k < kLanes; ++k) sum += lane[k];                                     \
    return sum;                                                                          \
  }
WARPSMITH_EXPONENTIALS(float)
WARPSMITH_EXPONENTIALS(double)
#undef WARPSMITH_EXPONENTIALS

#define WARPSMITH_STORAGE(T, Math)                                                             \
  WARPSMITH_VECTORIZE void widen(const T* x, Math* z, int64_t count, Math cap) {               \
    if (cap == 0)                                                                              \
      for (int64_t j = 0; j < count; ++j) z[j] = Math(to_float(x[j]));                         \
    else                                                                                       \
      for (int64_t j = 0; j < count; ++j) z[j] = cap * math::tanh(Math(to_float(x[j])) / cap); \
  }
WARPSMITH_STORAGE(float, float)
WARPSMITH_STORAGE(double, double)
WARPSMITH_STORAGE(float16, float)
WARPSMITH_STORAGE(bfloat16, float)
#undef WARPSMITH_STORAGE

}  // namespace
}  // namespace warpsmith
