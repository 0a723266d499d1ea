#pragma once
#include "kernels/group_norm/place.cuh"

// One kernel: a cluster reads a range of groups of a sample for the statistics, adds them up in its shared memory, and
// reads the range once more, from the L2 cache, to normalise it. Reads x twice, writes y once, in a fixed order.
namespace warpsmith::group_norm {

struct ForwardParams {
  const void *x, *weight, *bias;
  void* y;
  float *mean, *rstd;
  int64_t x_stride;  // in vectors
  Ranges ranges;
  double eps;
  Dtype weight_dtype;
  bool silu;
};

constexpr int kRowsInFlight = 4;

// The rows of a thread of y, in the vector `v` of the range. The rows that were read last come first: the L2 cache has
// them.
template <bool kSilu, class T, int N>
__device__ __forceinline__ void normalize(const ForwardParams& p, const Place<N>& at, const Channel* table, int64_t v) {
  constexpr int U = kRowsInFlight;
  const Ranges& r = p.ranges;
  Channel channels[N];
#pragma unroll
  for (int k = 0; k < N; ++k) channels[k] = table[k * r.lanes + at.lane];
  const auto rows = at.template rows_of<T>(p.x, p.x_stride, r, v, U);
  const int64_t step = r.channels / N;
  Packed<T, N>* const to = vector_at<T, N>(p.y, at.first(r) * step + int64_t{at.range} * r.vectors + v);
#pragma unroll 1
  for (int64_t turn = (rows.left - 1) / rows.turn * rows.turn; turn >= 0 && rows.left > 0; turn -= rows.turn) {
    Packed<T, N> x[U];
    load_rows<T, N>(x, rows.from, rows.stride, 0, turn, rows.apart, rows.left);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t row = turn + u * rows.apart;
      if (row >= rows.left) break;
      float y[N];
#pragma unroll
      for (int k = 0; k < N; ++k) {
        y[k] = channels[k].value(element<T, N>(x[u], k));
        if constexpr (kSilu) y[k] = activation::Silu<activation::DeviceMath<T>>(y[k]).value();
      }
      device::store<device::Cache::streaming>(to + row * step, device::rounded<T>(y));
    }
  }
}

template <class T, int N> __global__ void __launch_bounds__(kThreads, kGroupNormResident) forward(ForwardParams p) {
  constexpr int U = kRowsInFlight;
  WARPSMITH_SHARED(Channel, channels, kApart * N / 2);  // after the sums, in their place
  WARPSMITH_SHARED(double, squares, kApart* N);
  WARPSMITH_SHARED(double, totals, 2 * kThreads);
  WARPSMITH_SHARED(float, means, kThreads);
  WARPSMITH_SHARED(float, rstds, kThreads);
  double* const sums = reinterpret_cast<double*>(channels);
  const Ranges& r = p.ranges;
  const Place<N> at(r);
  if (at.sample >= r.samples) return;
  const int thread = static_cast<int>(threadIdx.x), groups = at.groups(r);
#pragma unroll 1
  for (int64_t v = at.here ? at.lane : r.vectors; v < r.vectors; v += r.lanes) {
    Moments<N> m;
    const double count = add_rows<U>(m, at.template rows_of<T>(p.x, p.x_stride, r, v, U));
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const double center = m.center[k], sum = m.sum[k];
      const int own = of_thread<N>(k, thread);
      if (v == at.lane) sums[own] = squares[own] = 0;
      sums[own] += count * center + sum;
      squares[own] += m.square[k] + center * (2 * sum + count * center);
    }
  }
#pragma unroll 1
  for (int k = at.here ? 0 : N; k < N; ++k) {  // squares beyond float
    const int own = of_thread<N>(k, thread);
    if (squares[own] - squares[own] == 0) continue;
    sums[own] = squares[own] = 0;
    for (int64_t v = at.lane; v < r.vectors; v += r.lanes) {
      double sum, square;
      add_in_double<U>(at.template rows_of<T>(p.x, p.x_stride, r, v, U), k, sum, square);
      sums[own] += sum;
      squares[own] += square;
    }
  }
  __syncthreads();
  const int wide = static_cast<int>(min(r.group, int64_t{r.lanes} * N));  // channels of a group in a tile
  totals_of_groups(totals, groups, at.rows * wide, [&](int group, int i, double& sum, double& square) {
    const int from = of_row<N>(r, i / wide, group * wide + i % wide);
    sum += sums[from];
    square += squares[from];
  });
  double sum, square;
  totals_of_cluster(totals, groups, r.cluster, sum, square);
  if (thread < groups) {
    const double values = static_cast<double>(r.pixels) * static_cast<double>(r.group), mean = sum / values;
    const double var = square / values - mean * mean;
    means[thread] = static_cast<float>(mean);
    rstds[thread] = static_cast<float>(1 / sqrt((var < 0 ? 0 : var) + p.eps));
    if (at.rank == 0) {
      const int64_t group = at.first_group(r) + thread;
      device::store(p.mean + group, means[thread]);
      device::store(p.rstd + group, rstds[thread]);
    }
  }
  for (int64_t tile = 0; tile < r.vectors; tile += r.lanes) {
    __syncthreads();
    each_channel<N>(r, tile, [&](int c) {
      const int64_t channel = at.channel(r, tile) + c;
      const int group = at.group_of(r, tile, c);
      channels[in_table<N>(r, c)] =
          Channel(means[group], rstds[group], p.weight ? load_as(p.weight, p.weight_dtype, channel) : 1.0f,
                  p.bias ? load_as(p.bias, p.weight_dtype, channel) : 0.0f);
    });
    __syncthreads();
    const int64_t v = tile + at.lane;
    if (!at.here || v >= r.vectors) continue;
    if (p.silu)
      normalize<true, T>(p, at, channels, v);
    else
      normalize<false, T>(p, at, channels, v);
  }
  if (r.cluster > 1) device::cluster_wait();
}

}  // namespace warpsmith::group_norm
