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
  float* partials;              // [2, samples * cluster, channels]: of g * x_hat, and of g; or null
  int64_t dy_stride, x_stride;  // in vectors
  Ranges ranges;
  int64_t slices;  // samples * cluster
  Dtype weight_dtype;
  bool silu;
};

template <int N> struct Channels {
  Channel at[N];
  float rstd[N];

  __device__ __forceinline__ Channels(const BackwardParams& p, const Place<N>& place, int64_t v) {
    const Ranges& r = p.ranges;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const int64_t channel = place.channel(r, v) + k, group = place.first_group(r) + place.group_of(r, v, k);
      rstd[k] = device::load(p.rstd + group);
      at[k] =
          Channel(device::load(p.mean + group), rstd[k], p.weight ? load_as(p.weight, p.weight_dtype, channel) : 1.0f,
                  p.silu && p.bias ? load_as(p.bias, p.weight_dtype, channel) : 0.0f);
    }
  }
};

template <class T>
__device__ __forceinline__ float gradient_of(const BackwardParams& p, const Channel& channel, float dy, float x) {
  return p.silu ? activation::Silu<activation::DeviceMath<T>>(channel.value(x)).times_derivative(dy) : dy;
}

template <class T, int N> __global__ void __launch_bounds__(kThreads, kGroupNormResident) backward(BackwardParams p) {
  constexpr int U = 4;
  WARPSMITH_SHARED(float, sums, kThreads* N);
  WARPSMITH_SHARED(float, products, kThreads* N);
  WARPSMITH_SHARED(double, of_channels, 2 * kThreads);
  WARPSMITH_SHARED(double, totals, 2 * kThreads);
  const Ranges& r = p.ranges;
  const Place<N> at(r);
  if (at.sample >= r.samples) return;
  const int thread = static_cast<int>(threadIdx.x), groups = at.groups(r), width = r.lanes * N;
  double sum = 0, product = 0;  // of this thread's channels, of g * weight and of g * weight * x_hat
  for (int64_t tile = 0; tile < r.vectors; tile += r.lanes) {
    const int64_t v = tile + at.lane;
    float of_g[N] = {}, of_products[N] = {};
    if (at.here && v < r.vectors) {
      const Channels<N> channels(p, at, v);
      const auto dys = at.template rows_of<T>(p.dy, p.dy_stride, r, v, U);
      const auto xs = at.template rows_of<T>(p.x, p.x_stride, r, v, U);
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
            g[u] = gradient_of<T>(p, channels.at[k], element<T, N>(dy[u], k), value);  // behind the last row 0
            d[u] = channels.at[k].centered(value);
          }
          of_g[k] += (g[0] + g[1]) + (g[2] + g[3]);
          of_products[k] += fmaf(g[0], d[0], g[1] * d[1]) + fmaf(g[2], d[2], g[3] * d[3]);
        }
      }
#pragma unroll
      for (int k = 0; k < N; ++k) of_products[k] *= share_of(channels.rstd[k], channels.at[k].unit);
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < N; ++k) {
      sums[thread * N + k] = of_g[k];
      products[thread * N + k] = of_products[k];
    }
    __syncthreads();
    for (int c = thread; c < width && tile * N + c < r.vectors * N; c += kThreads) {
      double g = 0, g_x_hat = 0;
      for (int row = 0; row < at.rows; ++row) {
        g += sums[row * width + c];
        g_x_hat += products[row * width + c];
      }
      const int64_t channel = at.channel(r, tile) + c;
      if (p.partials) {
        const int64_t place = (at.sample * r.cluster + at.rank) * r.channels + channel;
        device::store(p.partials + place, static_cast<float>(g_x_hat));
        device::store(p.partials + p.slices * r.channels + place, static_cast<float>(g));
      }
      const double weight = p.weight ? load_as(p.weight, p.weight_dtype, channel) : 1.0f;
      sum += weight * g;
      product += weight * g_x_hat;
    }
  }
  of_channels[thread] = sum;
  of_channels[kThreads + thread] = product;
  __syncthreads();
  if (thread < groups) {
    const int wide = static_cast<int>(groups > 1 ? r.group : kThreads);  // threads with channels of a group
    sum = product = 0;
    for (int i = 0; i < wide; ++i) {
      sum += of_channels[thread * wide + i];
      product += of_channels[kThreads + thread * wide + i];
    }
    totals[thread] = sum;
    totals[kThreads + thread] = product;
  }
  totals_of_cluster(totals, groups, r.cluster, sum, product);
  // `of_channels` now has the means of groups.
  const double values = static_cast<double>(r.pixels) * static_cast<double>(r.group);
  if (thread < groups) {
    const double undefined = (sum - sum) + (product - product);  // 0, or NaN where a sum is infinite: so is all dx then
    of_channels[thread] = sum / values + undefined;
    of_channels[kThreads + thread] = product / values + undefined;
  }
  __syncthreads();
  for (int64_t v = at.here && p.dx ? at.lane : r.vectors; v < r.vectors; v += r.lanes) {
    const Channels<N> channels(p, at, v);
    float mean_sum[N], mean_product[N];  // times rstd
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const int group = at.group_of(r, v, k);
      mean_sum[k] = static_cast<float>(of_channels[group]) * channels.rstd[k];
      mean_product[k] = static_cast<float>(of_channels[kThreads + group]) * channels.rstd[k] *
                        share_of(channels.rstd[k], channels.at[k].unit);
    }
    const auto dys = at.template rows_of<T>(p.dy, p.dy_stride, r, v, U);
    const auto xs = at.template rows_of<T>(p.x, p.x_stride, r, v, U);
    const int64_t step = r.channels / N;
    Packed<T, N>* const to =
        vector_at<T, N>(p.dx, (at.sample * r.pixels + at.begin + at.row) * step + int64_t{at.range} * r.vectors + v);
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
          const float g = gradient_of<T>(p, channels.at[k], element<T, N>(dy[u], k), value);
          const float of_group = fmaf(channels.at[k].centered(value), mean_product[k], mean_sum[k]);
          dx[k] = fmaf(g * channels.at[k].unit, channels.at[k].scale, -of_group);  // weight * rstd = unit * scale
        }
        device::store<device::Cache::streaming>(to + row * step, device::rounded<T>(dx));
      }
    }
  }
  if (r.cluster > 1) device::cluster_wait();
}

}  // namespace warpsmith::group_norm
