#pragma once
#include "device/async_copy.h"
#include "device/convert.h"
#include "device/matrix_access.h"
#include "device/mma.h"
#include "device/vector.h"
#include "kernels/attention/store_accumulators.cuh"

// Products of a warp with rows in shared memory: by tensor cores for 16-bit elements, by float arithmetic for float.
// Both have the accumulator layout of mma.m16n8k16: with g = lane / 4 and t = lane % 4, element e of x[n] is in row g +
// 8 (e / 2) and column 8 n + 2 t + e % 2. Called by the whole warp, converged.
namespace warpsmith::attention {

template <int kColumns> using Accumulators = float[kColumns / 8][4];

// Returns x. `position` differs in each step of a loop and is below 2^30, which the compiler does not know. So it
// computes what depends on the result in each step, instead of once before the loop and then keeping it in registers
// that the loop lacks.
__device__ __forceinline__ int computed_anew(int x, int position) { return x + (max(position, 0) >> 30); }

template <int kColumns> __device__ __forceinline__ void fill(Accumulators<kColumns>& x, float value) {
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) x[n][e] = value;
}

// The stride of rows in shared memory, in elements.
template <class T, int kDepth> constexpr int kSharedStride = kDepth + 16 / static_cast<int>(sizeof(T));

// Starts the copies of kRows rows, by all threads of the block. Rows from `rows` on and columns from `columns` on
// become zeros. A thread copies the same columns of several rows. kAnew: every call computes its addresses.
template <class T, int kDepth, int kRows, int kThreads, bool kAnew = false>
__device__ __forceinline__ void copy_rows(T* to, const T* from, int64_t stride, int rows, int columns) {
  constexpr int kElements = 16 / static_cast<int>(sizeof(T)), kChunks = kDepth / kElements;
  constexpr int kAtOnce = kThreads / kChunks;  // rows
  static_assert(kThreads % kChunks == 0 && kRows % kAtOnce == 0);
  const int number = static_cast<int>(threadIdx.x), thread = kAnew ? computed_anew(number, rows) : number;
  const int first = thread / kChunks, column = thread % kChunks * kElements;
  const T* source = from + first * stride + column;
  T* const target = to + first * kSharedStride<T, kDepth> + column;
  const int end = column < columns ? rows - first : 0;
#pragma unroll 4
  for (int row = 0; row < kRows; row += kAtOnce) {
    device::copy_async<16>(target + row * kSharedStride<T, kDepth>, row < end ? source : from, row < end);
    source += kAtOnce * stride;
  }
}

// x = a b^T for kTiles * 16 rows of a and kColumns rows of b. `a` points to the warp's first row. A warp loads b once
// for all of its tiles.
template <class T, int kDepth, int kColumns, int kTiles>
__device__ __forceinline__ void multiply_rows(Accumulators<kColumns> (&x)[kTiles], const T* a, const T* b, int lane) {
  constexpr int kStride = kSharedStride<T, kDepth>;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) fill<kColumns>(x[i], 0.0f);
  if constexpr (sizeof(T) == 2) {
    const T* row_a = a + lane % 16 * kStride + lane / 16 * 8;
    const T* row_b = b + (lane % 8 + lane / 16 * 8) * kStride + lane / 8 % 2 * 8;
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      uint32_t left[kTiles][4];
#pragma unroll
      for (int i = 0; i < kTiles; ++i) device::load_matrix(left[i], row_a + i * 16 * kStride + k);
#pragma unroll
      for (int n = 0; n < kColumns / 16; ++n) {
        uint32_t right[4];
        device::load_matrix(right, row_b + n * 16 * kStride + k);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          device::mma_m16n8k16<T>(x[i][2 * n], left[i], {right[0], right[1]});
          device::mma_m16n8k16<T>(x[i][2 * n + 1], left[i], {right[2], right[3]});
        }
      }
    }
  } else {
    static_assert(kTiles == 1);
    using Four = device::Vector<float, 4>;
    const T* row_a = a + lane / 4 * kStride;
    const T* row_b = b + lane % 4 * 2 * kStride;
#pragma unroll 2
    for (int k = 0; k < kDepth; k += 4) {
      const Four a0 = device::load_vector<4>(row_a + k), a1 = device::load_vector<4>(row_a + 8 * kStride + k);
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        const Four b0 = device::load_vector<4>(row_b + n * 8 * kStride + k);
        const Four b1 = device::load_vector<4>(row_b + (n * 8 + 1) * kStride + k);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[0][n][0] += a0.at[i] * b0.at[i];
          x[0][n][1] += a0.at[i] * b1.at[i];
          x[0][n][2] += a1.at[i] * b0.at[i];
          x[0][n][3] += a1.at[i] * b1.at[i];
        }
      }
    }
  }
}

// x += p b for kTiles * 16 rows of p, which is rounded to T. b has kColumns rows; it points to the first of kWidth
// columns.
template <class T, int kDepth, int kColumns, int kWidth, int kTiles>
__device__ __forceinline__ void add_product(Accumulators<kWidth> (&x)[kTiles],
                                            const Accumulators<kColumns> (&p)[kTiles], const T* b, int lane) {
  constexpr int kStride = kSharedStride<T, kDepth>;
  if constexpr (sizeof(T) == 2) {
    const T* row_b = b + lane % 16 * kStride + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < kColumns / 16; ++k) {
      uint32_t left[kTiles][4];
#pragma unroll
      for (int i = 0; i < kTiles; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          left[i][j] = device::pack<T>(p[i][2 * k + j / 2][j % 2 * 2], p[i][2 * k + j / 2][j % 2 * 2 + 1]);
#pragma unroll
      for (int n = 0; n < kWidth / 16; ++n) {
        uint32_t right[4];
        device::load_matrix<true>(right, row_b + k * 16 * kStride + n * 16);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          device::mma_m16n8k16<T>(x[i][2 * n], left[i], {right[0], right[1]});
          device::mma_m16n8k16<T>(x[i][2 * n + 1], left[i], {right[2], right[3]});
        }
      }
    }
  } else {
    static_assert(kTiles == 1);
    // Sums each step separately and then adds it to x. A single chain of additions would round once for every column of
    // every step, and have twice the error of torch's blocked products. Makes kPart columns at a time, as many as fit
    // into registers beside x.
    constexpr int kPart = kWidth > 128 ? 16 : 64;
    static_assert(kWidth % kPart == 0);
    const auto factor = [&](int k, int r) {  // element k of p, in row r of this thread
      return __shfl_sync(0xffffffffu, p[0][k / 8][2 * r + k % 2], lane / 4 * 4 + k % 8 / 2);
    };
    constexpr bool kHold = kWidth > 4 * kPart;
    float held[kHold ? kColumns : 1][2];
    if constexpr (kHold) {
#pragma unroll
      for (int k = 0; k < kColumns; ++k)
#pragma unroll
        for (int r = 0; r < 2; ++r) held[k][r] = factor(k, r);
    }
#pragma unroll
    for (int part = 0; part < kWidth / 8; part += kPart / 8) {
      const T* row_b = b + part * 8 + lane % 4 * 2;
      Accumulators<kPart> sum;
#pragma unroll
      for (int n = 0; n < kPart / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[n][e] = 0.0f;
#pragma unroll
      for (int k = 0; k < kColumns; ++k) {
        const float upper = kHold ? held[kHold ? k : 0][0] : factor(k, 0);
        const float lower = kHold ? held[kHold ? k : 0][1] : factor(k, 1);
#pragma unroll
        for (int n = 0; n < kPart / 8; ++n) {
          const device::Vector<float, 2> two = device::load_vector<2>(row_b + k * kStride + n * 8);
          sum[n][0] += upper * two.at[0];
          sum[n][1] += upper * two.at[1];
          sum[n][2] += lower * two.at[0];
          sum[n][3] += lower * two.at[1];
        }
      }
#pragma unroll
      for (int n = 0; n < kPart / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[0][part + n][e] += sum[n][e];
    }
  }
}

// Writes x, rounded to T, to the warp's rows in shared memory.
template <class T, int kColumns>
__device__ __forceinline__ void store_scores(T* to, int stride, const Accumulators<kColumns>& x, int lane) {
  T* row = to + lane / 4 * stride + lane % 4 * 2;
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
    for (int r = 0; r < 2; ++r)
      device::store_vector(reinterpret_cast<uint32_t*>(row + 8 * r * stride + n * 8),
                           device::Vector<uint32_t, 1>{{device::pack<T>(x[n][2 * r], x[n][2 * r + 1])}});
}

// x += p b as in add_product(), for 16-bit elements, with p in shared memory in rows of kColumns + 8 elements.
template <class T, int kDepth, int kColumns, int kWidth, int kTiles>
__device__ __forceinline__ void add_shared_product(Accumulators<kWidth> (&x)[kTiles], const T* p, const T* b,
                                                   int lane) {
  constexpr int kStride = kSharedStride<T, kDepth>, kStrideOfP = kColumns + 8;
  const T* row_p = p + lane % 16 * kStrideOfP + lane / 16 * 8;
  const T* row_b = b + lane % 16 * kStride + lane / 16 * 8;
#pragma unroll
  for (int k = 0; k < kColumns; k += 16) {
    uint32_t left[kTiles][4];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) device::load_matrix(left[i], row_p + i * 16 * kStrideOfP + k);
#pragma unroll
    for (int n = 0; n < kWidth / 16; ++n) {
      uint32_t right[4];
      device::load_matrix<true>(right, row_b + k * kStride + n * 16);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        device::mma_m16n8k16<T>(x[i][2 * n], left[i], {right[0], right[1]});
        device::mma_m16n8k16<T>(x[i][2 * n + 1], left[i], {right[2], right[3]});
      }
    }
  }
}

// Writes x to rows of a tensor. `to` is column 0 of the warp's first row. Skips rows from `rows` on and columns from
// `columns` on.
template <class T, int kWidth> __device__ __forceinline__ void store_rows(T* to, int64_t stride,
                                                                          const Accumulators<kWidth>& x, int rows,
                                                                          int columns, int lane) {
  if constexpr (sizeof(T) == 2) {
    float flat[kWidth / 2];
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) flat[i] = x[i / 4][i % 4];
    store_accumulators(to, stride, flat, 1.0f, lane / 4, rows, columns, lane);
  } else {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = lane / 4 + 8 * r;
      if (row >= rows) continue;
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n) {
        const int column = n * 8 + lane % 4 * 2;
        if (column < columns)
          device::store_vector(to + row * stride + column, device::Vector<float, 2>{{x[n][2 * r], x[n][2 * r + 1]}});
      }
    }
  }
}

}  // namespace warpsmith::attention
