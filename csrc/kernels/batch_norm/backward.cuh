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

// Rows of dy, x and the mask: the same for both passes.
template <class T, int N> struct RowsOfGradients {
  static constexpr int U = kRowsAStage;
  Ring<T, N, 2> ring;
  Packed<T, N> dy[U], x[U] = {};

  __device__ __forceinline__ explicit RowsOfGradients(unsigned char* memory) : ring(memory) {}
  // Begins to copy those of a turn, if there is one, to the ring.
  __device__ __forceinline__ void copy(const GradientsParams& p, const Place<N>& at, int64_t turn, bool with_x) {
    if (turn >= 0 && turn < p.turns.turns) {
      const int64_t first = turn * p.turns.rows_a_turn + at.row;
      ring.copy(0, p.dy, p.dy_stride, at.vector, first, at.rows_together, p.turns.rows);
      if (with_x) ring.copy(1, p.x, p.x_stride, at.vector, first, at.rows_together, p.turns.rows);
    }
    ring.copied();
  }
  // The mask of a turn, which no copy of 4 bytes fits.
  __device__ __forceinline__ unsigned mask_of(const GradientsParams& p, const Place<N>& at, int64_t turn) const {
    unsigned bytes = 0;
    if (!p.mask || turn < 0) return 0;
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t row = turn * p.turns.rows_a_turn + at.row + u * at.rows_together;
      if (row < p.turns.rows) bytes |= unsigned{device::load(p.mask + row * p.turns.vectors + at.vector)} << (8 * u);
    }
    return bytes;
  }
  // Waits for those of the oldest turn in the ring.
  __device__ __forceinline__ void take(bool with_x) {
    ring.wait();
    ring.take(dy, 0);
    if (with_x) ring.take(x, 1);
  }
};

template <class T, int N> __global__ void __launch_bounds__(kThreads, kBatchNormResident) sums(GradientsParams p) {
  WARPSMITH_DYNAMIC_SHARED(memory);
  WARPSMITH_SHARED(float, sums, kThreads* N);
  WARPSMITH_SHARED(float, products, kThreads* N);
  WARPSMITH_SHARED(double, scratch, 2 * kThreads);
  device::launch_dependents();
  const Turns& t = p.turns;
  const Place<N> at(t);
  float sum[N] = {}, product[N] = {};
  if (at.here) {
    RowsOfGradients<T, N> rows(memory);
    constexpr int U = rows.U, kStages = rows.ring.kStages;
    static_assert(U == 4);
    for (int stage = 0; stage < kStages; ++stage) rows.copy(p, at, at.slice + stage * t.slices, true);
    const Channels<N> channels(p.affine, at.column, p.relu && !p.mask);
    unsigned kept = rows.mask_of(p, at, at.slice);
    for (int64_t turn = at.slice; turn < t.turns; turn += t.slices) {
      rows.take(true);
      const unsigned next = rows.mask_of(p, at, turn + t.slices);
      float g[U][N];
#pragma unroll
      for (int u = 0; u < U; ++u) load_gradient<T, N>(g[u], p, channels, rows.dy[u], rows.x[u], kept >> (8 * u));
#pragma unroll
      for (int k = 0; k < N; ++k) {
        float d[U];
#pragma unroll
        for (int u = 0; u < U; ++u)
          d[u] = channels.centered(element<T, N>(rows.x[u], k), k);  // behind the last row g is 0
        sum[k] += (g[0][k] + g[1][k]) + (g[2][k] + g[3][k]);
        product[k] += fmaf(g[0][k], d[0], g[1][k] * d[1]) + fmaf(g[2][k], d[2], g[3][k] * d[3]);
      }
      rows.copy(p, at, turn + kStages * t.slices, true);
      kept = next;
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
  double* exact;                   // [2, columns]: both sums, or null
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
  if (p.exact) {
    device::store(p.exact + column, sum);
    device::store(p.exact + p.columns + column, product);
  }
}

// means[0, c] and means[1, c]: of g and of g * x_hat over the rows of all ranks.
__global__ void __launch_bounds__(kThreads)
    mean_of_ranks(const double* sums, const double* statistics, float* means, int64_t ranks, int64_t columns) {
  device::launch_dependents();
  device::wait_for_previous_kernel();
  const int64_t column = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (column >= columns) return;
  double sum = 0, product = 0, rows = 0;
  for (int64_t r = 0; r < ranks; ++r) {
    sum += device::load(sums + 2 * r * columns + column);
    product += device::load(sums + (2 * r + 1) * columns + column);
    rows += device::load(statistics + (3 * r + 2) * columns + column);
  }
  device::store(means + column, static_cast<float>(sum / rows));
  device::store(means + columns + column, static_cast<float>(product / rows));
}

template <class T, int N> __global__ void __launch_bounds__(kThreads, kBatchNormResident) gradients(GradientsParams p) {
  WARPSMITH_DYNAMIC_SHARED(memory);
  const Turns& t = p.turns;
  const Place<N> at(t);
  if (!at.here) return device::wait_for_previous_kernel();
  const bool again = p.relu && !p.mask, with_x = again || (p.dx && p.means);
  RowsOfGradients<T, N> rows(memory);
  constexpr int U = rows.U, kStages = rows.ring.kStages;
  int64_t turn = t.turns - 1 - at.slice;
  for (int stage = 0; stage < kStages; ++stage)  // of no kernel that still runs
    rows.copy(p, at, turn - stage * t.slices, with_x);
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
  unsigned kept = rows.mask_of(p, at, turn);
  for (; turn >= 0; turn -= t.slices) {
    rows.take(with_x);
    const unsigned next = rows.mask_of(p, at, turn - t.slices);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t row = turn * t.rows_a_turn + at.row + u * at.rows_together;
      if (row >= t.rows) break;
      float g[N], dx[N];
      load_gradient<T, N>(g, p, channels, rows.dy[u], rows.x[u], kept >> (8 * u));
      if (p.dresidual) device::store(vector_at<T, N>(p.dresidual, row * t.vectors + at.vector), device::rounded<T>(g));
      if (!p.dx) continue;
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float d = p.means ? channels.centered(element<T, N>(rows.x[u], k), k) : 0.0f;
        // The means first: of their sum, less than g as a rule, a rounding costs less.
        dx[k] = (g[k] - fmaf(d, mean_product[k], mean_sum[k])) * channels.unit[k] * channels.scale[k];
      }
      device::store(vector_at<T, N>(p.dx, row * t.vectors + at.vector), device::rounded<T>(dx));
    }
    rows.copy(p, at, turn - kStages * t.slices, with_x);
    kept = next;
  }
}

}  // namespace warpsmith::batch_norm
