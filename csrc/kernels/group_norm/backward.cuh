#pragma once
#include "kernels/group_norm/place.cuh"

// One kernel: a cluster reads dy and x of a range of groups of a sample for two sums a channel, adds them up to those
// of groups, and reads both once more, from the L2 cache, for dx. Each block writes its two sums a channel, from which
// `sum_partials` makes dweight and dbias. Reads dy and x twice, writes dx once, in a fixed order.
namespace warpsmith::group_norm {

struct BackwardParams {
  const void *dy, *x, *weight, *bias;
  void* dx;
  const float *mean, *rstd;
  double* partials;             // [2, samples * cluster, channels]: of g * x_hat, and of g; or null
  int64_t dy_stride, x_stride;  // in vectors
  Ranges ranges;
  int64_t slices;  // samples * cluster
  Dtype weight_dtype;
  bool silu;
};

// What dx takes of the group of a channel, times rstd: the mean of g * weight; that of g * weight * x_hat, times x_hat
// of one unit.
struct alignas(8) Means {
  float of_gradient, of_product;
};

template <bool kSilu, class T> __device__ __forceinline__ float gradient_of(const Channel& channel, float dy, float x) {
  if constexpr (kSilu) return activation::Silu<activation::DeviceMath<T>>(channel.value(x)).times_derivative(dy);
  return dy;
}

// Adds up g and g * centered(x) over the rows of a thread, in the vector `v` of the range.
template <bool kSilu, class T, int N>
__device__ __forceinline__ void add_gradients(const BackwardParams& p, const Place<N>& at, const Channel* table,
                                              int64_t v, float (&of_g)[N], float (&of_products)[N]) {
  constexpr int U = 4;
  const Ranges& r = p.ranges;
  Channel channels[N];
#pragma unroll
  for (int k = 0; k < N; ++k) channels[k] = table[k * r.lanes + at.lane];
  const auto dys = at.template rows_of<T>(p.dy, p.dy_stride, r, v, U);
  const auto xs = at.template rows_of<T>(p.x, p.x_stride, r, v, U);
#pragma unroll 1
  for (int64_t turn = 0; turn < xs.left; turn += xs.turn) {
    Packed<T, N> dy[U], x[U];
    load_rows<T, N>(dy, dys.from, dys.stride, 0, turn, dys.apart, dys.left);
    load_rows<T, N>(x, xs.from, xs.stride, 0, turn, xs.apart, xs.left);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      float g[U], d[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const float value = element<T, N>(x[u], k);
        g[u] = gradient_of<kSilu, T>(channels[k], element<T, N>(dy[u], k), value);  // behind the last row 0
        d[u] = channels[k].centered(value);
      }
      of_g[k] += (g[0] + g[1]) + (g[2] + g[3]);
      of_products[k] += fmaf(g[0], d[0], g[1] * d[1]) + fmaf(g[2], d[2], g[3] * d[3]);
    }
  }
}

// The rows of a thread of dx, in the vector `v` of the range. The rows that were read last come first.
template <bool kSilu, class T, int N> __device__ __forceinline__ void write_dx(const BackwardParams& p,
                                                                               const Place<N>& at, const Channel* table,
                                                                               const Means* means_of, int64_t v) {
  constexpr int U = 4;
  const Ranges& r = p.ranges;
  Channel channels[N];
  Means means[N];
#pragma unroll
  for (int k = 0; k < N; ++k) {
    channels[k] = table[k * r.lanes + at.lane];
    means[k] = means_of[k * r.lanes + at.lane];
  }
  const auto dys = at.template rows_of<T>(p.dy, p.dy_stride, r, v, U);
  const auto xs = at.template rows_of<T>(p.x, p.x_stride, r, v, U);
  const int64_t step = r.channels / N;
  Packed<T, N>* const to = vector_at<T, N>(p.dx, at.first(r) * step + int64_t{at.range} * r.vectors + v);
#pragma unroll 1
  for (int64_t turn = (xs.left - 1) / xs.turn * xs.turn; turn >= 0 && xs.left > 0; turn -= xs.turn) {
    Packed<T, N> dy[U], x[U];
    load_rows<T, N>(dy, dys.from, dys.stride, 0, turn, dys.apart, dys.left);
    load_rows<T, N>(x, xs.from, xs.stride, 0, turn, xs.apart, xs.left);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t row = turn + u * xs.apart;
      if (row >= xs.left) break;
      float dx[N];
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float value = element<T, N>(x[u], k);
        const float g = gradient_of<kSilu, T>(channels[k], element<T, N>(dy[u], k), value);
        const float of_group = fmaf(channels[k].centered(value), means[k].of_product, means[k].of_gradient);
        dx[k] = fmaf(g * channels[k].unit, channels[k].scale, -of_group);  // weight * rstd = unit * scale
      }
      device::store<device::Cache::streaming>(to + row * step, device::rounded<T>(dx));
    }
  }
}

template <class T, int N> __global__ void __launch_bounds__(kThreads, kGroupNormResident) backward(BackwardParams p) {
  WARPSMITH_SHARED(Channel, channels, kLanes * N);
  WARPSMITH_SHARED(Means, means, kApart * N / 2);  // after the sums, in their place
  WARPSMITH_SHARED(float, products, kApart* N);
  WARPSMITH_SHARED(double, of_channels, 2 * kThreads);
  WARPSMITH_SHARED(double, totals, 2 * kThreads);
  float* const sums = reinterpret_cast<float*>(means);
  const Ranges& r = p.ranges;
  const Place<N> at(r);
  if (at.sample >= r.samples) return;
  const int thread = static_cast<int>(threadIdx.x), groups = at.groups(r);
  const auto rstd_of = [&](int64_t tile, int c) {
    return device::load(p.rstd + at.first_group(r) + at.group_of(r, tile, c));
  };
  const auto weight_of = [&](int64_t channel) { return p.weight ? load_as(p.weight, p.weight_dtype, channel) : 1.0f; };
  const auto fill_channels = [&](int64_t tile) {
    each_channel<N>(r, tile, [&](int c) {
      const int64_t channel = at.channel(r, tile) + c;
      const float mean = device::load(p.mean + at.first_group(r) + at.group_of(r, tile, c));
      channels[in_table<N>(r, c)] = Channel(mean, rstd_of(tile, c), weight_of(channel),
                                            p.silu && p.bias ? load_as(p.bias, p.weight_dtype, channel) : 0.0f);
    });
  };
  double sum = 0, product = 0;  // of this thread's channels, of g * weight and of g * weight * x_hat
  for (int64_t tile = 0; tile < r.vectors; tile += r.lanes) {
    if (tile > 0) __syncthreads();
    fill_channels(tile);
    __syncthreads();
    const int64_t v = tile + at.lane;
    float of_g[N] = {}, of_products[N] = {};
    if (at.here && v < r.vectors) {
      if (p.silu)
        add_gradients<true, T>(p, at, channels, v, of_g, of_products);
      else
        add_gradients<false, T>(p, at, channels, v, of_g, of_products);
    }
#pragma unroll
    for (int k = 0; k < N; ++k) {
      sums[of_thread<N>(k, thread)] = of_g[k];
      products[of_thread<N>(k, thread)] = of_products[k];
    }
    __syncthreads();
    each_channel<N>(r, tile, [&](int c) {
      double g = 0, g_x_hat = 0;
      for (int row = 0; row < at.rows; ++row) {
        g += sums[of_row<N>(r, row, c)];
        g_x_hat += products[of_row<N>(r, row, c)];
      }
      g_x_hat *= share_of(rstd_of(tile, c), channels[in_table<N>(r, c)].unit);
      const int64_t channel = at.channel(r, tile) + c;
      if (p.partials) {
        const int64_t place = (at.sample * r.cluster + at.rank) * r.channels + channel;
        device::store(p.partials + place, g_x_hat);
        device::store(p.partials + p.slices * r.channels + place, g);
      }
      const double weight = weight_of(channel);
      sum += weight * g;
      product += weight * g_x_hat;
    });
  }
  of_channels[thread] = sum;
  of_channels[kThreads + thread] = product;
  __syncthreads();
  const int wide = groups > 1 ? static_cast<int>(r.group) : kThreads;  // threads with channels of a group
  totals_of_groups(totals, groups, wide, [&](int group, int i, double& first, double& second) {
    first += of_channels[group * wide + i];
    second += of_channels[kThreads + group * wide + i];
  });
  totals_of_cluster(totals, groups, r.cluster, sum, product);
  // `of_channels` now has the means of groups.
  const double values = static_cast<double>(r.pixels) * static_cast<double>(r.group);
  if (thread < groups) {
    const double undefined = (sum - sum) + (product - product);  // 0, or NaN where a sum is infinite: so is all dx then
    of_channels[thread] = sum / values + undefined;
    of_channels[kThreads + thread] = product / values + undefined;
  }
  for (int64_t tile = 0; p.dx && tile < r.vectors; tile += r.lanes) {
    __syncthreads();
    if (r.vectors > r.lanes) {
      fill_channels(tile);
      __syncthreads();
    }
    each_channel<N>(r, tile, [&](int c) {
      const int group = at.group_of(r, tile, c), place = in_table<N>(r, c);
      const float rstd = rstd_of(tile, c);
      means[place] = {static_cast<float>(of_channels[group]) * rstd,
                      static_cast<float>(of_channels[kThreads + group]) * rstd * share_of(rstd, channels[place].unit)};
    });
    __syncthreads();
    const int64_t v = tile + at.lane;
    if (!at.here || v >= r.vectors) continue;
    if (p.silu)
      write_dx<true, T>(p, at, channels, means, v);
    else
      write_dx<false, T>(p, at, channels, means, v);
  }
  if (r.cluster > 1) device::cluster_wait();
}

}  // namespace warpsmith::group_norm
