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
  float *sums, *products;  // [slices, columns] of g and of g * (x - mean) * unit
  const float* means;      // [2, columns] of g and of g * x_hat, for `gradients`; null: zeros
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
  Packed<T, N> dy[U], x[U] = {};
  unsigned kept[U];
  template <device::Cache cache>
  __device__ __forceinline__ void load(const GradientsParams& p, const Place<N>& at, int64_t first, bool with_x) {
    load_rows<T, N, cache>(dy, p.dy, p.dy_stride, at.vector, first, at.rows_together, p.turns.rows);
    if (with_x) load_rows<T, N, cache>(x, p.x, p.x_stride, at.vector, first, at.rows_together, p.turns.rows);
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
  static_assert(U == 4);
  WARPSMITH_SHARED(float, sums, kThreads* N);
  WARPSMITH_SHARED(float, products, kThreads* N);
  WARPSMITH_SHARED(double, scratch, 2 * kThreads);
  device::launch_dependents();
  const Turns& t = p.turns;
  const Place<N> at(t);
  float sum[N] = {}, product[N] = {};
  if (at.here) {
    const Channels<N> channels(p.affine, at.column, p.relu && !p.mask);
    for (int64_t turn = at.slice; turn < t.turns; turn += t.slices) {
      const int64_t first = turn * t.rows_a_turn + at.row;
      RowsOfGradients<T, N, U> rows;
      rows.template load<device::Cache::keep>(p, at, first, true);
      float g[U][N];
#pragma unroll
      for (int u = 0; u < U; ++u) load_gradient<T, N>(g[u], p, channels, rows.dy[u], rows.x[u], rows.kept[u]);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        float d[U];
#pragma unroll
        for (int u = 0; u < U; ++u)
          d[u] = channels.centered(element<T, N>(rows.x[u], k), k);  // behind the last row g is 0
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
  const auto add = [&](int place, double& of_g, double& of_products) {
    of_g += sums[place];
    of_products += products[place];
  };
  int64_t column;
  double of_g, of_products;
  if (!sums_of_block<N>(t, at.tile, scratch, add, column, of_g, of_products)) return;
  device::store(p.sums + at.slice * t.columns + column, static_cast<float>(of_g));
  device::store(p.products + at.slice * t.columns + column, static_cast<float>(of_products));
}

struct FinishSumsParams {
  const float *sums, *products;    // [slices, columns]
  const float *mean, *rstd;        // [columns]
  float *mean_sum, *mean_product;  // [columns]: means of g and of g * x_hat
  void *dweight, *dbias;           // [columns], dtype, or null
  int64_t rows, columns, slices;
  Dtype dtype;
};

__global__ void __launch_bounds__(kThreads) finish_sums(FinishSumsParams p) {
  WARPSMITH_SHARED(double, first_scratch, kThreads);
  WARPSMITH_SHARED(double, second_scratch, kThreads);
  device::launch_dependents();
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
  const float rstd = device::load(p.rstd + column);
  const double rows = static_cast<double>(p.rows);
  const double share = static_cast<double>(rstd) / unit_of(device::load(p.mean + column), rstd);
  product *= share;
  device::store(p.mean_sum + column, static_cast<float>(sum / rows));
  device::store(p.mean_product + column, static_cast<float>(product / rows));
  if (p.dbias) store_as(p.dbias, p.dtype, column, static_cast<float>(sum));
  if (p.dweight) store_as(p.dweight, p.dtype, column, static_cast<float>(product));
}

template <class T, int N> __global__ void __launch_bounds__(kThreads, kBatchNormResident) gradients(GradientsParams p) {
  constexpr int U = BatchNormTogether::gradients;
  constexpr auto once = device::Cache::streaming;
  const Turns& t = p.turns;
  const Place<N> at(t);
  if (!at.here) return device::wait_for_previous_kernel();
  const bool again = p.relu && !p.mask, with_x = again || (p.dx && p.means);
  int64_t turn = t.turns - 1 - at.slice, first = turn * t.rows_a_turn + at.row;
  RowsOfGradients<T, N, U> rows;
  rows.template load<once>(p, at, first, with_x);  // of no kernel that still runs
  device::wait_for_previous_kernel();
  const Channels<N> channels(p.affine, at.column, again);
  float mean_sum[N] = {}, mean_product[N] = {};
  if (p.means) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      mean_sum[k] = device::load(p.means + at.column + k);
      mean_product[k] = share_of(device::load(p.affine.rstd + at.column + k), channels.unit[k]) *
                        device::load(p.means + t.columns + at.column + k);
    }
  }
  for (;;) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t row = first + u * at.rows_together;
      if (row >= t.rows) break;
      float g[N], dx[N];
      load_gradient<T, N>(g, p, channels, rows.dy[u], rows.x[u], rows.kept[u]);
      if (p.dresidual)
        device::store<once>(vector_at<T, N>(p.dresidual, row * t.vectors + at.vector), device::rounded<T>(g));
      if (!p.dx) continue;
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float d = p.means ? channels.centered(element<T, N>(rows.x[u], k), k) : 0.0f;
        // The means first: of their sum, less than g as a rule, a rounding costs less.
        dx[k] = (g[k] - fmaf(d, mean_product[k], mean_sum[k])) * channels.unit[k] * channels.scale[k];
      }
      device::store<once>(vector_at<T, N>(p.dx, row * t.vectors + at.vector), device::rounded<T>(dx));
    }
    turn -= t.slices;
    if (turn < 0) return;
    first = turn * t.rows_a_turn + at.row;
    rows.template load<once>(p, at, first, with_x);
  }
}

}  // namespace warpsmith::batch_norm
