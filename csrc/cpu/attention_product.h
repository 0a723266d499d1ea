#pragma once
#include <cstdint>
#include <cstring>

#include "common/vectorize.h"

// The matrix product of attention's tiles. Keeps a block of c in registers and reads one row of b and one column of a
// at a time.
//
//   c[i][j] = (add ? c[i][j] : 0) + sum over k of a[i * a_row + k * a_step] * b[k * b_row + j]
//
// `columns` is a multiple of kProductColumns; rows and depth are free. The sum over k is a sum of sums of kSegment
// terms, each in order. That has half the rounding error of one long sum, and does not depend on the neighbouring rows
// and columns.
namespace warpsmith::cpu {

constexpr int64_t kProductColumns = 32, kSegment = 32;

template <class F> struct Product {
  const F* a;
  int64_t a_row, a_step;
  const F* b;
  int64_t b_row;
  F* c;
  int64_t c_row;
  int64_t rows, columns, depth;
  bool add;
};

#if defined(__clang__)
#define WARPSMITH_UNROLL_ALL _Pragma("clang loop unroll(full)")
#else
#define WARPSMITH_UNROLL_ALL _Pragma("GCC unroll 16")
#endif

// One block of kRows x kVectors accumulators of type V, a vector of F.
#define WARPSMITH_PRODUCT_TILE(F, V, kRows, kVectors)                                                              \
  {                                                                                                                \
    V sum[kRows][kVectors];                                                                                        \
    WARPSMITH_UNROLL_ALL for (int r = 0; r < kRows; ++r) WARPSMITH_UNROLL_ALL for (int v = 0; v < kVectors; ++v)   \
        sum[r][v] = V{};                                                                                           \
    const F* __restrict__ a = p.a + i * p.a_row + k0 * p.a_step;                                                   \
    const F* __restrict__ b = p.b + j + k0 * p.b_row;                                                              \
    for (int64_t k = 0; k < count; ++k, a += p.a_step, b += p.b_row) {                                             \
      V row[kVectors];                                                                                             \
      WARPSMITH_UNROLL_ALL for (int v = 0; v < kVectors; ++v) std::memcpy(&row[v], b + v * kWidth, sizeof(V));     \
      WARPSMITH_UNROLL_ALL for (int r = 0; r < kRows; ++r) {                                                       \
        const F factor = a[r * p.a_row];                                                                           \
        WARPSMITH_UNROLL_ALL for (int v = 0; v < kVectors; ++v) sum[r][v] += factor * row[v];                      \
      }                                                                                                            \
    }                                                                                                              \
    WARPSMITH_UNROLL_ALL for (int r = 0; r < kRows; ++r) WARPSMITH_UNROLL_ALL for (int v = 0; v < kVectors; ++v) { \
      F* c = p.c + (i + r) * p.c_row + j + v * kWidth;                                                             \
      if (p.add || k0 > 0) {                                                                                       \
        V old;                                                                                                     \
        std::memcpy(&old, c, sizeof(V));                                                                           \
        sum[r][v] += old;                                                                                          \
      }                                                                                                            \
      std::memcpy(c, &sum[r][v], sizeof(V));                                                                       \
    }                                                                                                              \
  }

#define WARPSMITH_PRODUCT(F, kBytes, kRows, kVectors)                                                 \
  typedef F V __attribute__((vector_size(kBytes)));                                                   \
  constexpr int64_t kWidth = kBytes / sizeof(F), kColumns = kVectors * kWidth;                        \
  static_assert(kProductColumns % kColumns == 0);                                                     \
  for (int64_t k0 = 0; k0 == 0 || k0 < p.depth; k0 += kSegment) {                                     \
    const int64_t count = p.depth - k0 < kSegment ? p.depth - k0 : kSegment;                          \
    int64_t i = 0;                                                                                    \
    for (; i + kRows <= p.rows; i += kRows)                                                           \
      for (int64_t j = 0; j < p.columns; j += kColumns) WARPSMITH_PRODUCT_TILE(F, V, kRows, kVectors) \
    for (; i < p.rows; ++i)                                                                           \
      for (int64_t j = 0; j < p.columns; j += kColumns) WARPSMITH_PRODUCT_TILE(F, V, 1, kVectors)     \
  }

// Block sizes that fill the vector registers of each instruction set: 32 of 64 bytes, 16 of 32 bytes, 16 of 16 bytes.
#if defined(WARPSMITH_CLONES) && !defined(__clang__)
#define WARPSMITH_PRODUCTS(F)                                                          \
  __attribute__((target("arch=x86-64-v4"))) static void product(const Product<F>& p) { \
    WARPSMITH_PRODUCT(F, 64, 8, 2)                                                     \
  }                                                                                    \
  __attribute__((target("arch=x86-64-v3"))) static void product(const Product<F>& p) { \
    WARPSMITH_PRODUCT(F, 32, 4, 2)                                                     \
  }                                                                                    \
  __attribute__((target("default"))) static void product(const Product<F>& p) { WARPSMITH_PRODUCT(F, 16, 4, 2) }
#else
#define WARPSMITH_PRODUCTS(F) \
  static void product(const Product<F>& p) { WARPSMITH_PRODUCT(F, 16, 4, 2) }
#endif
WARPSMITH_PRODUCTS(float)
WARPSMITH_PRODUCTS(double)
#undef WARPSMITH_PRODUCTS
#undef WARPSMITH_PRODUCT
#undef WARPSMITH_PRODUCT_TILE
#undef WARPSMITH_UNROLL_ALL

}  // namespace warpsmith::cpu
