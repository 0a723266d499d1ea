#pragma once
#include "kernels/batch_norm/statistics.cuh"

// The backward in two passes over dy and x (and the mask), with a small kernel between: `sums` reads both once and
// writes 8 bytes a channel and slice; `finish_sums` adds these in a fixed order; `gradients` reads both once more, and
// writes dx and dresidual once.
namespace warpsmith::batch_norm {

struct GradientsParams {
  const void *dy, *x;
  const uint8_t* mask;
  void *dx, *dresidual;
  float *sums, *products;  // [slices, columns] of g and of g * (x - mean); of `gradients` [columns], or null: zeros
  Affine affine;
  int64_t dy_stride, x_stride;  // in vectors
  Turns turns;
  bool relu;
};

// A vector of g: dy, or 0 where ReLU cut y.
template <class T, int N>
__device__ __forceinline__ void load_gradient(float (&g)[N], const GradientsParams& p, const Channels<N>& channels,
                                              const Packed<T, N>& dy, const Packed<T, N>& x, unsigned kept) {
#pragma unroll
  for (int k = 0; k < N; ++k) {
    g[k] = element<T, N>(dy, k);
    if (p.mask)
      g[k] = kept >> k & 1 ? g[k] : 0.0f;
    else if (p.relu)
      g[k] = keeps(channels.value(element<T, N>(x, k), k)) ? g[k] : 0.0f;
  }
}

// The same turns for both passes: U rows of dy, x and the mask.
template <class T, int N, int U> struct RowsOfGradients {
  Packed<T, N> dy[U], x[U];
  unsigned kept[U];
  __device__ __forceinline__ RowsOfGradients(const GradientsParams& p, const Place<N>& at, int64_t first, bool with_x) {
    load_rows<T, N>(dy, p.dy, p.dy_stride, at.vector, first, at.rows_together, p.turns.rows);
    if (with_x)
      load_rows<T, N>(x, p.x, p.x_stride, at.vector, first, at.rows_together, p.turns.rows);
    else
      for (int u = 0; u < U; ++u) x[u] = {};
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t row = first + u * at.rows_together;
      kept[u] = 0;
      if (p.mask && row < p.turns.rows) kept[u] = device::load(p.mask + row * p.turns.vectors + at.vector);
    }
  }
};

template <class T, int N> __global__ void __launch_bounds__(kThreads, kBatchNormResident) sums(GradientsParams p) {
  constexpr int U = BatchNormTogether::sums;
  WARPSMITH_SHARED(float, sums, kThreads* N);
  WARPSMITH_SHARED(float, products, kThreads* N);
  const Turns& t = p.turns;
  const Place<N> at(t);
  float sum[N] = {}, product[N] = {};
  if (at.here) {
    const Channels<N> channels(p.affine, at.column, p.relu && !p.mask);
    for (int64_t turn = at.slice; turn < t.turns; turn += t.slices) {
      const int64_t first = turn * t.rows_a_turn + at.row;
      const RowsOfGradients<T, N, U> rows(p, at, first, true);
      float g[U][N];
#pragma unroll
      for (int u = 0; u < U; ++u) load_gradient<T, N>(g[u], p, channels, rows.dy[u], rows.x[u], rows.kept[u]);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        float d[U];
#pragma unroll
        for (int u = 0; u < U; ++u)
          d[u] = first + u * at.rows_together < t.rows ? element<T, N>(rows.x[u], k) - channels.mean[k] : 0.0f;
        sum[k] += (g[0][k] + g[1][k]) + (g[2][k] + g[3][k]);
        product[k] += fmaf(g[0][k], d[0], g[1][k] * d[1]) + fmaf(g[2][k], d[2], g[3][k] * d[3]);
      }
    }
  }
#pragma unroll
  for (int k = 0; k < N; ++k) {
    sums[threadIdx.x * N + k] = sum[k];
    products[threadIdx.x * N + k] = product[k];
  }
  __syncthreads();
  const int width = t.lanes * N;
  const int64_t column = at.tile * width + threadIdx.x;
  if (static_cast<int>(threadIdx.x) >= width || column >= t.columns) return;
  const auto total_of = [&](const float* of) {
    return static_cast<float>(
        sum_of_block(at.rows_together, [&](int r) { return of[r * width + static_cast<int>(threadIdx.x)]; }));
  };
  device::store(p.sums + at.slice * t.columns + column, total_of(sums));
  device::store(p.products + at.slice * t.columns + column, total_of(products));
}

struct FinishSumsParams {
  const float *sums, *products;    // [slices, columns]
  const float* rstd;               // [columns]
  float *mean_sum, *mean_product;  // [columns]: mean of g, and mean of g * x_hat times rstd
  void *dweight, *dbias;           // [columns], dtype, or null
  int64_t rows, columns, slices;
  Dtype dtype;
};

__global__ void __launch_bounds__(kThreads) finish_sums(FinishSumsParams p) {
  WARPSMITH_SHARED(double, first_scratch, kThreads);
  WARPSMITH_SHARED(double, second_scratch, kThreads);
  device::wait_for_previous_kernel();
  const int part = static_cast<int>(threadIdx.x) / kItems;
  const int64_t column = int64_t{blockIdx.x} * kItems + threadIdx.x % kItems;
  const bool here = column < p.columns;
  double sum = 0, product = 0;
#pragma unroll 4
  for (int64_t s = here ? part : p.slices; s < p.slices; s += kParts) {
    sum += device::load(p.sums + s * p.columns + column);
    product += device::load(p.products + s * p.columns + column);
  }
  sum = sum_of_parts(sum, first_scratch);
  product = sum_of_parts(product, second_scratch);
  if (part != 0 || !here) return;
  const double rstd = device::load(p.rstd + column), rows = static_cast<double>(p.rows);
  product *= rstd;
  device::store(p.mean_sum + column, static_cast<float>(sum / rows));
  device::store(p.mean_product + column, static_cast<float>(product * rstd / rows));
  if (p.dbias) store_as(p.dbias, p.dtype, column, static_cast<float>(sum));
  if (p.dweight) store_as(p.dweight, p.dtype, column, static_cast<float>(product));
}

template <class T, int N> __global__ void __launch_bounds__(kThreads, kBatchNormResident) gradients(GradientsParams p) {
  constexpr int U = BatchNormTogether::gradients;
  device::wait_for_previous_kernel();
  const Turns& t = p.turns;
  const Place<N> at(t);
  if (!at.here) return;
  const bool again = p.relu && !p.mask, with_x = again || (p.dx && p.sums);
  const Channels<N> channels(p.affine, at.column, again);
  float mean_sum[N] = {}, mean_product[N] = {};
  if (p.sums) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      mean_sum[k] = device::load(p.sums + at.column + k);
      mean_product[k] = device::load(p.products + at.column + k);
    }
  }
  for (int64_t turn = t.turns - 1 - at.slice; turn >= 0; turn -= t.slices) {
    const int64_t first = turn * t.rows_a_turn + at.row;
    const RowsOfGradients<T, N, U> rows(p, at, first, with_x);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t row = first + u * at.rows_together;
      if (row >= t.rows) break;
      float g[N], dx[N];
      load_gradient<T, N>(g, p, channels, rows.dy[u], rows.x[u], rows.kept[u]);
      if (p.dresidual) device::store(vector_at<T, N>(p.dresidual, row * t.vectors + at.vector), device::rounded<T>(g));
      if (!p.dx) continue;
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float d = p.sums ? element<T, N>(rows.x[u], k) - channels.mean[k] : 0.0f;
        dx[k] = channels.scale[k] * fmaf(-d, mean_product[k], g[k] - mean_sum[k]);
      }
      device::store(vector_at<T, N>(p.dx, row * t.vectors + at.vector), device::rounded<T>(dx));
    }
  }
}

}  // namespace warpsmith::batch_norm
