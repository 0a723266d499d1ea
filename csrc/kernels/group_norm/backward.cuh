#pragma once
#include "kernels/group_norm/place.cuh"
#include "kernels/group_norm/silu.cuh"

// The backward in two passes over dy and x: `sums` reads both once, and each block writes two sums of each of its
// channels, from which `sum_partials` makes dweight and dbias, and two of each of its groups; `gradients` adds these,
// in a fixed order, reads both once more from their end on, and writes dx once.
namespace warpsmith::group_norm {

struct BackwardParams {
  const void *dy, *x, *weight, *bias;
  void* dx;
  const float *mean, *rstd;
  double* partials;             // [2, samples, set, channels]: of g * x_hat, and of g; or null
  int64_t dy_stride, x_stride;  // in vectors
  Ranges ranges;
  int64_t slices;  // samples * set
  Dtype weight_dtype;
};

constexpr int kRowsOfBoth = 2;  // in a turn, of dy and of x

// A thread's channels, as both passes need them. Of no kernel that still runs.
template <bool kSilu, int N> struct Channels {
  Channel of[N];
  float rstd[N];

  __device__ __forceinline__ Channels(const BackwardParams& p, const Place<N>& at, float (&weight)[N]) {
    float mean[N], bias[N];
    const int64_t first = at.sample * p.ranges.groups + at.first_group(p.ranges);
    at.each_group(p.ranges, [&](int k, int group) {
      mean[k] = device::load(p.mean + first + group);
      rstd[k] = device::load(p.rstd + first + group);
    });
    load_channels(weight, p.weight, p.weight_dtype, at.own_channel(), 1.0f);
    load_channels(bias, kSilu ? p.bias : nullptr, p.weight_dtype, at.own_channel(), 0.0f);
#pragma unroll
    for (int k = 0; k < N; ++k) of[k] = Channel(mean[k], rstd[k], weight[k], bias[k]);
  }
  // g of a vector: dy, or dy times the derivative of silu.
  template <class T>
  __device__ __forceinline__ void gradients(const Packed<T, N>& dy, const Packed<T, N>& x, float (&g)[N]) const {
#pragma unroll
    for (int k = 0; k < N; ++k) g[k] = element<T, N>(dy, k);
    if constexpr (kSilu) {
      float v[N];
#pragma unroll
      for (int k = 0; k < N; ++k) v[k] = of[k].value(element<T, N>(x, k));
      times_silu_derivative<T>(g, v);
    }
  }
};

struct alignas(8) Affine {
  float share, weight;  // share: of rstd, behind a unit
};

template <class T, int N, bool kSilu> __global__ void __launch_bounds__(kThreads, kGroupNormResident)
    sums(BackwardParams p) {
  constexpr int U = kRowsOfBoth, kChannels = kGroupNormLanes * N;
  WARPSMITH_DYNAMIC_SHARED(memory);
  WARPSMITH_SHARED(Sums, totals, kThreads);
  WARPSMITH_SHARED(Affine, affine, kChannels);
  // After the rows, in their place.
  Sums* const of_channels = reinterpret_cast<Sums*>(memory);  // [kChannels]
  float* const of_threads = reinterpret_cast<float*>(of_channels + kChannels);
  static_assert(kChannels * sizeof(Sums) + 2 * kApart * N * sizeof(float) <= kRingBytes<T, N>);
  device::launch_dependents();
  const Ranges& r = p.ranges;
  const Place<N> at(r);
  const int thread = static_cast<int>(threadIdx.x);
  float of_g[N] = {}, of_products[N] = {};
  if (at.here) {
    Rows<T, N, 2, U, 1, device::Cache::keep> rows(memory, at, {p.dy, p.x}, {p.dy_stride, p.x_stride});
    float weight[N];
    const Channels<kSilu, N> channels(p, at, weight);
    if (at.row == 0) {
#pragma unroll
      for (int k = 0; k < N; ++k)
        affine[at.lane * N + k] = {share_of(channels.rstd[k], channels.of[k].unit), weight[k]};
    }
    rows.each_turn([&](int) {
      Packed<T, N> dy[U], x[U];
      rows.ring.take(dy, 0);
      rows.ring.take(x, 1);
      float g[U][N];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        channels.template gradients<T>(dy[u], x[u], g[u]);  // behind the last row 0
#pragma unroll
        for (int k = 0; k < N; ++k)
          of_products[k] = fmaf(g[u][k], channels.of[k].centered(element<T, N>(x[u], k)), of_products[k]);
      }
      static_assert(U == 2);
#pragma unroll
      for (int k = 0; k < N; ++k) of_g[k] += g[0][k] + g[1][k];
    });
    device::copy_async_wait<0>();
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < N; ++k) {
    of_threads[of_thread(k, thread)] = of_g[k];
    of_threads[of_thread(N + k, thread)] = of_products[k];
  }
  __syncthreads();
  // Where a block has fewer channels than threads, each takes every parts-th row of a channel.
  const int width = at.lanes * N, parts = max(1, kThreads / width);
  const auto rows_of_channel = [&](int c, int part) {
    Sums sums{};
    for (int row = part; row < at.rows_together; row += parts) {
      const int place = of_thread(c % N, row * r.lanes + c / N);
      sums.first += of_threads[place];
      sums.second += of_threads[of_thread(N, place)];
    }
    return sums;
  };
  if (parts > 1) {
    if (thread < parts * width) totals[thread] = rows_of_channel(thread % width, thread / width);
    __syncthreads();
  }
  for (int c = thread; c < width; c += kThreads) {
    Sums sums{};
    if (parts == 1) sums = rows_of_channel(c, 0);
    for (int part = 0; parts > 1 && part < parts; ++part) {
      sums.first += totals[part * width + c].first;
      sums.second += totals[part * width + c].second;
    }
    const Affine of = affine[c];
    sums.second *= of.share;
    if (p.partials) {
      const int64_t place = (at.sample * r.set + at.rank) * r.channels + at.first_channel(r) + c;
      device::store(p.partials + place, sums.second);
      device::store(p.partials + p.slices * r.channels + place, sums.first);
    }
    const double by = of.weight;
    of_channels[c] = {by * sums.first, by * sums.second};
  }
  if (!p.dx) return;
  __syncthreads();
  const int group_width = static_cast<int>(min(r.group, int64_t{width}));
  Sums of_group{};
  const Parts parts_of_group(r);
  parts_of_group.each_item(1, group_width, [&](int, int i) {
    const Sums& of_channel = of_channels[parts_of_group.group * group_width + i];
    of_group.first += of_channel.first;
    of_group.second += of_channel.second;
  });
  store_sums(r, at, parts_of_group.add(totals, of_group));
}

// What dx takes of the group of a channel, times -rstd: the mean of g * weight; that of g * weight * x_hat, times x_hat
// of one unit.
struct Means {
  float of_gradient, of_product;
};

template <class T, int N, bool kSilu> __global__ void __launch_bounds__(kThreads, kGroupNormResident)
    gradients(BackwardParams p) {
  constexpr int U = kRowsOfBoth;
  WARPSMITH_DYNAMIC_SHARED(memory);
  WARPSMITH_SHARED(Sums, totals, kThreads);
  device::launch_dependents();
  const Ranges& r = p.ranges;
  const Place<N> at(r);
  Rows<T, N, 2, U, -1, device::Cache::streaming> rows(memory, at, {p.dy, p.x}, {p.dy_stride, p.x_stride});
  float weight[N];
  const Channels<kSilu, N> channels(p, at, weight);
  const Parts parts(r);
  device::wait_for_previous_kernel();
  const Sums sums = parts.merged(r, at, totals);
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < r.range_groups) {
    const double values = static_cast<double>(r.pixels) * static_cast<double>(r.group);
    const double undefined = (sums.first - sums.first) + (sums.second - sums.second);  // 0, or NaN where a sum is
                                                                                       // infinite: so is all dx
    totals[threadIdx.x] = {sums.first / values + undefined, sums.second / values + undefined};
  }
  __syncthreads();
  if (!at.here) return;
  Means means[N];
  at.each_group(r, [&](int k, int group) {
    const float rstd = channels.rstd[k];
    means[k] = {static_cast<float>(totals[group].first) * -rstd,
                static_cast<float>(totals[group].second) * -rstd * share_of(rstd, channels.of[k].unit)};
  });
  RowsToWrite<T, N, U> to(p.dx, r, at, rows.turns);
  rows.each_turn([&](int left) {
    Packed<T, N> dy[U], x[U];
    rows.ring.take(dy, 0);
    rows.ring.take(x, 1);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (u >= left) break;
      float g[N], dx[N];
      channels.template gradients<T>(dy[u], x[u], g);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const Channel& c = channels.of[k];
        const float of_group = fmaf(c.centered(element<T, N>(x[u], k)), means[k].of_product, means[k].of_gradient);
        dx[k] = fmaf(g[k] * c.unit, c.scale, of_group);  // weight * rstd = unit * scale
      }
      to.store(u, dx);
    }
    to.next_turn();
  });
}

}  // namespace warpsmith::group_norm
