#pragma once
#include "device/async_copy.h"
#include "device/convert.h"
#include "device/matrix_access.h"
#include "device/mma.h"
#include "device/vector.h"
#include "kernels/attention/store_accumulators.cuh"

// Products of a warp with rows in shared memory: tensor cores for 16-bit elements, float arithmetic for float. Both
// have the accumulators of mma.m16n8k16: with g = lane / 4 and t = lane % 4, element e of x[n] is in row g + 8 (e / 2)
// and column 8 n + 2 t + e % 2. The whole warp, converged.
namespace warpsmith::attention {

template <int kColumns> using Accumulators = float[kColumns / 8][4];

// From row to row in shared memory, in elements.
template <class T, int kDepth> constexpr int kSharedStride = kDepth + 16 / static_cast<int>(sizeof(T));

// Starts copies of kRows rows by all threads of the block. Rows from `rows` on and columns from `columns` on become
// zeros.
template <class T, int kDepth, int kRows, int kThreads>
__device__ __forceinline__ void copy_rows(T* to, const T* from, int64_t stride, int rows, int columns) {
  constexpr int kElements = 16 / static_cast<int>(sizeof(T)), kChunks = kDepth / kElements;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kChunks; i += kThreads) {
    const int row = i / kChunks, column = i % kChunks * kElements;
    const bool valid = row < rows && column < columns;
    device::copy_async<16>(to + row * kSharedStride<T, kDepth> + column, valid ? from + row * stride + column : from,
                           valid);
  }
}

// x[16 x kColumns] = a[16 x kDepth] * b[kColumns x kDepth]^T. `a` is the warp's first row.
template <class T, int kDepth, int kColumns>
__device__ __forceinline__ void multiply_rows(Accumulators<kColumns>& x, const T* a, const T* b, int lane) {
  constexpr int kStride = kSharedStride<T, kDepth>;
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) x[n][e] = 0.0f;
  if constexpr (sizeof(T) == 2) {
    const T* row_a = a + lane % 16 * kStride + lane / 16 * 8;
    const T* row_b = b + (lane % 8 + lane / 16 * 8) * kStride + lane / 8 % 2 * 8;
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      uint32_t left[4];
      device::load_matrix(left, row_a + k);
#pragma unroll
      for (int n = 0; n < kColumns / 16; ++n) {
        uint32_t right[4];
        device::load_matrix(right, row_b + n * 16 * kStride + k);
        device::mma_m16n8k16<T>(x[2 * n], left, {right[0], right[1]});
        device::mma_m16n8k16<T>(x[2 * n + 1], left, {right[2], right[3]});
      }
    }
  } else {
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
          x[n][0] += a0.at[i] * b0.at[i];
          x[n][1] += a0.at[i] * b1.at[i];
          x[n][2] += a1.at[i] * b0.at[i];
          x[n][3] += a1.at[i] * b1.at[i];
        }
      }
    }
  }
}

// x[16 x kWidth] += p[16 x kColumns] * b[kColumns x kWidth], p rounded to T. `b` is the first of the kWidth columns.
template <class T, int kDepth, int kColumns, int kWidth>
__device__ __forceinline__ void add_product(Accumulators<kWidth>& x, const Accumulators<kColumns>& p, const T* b,
                                            int lane) {
  constexpr int kStride = kSharedStride<T, kDepth>;
  if constexpr (sizeof(T) == 2) {
    const T* row_b = b + lane % 16 * kStride + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < kColumns / 16; ++k) {
      const uint32_t left[4] = {device::pack<T>(p[2 * k][0], p[2 * k][1]), device::pack<T>(p[2 * k][2], p[2 * k][3]),
                                device::pack<T>(p[2 * k + 1][0], p[2 * k + 1][1]),
                                device::pack<T>(p[2 * k + 1][2], p[2 * k + 1][3])};
#pragma unroll
      for (int n = 0; n < kWidth / 16; ++n) {
        uint32_t right[4];
        device::load_matrix<true>(right, row_b + k * 16 * kStride + n * 16);
        device::mma_m16n8k16<T>(x[2 * n], left, {right[0], right[1]});
        device::mma_m16n8k16<T>(x[2 * n + 1], left, {right[2], right[3]});
      }
    }
  } else {
    // The step's sum is made apart and then added: one chain of all additions would round as often as there are columns
    // in all steps, and lose twice what torch's blocked products do. It is made for `kPart` columns at a time, as many
    // as registers hold beside x.
    constexpr int kPart = kWidth > 128 ? 16 : 64;
    static_assert(kWidth % kPart == 0);
    const auto factor = [&](int k, int r) {  // column k of p, of the row r that this thread adds to
      return __shfl_sync(0xffffffffu, p[k / 8][2 * r + k % 2], lane / 4 * 4 + k % 8 / 2);
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
        for (int e = 0; e < 4; ++e) x[part + n][e] += sum[n][e];
    }
  }
}

// Writes x to rows of a tensor: `to` is column 0 of the warp's first row. Rows from `rows` on and columns from
// `columns` on do not exist.
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
