#pragma once
#include "kernels/norm/row.cuh"

namespace warpsmith::norm {

// Rows that a warp holds in registers: 32 / kLanes rows side by side, U such sets, all adjacent in memory. A row fills
// its lanes: kLanes * V vectors.
//
// layer_norm computes the mean first, then the deviations, which stay in registers. That is one exchange more than
// Chan's formula (forward.cuh) and three instructions per element fewer.
template <class Op, class T, int kLanes, int V, int U> struct WarpRows {
  static constexpr int N = kVector<T>, kColumns = kLanes * V * N, kSide = 32 / kLanes, kRows = kSide * U;
  static constexpr float kInverseColumns = 1.f / kColumns;
  int thread, lane, side;
  Elements<T, N> x[U][V];
  float deviation[Op::kLayer ? U : 1][V * N];
  Moments m[U];

  __device__ __forceinline__ WarpRows()
      : thread(static_cast<int>(threadIdx.x % 32)), lane(thread % kLanes), side(thread / kLanes) {}

  __device__ __forceinline__ int column(int v) const { return (v * kLanes + lane) * N; }
  __device__ __forceinline__ int row(int u) const { return u * kSide + side; }

  __device__ __forceinline__ void take_moments(float eps) {
    float sum[U] = {};
    if constexpr (Op::kLayer) {
      float mean[U] = {};
#pragma unroll
      for (int u = 0; u < U; ++u) {
#pragma unroll
        for (int i = 0; i < V * N; ++i) mean[u] += x[u][i / N][i % N];
      }
      group_sums(mean, kLanes);
#pragma unroll
      for (int u = 0; u < U; ++u) {
        m[u].mean = mean[u] * kInverseColumns;
        if constexpr ((kColumns & (kColumns - 1)) != 0)  // rounded only once, so that constant rows have no deviation
          m[u].mean = fmaf(fmaf(-m[u].mean, kColumns, mean[u]), kInverseColumns, m[u].mean);
#pragma unroll
        for (int i = 0; i < V * N; ++i) {
          deviation[u][i] = x[u][i / N][i % N] - m[u].mean;
          sum[u] += deviation[u][i] * deviation[u][i];
        }
      }
    } else {
#pragma unroll
      for (int u = 0; u < U; ++u) {
        m[u].mean = 0;
#pragma unroll
        for (int i = 0; i < V * N; ++i) sum[u] += x[u][i / N][i % N] * x[u][i / N][i % N];
      }
    }
    group_sums(sum, kLanes);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      m[u].rstd = precise_rsqrt(sum[u] * kInverseColumns + eps);
      if constexpr (!Op::kLayer) {
#pragma unroll
        for (int v = 0; v < V; ++v) keep_packed(x[u][v]);
      }
    }
  }

  // Stores the statistics of all rows at once: lane i of the warp stores those of row `first` + i.
  __device__ __forceinline__ void store_statistics(const NormForwardParams& p, int64_t first, int rows) const {
    Moments mine{};
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int source = thread % kSide * kLanes;
      const float rstd = kSide == 1 ? m[u].rstd : __shfl_sync(0xffffffffu, m[u].rstd, source, 32);
      if (thread / kSide == u) mine.rstd = rstd;
      if constexpr (Op::kLayer) {
        const float mean = kSide == 1 ? m[u].mean : __shfl_sync(0xffffffffu, m[u].mean, source, 32);
        if (thread / kSide == u) mine.mean = mean;
      }
    }
    if (thread < rows) {
      if (p.rstd) device::store(static_cast<float*>(p.rstd) + first + thread, mine.rstd);
      if (Op::kLayer && p.mean) device::store(static_cast<float*>(p.mean) + first + thread, mine.mean);
    }
  }

  __device__ __forceinline__ Elements<T, N> result(int u, int v, const Elements<T, N>& weight,
                                                   const Elements<T, N>& bias) const {
    Vector<float, N> y;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if constexpr (Op::kLayer)
        y.at[k] = deviation[u][v * N + k] * m[u].rstd * weight[k] + bias[k];
      else
        y.at[k] = x[u][v][k] * m[u].rstd * weight[k];
    }
    return rounded<T>(y);
  }
};

// The forward of short rows whose length is known at compile time: half the instructions of the kernels for any length.
// For a weight (and bias) of x's type without offset. Each warp takes one batch of rows. In the last, partial batch the
// last row stands in for the missing ones and is stored once. The partial batch is a branch of its own: comparing each
// row index before its load costs 2 to 4 % of the time.
template <class Op, class T, class C> __global__ void __launch_bounds__(C::instance.max_threads, kMinBlocks<C>)
    forward_warp(NormForwardParams p, int) {
  static_assert(!Op::kResidual && !Op::kDropout);
  constexpr int V = C::instance.vectors, U = C::instance.rows;
  using Rows = WarpRows<Op, T, C::instance.lanes, V, U>;
  constexpr int N = Rows::N, kRows = Rows::kRows;
  const int64_t first = (int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32) * kRows;
  if (first >= p.rows) return;
  const auto run = [&]<bool kAll>(int rows) {
    Rows of;
    const auto is_row = [&](int u) { return kAll || of.row(u) < rows; };
    const T* from = static_cast<const T*>(p.x) + (first + (kAll ? of.side : 0)) * p.x_stride;
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const T* row = from + (kAll ? u * Rows::kSide : is_row(u) ? of.row(u) : rows - 1) * p.x_stride;
#pragma unroll
      for (int v = 0; v < V; ++v) of.x[u][v] = load_elements<T, N>(row, of.column(v));
    }
    Elements<T, N> w[V], b[V];
#pragma unroll
    for (int v = 0; v < V; ++v) {
      w[v] = load_elements<T, N>(p.weight, of.column(v));
      if constexpr (Op::kLayer) b[v] = load_elements<T, N>(p.bias, of.column(v));
    }
    of.take_moments(static_cast<float>(p.eps));
#pragma unroll
    for (int v = 0; v < V; ++v) {
      keep_packed(w[v]);
      if constexpr (Op::kLayer) keep_packed(b[v]);
    }
    of.store_statistics(p, first, rows);
    T* to = static_cast<T*>(p.y) + (first + of.side) * Rows::kColumns;
#pragma unroll
    for (int v = 0; v < V; ++v) {
#pragma unroll
      for (int u = 0; u < U; ++u)
        if (is_row(u)) store_elements(to + u * Rows::kSide * Rows::kColumns, of.column(v), of.result(u, v, w[v], b[v]));
    }
  };
  if (kRows == 1 || p.rows - first >= kRows)
    run.template operator()<true>(kRows);
  else
    run.template operator()<false>(static_cast<int>(p.rows - first));
}

}  // namespace warpsmith::norm
