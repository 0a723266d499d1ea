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

template <class T, int N> __global__ void __launch_bounds__(kThreads, kGroupNormResident) forward(ForwardParams p) {
  constexpr int U = 4, kAgain = 8;  // rows in flight, of the first read beside those that are added
  WARPSMITH_SHARED(double, sums, kThreads* N);
  WARPSMITH_SHARED(double, squares, kThreads* N);
  WARPSMITH_SHARED(double, totals, 2 * kThreads);
  WARPSMITH_SHARED(float, means, kThreads);
  WARPSMITH_SHARED(float, rstds, kThreads);
  const Ranges& r = p.ranges;
  const Place<N> at(r);
  if (at.sample >= r.samples) return;
  const int thread = static_cast<int>(threadIdx.x), own = thread * N, groups = at.groups(r);
#pragma unroll
  for (int k = 0; k < N; ++k) sums[own + k] = squares[own + k] = 0;
  for (int64_t v = at.here ? at.lane : r.vectors; v < r.vectors; v += r.lanes) {
    const auto rows = at.template rows_of<T>(p.x, p.x_stride, r, v, U);
    Moments<N> m;
    const double count = add_rows<U>(m, rows);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const double center = m.center[k], sum = m.sum[k];
      sums[own + k] += count * center + sum;
      squares[own + k] += m.square[k] + center * (2 * sum + count * center);
    }
  }
#pragma unroll 1
  for (int k = 0; k < N; ++k) {  // squares beyond float
    if (squares[own + k] - squares[own + k] == 0) continue;
    sums[own + k] = squares[own + k] = 0;
    for (int64_t v = at.lane; v < r.vectors; v += r.lanes) {
      double sum, square;
      add_in_double<U>(at.template rows_of<T>(p.x, p.x_stride, r, v, U), k, sum, square);
      sums[own + k] += sum;
      squares[own + k] += square;
    }
  }
  __syncthreads();
  {
    // Thread (part, g) adds every parts-th value of group g; then one thread of each group adds the parts.
    const int group = thread % groups, parts = kThreads / groups, part = thread / groups;
    const int width = r.lanes * N, wide = static_cast<int>(min(r.group, int64_t{width})), all = at.rows * wide;
    double sum = 0, square = 0;
    for (int i = part < parts ? part : all; i < all; i += parts) {
      const int from = i / wide * width + group * wide + i % wide;
      sum += sums[from];
      square += squares[from];
    }
    __syncthreads();
    sums[thread] = sum;
    squares[thread] = square;
    __syncthreads();
    if (thread < groups) {
      sum = square = 0;
      for (int i = 0; i < parts; ++i) {
        sum += sums[i * groups + thread];
        square += squares[i * groups + thread];
      }
      totals[thread] = sum;
      totals[kThreads + thread] = square;
    }
  }
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
  __syncthreads();
  for (int64_t v = at.here ? at.lane : r.vectors; v < r.vectors; v += r.lanes) {
    Channel channels[N];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const int64_t channel = at.channel(r, v) + k;
      const int group = at.group_of(r, v, k);
      channels[k] = Channel(means[group], rstds[group], p.weight ? load_as(p.weight, p.weight_dtype, channel) : 1.0f,
                            p.bias ? load_as(p.bias, p.weight_dtype, channel) : 0.0f);
    }
    const auto rows = at.template rows_of<T>(p.x, p.x_stride, r, v, kAgain);
    const int64_t step = r.channels / N;
    Packed<T, N>* const to =
        vector_at<T, N>(p.y, (at.sample * r.pixels + at.begin + at.row) * step + int64_t{at.range} * r.vectors + v);
    for (int64_t turn = (rows.left - 1) / rows.turn * rows.turn; turn >= 0 && rows.left > 0; turn -= rows.turn) {
      Packed<T, N> x[kAgain];
      load_rows<T, N>(x, rows.from, rows.stride, 0, turn, rows.apart, rows.left);
#pragma unroll
      for (int u = 0; u < kAgain; ++u) {
        const int64_t row = turn + u * rows.apart;
        if (row >= rows.left) break;
        float y[N];
#pragma unroll
        for (int k = 0; k < N; ++k) {
          y[k] = channels[k].value(element<T, N>(x[u], k));
          if (p.silu) y[k] = activation::Silu<activation::DeviceMath<T>>(y[k]).value();
        }
        device::store<device::Cache::streaming>(to + row * step, device::rounded<T>(y));
      }
    }
  }
  if (r.cluster > 1) device::cluster_wait();
}

}  // namespace warpsmith::group_norm
