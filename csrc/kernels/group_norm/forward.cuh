#pragma once
#include "kernels/group_norm/place.cuh"
#include "kernels/group_norm/silu.cuh"

// The forward in two passes over x: `statistics` reads it once, and each block writes two sums of each of its groups;
// `normalize` adds these, in a fixed order, reads x once more from its end on, and writes y once.
namespace warpsmith::group_norm {

struct ForwardParams {
  const void *x, *weight, *bias;
  void* y;
  float *mean, *rstd;
  int64_t x_stride;  // in vectors
  Ranges ranges;
  double eps;
  Dtype weight_dtype;
};

constexpr int kRowsOfX = 4;  // in a turn

// The sums of x and of its square over a thread's rows of the channel `k` of its vector, in double: where those in
// float are not finite.
template <class T, int N> __device__ Sums add_in_double(const ForwardParams& p, const Place<N>& at, int k) {
  Sums sums{};
  for (int64_t row = at.first; row < at.end; row += at.rows_together) {
    const double x =
        device::to_float(device::load(static_cast<const T*>(p.x) + (row * p.x_stride + at.vector) * N + k));
    sums.first += x;
    sums.second += x * x;
  }
  return sums;
}

template <class T, int N> __global__ void __launch_bounds__(kThreads, kGroupNormResident) statistics(ForwardParams p) {
  constexpr int U = kRowsOfX;
  WARPSMITH_DYNAMIC_SHARED(memory);
  WARPSMITH_SHARED(Sums, totals, kThreads);
  Sums* const of_threads = reinterpret_cast<Sums*>(memory);  // after the rows, in their place
  static_assert(kApart * N * sizeof(Sums) <= kRingBytes<T, N>);
  device::launch_dependents();
  const Ranges& r = p.ranges;
  const Place<N> at(r);
  Sums of_channels[N] = {};
  if (at.here) {
    Rows<T, N, 1, U, 1, device::Cache::keep> rows(memory, at, {p.x}, {p.x_stride});
    Moments<N> m;
    bool begun = false;
    rows.each_turn([&](int left) {
      Packed<T, N> x[U];
      rows.ring.take(x, 0);
      if (!begun) {
        const float part = 1.0f / static_cast<float>(min(left, U));
#pragma unroll
        for (int k = 0; k < N; ++k) {
          float sum = 0;
#pragma unroll
          for (int u = 0; u < U; ++u) sum += element<T, N>(x[u], k);  // behind the last row 0
          m.center[k] = sum * part;
        }
        begun = true;
      }
      if (left >= U)
        add_turn<true, T, N>(m, x, U);
      else
        add_turn<false, T, N>(m, x, left);
    });
    device::copy_async_wait<0>();
    bool beyond = false;  // float
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const double all = rows.rows, center_of = begun ? m.center[k] : 0.0f, sum = m.sum[k];
      of_channels[k] = {all * center_of + sum, m.square[k] + center_of * (2 * sum + all * center_of)};
      beyond = beyond || !is_finite(m.square[k]);
    }
#pragma unroll 1
    for (int channel = beyond ? 0 : N; channel < N; ++channel) {
      const Sums again = add_in_double<T>(p, at, channel);
#pragma unroll
      for (int k = 0; k < N; ++k)
        if (k == channel) of_channels[k] = again;
    }
  }
  __syncthreads();
  // A thread's sums of groups, from its first one on; then those of the block.
  const int group_width = static_cast<int>(min(r.group, int64_t{at.lanes} * N)), thread = static_cast<int>(threadIdx.x);
  Sums of_group{};
  int slot = 0, before = 0;
  at.each_group(r, [&](int k, int group) {
    if (k > 0 && group != before) {
      of_threads[of_thread(slot++, thread)] = of_group;
      of_group = {};
    }
    before = group;
    of_group.first += of_channels[k].first;
    of_group.second += of_channels[k].second;
  });
  of_threads[of_thread(slot, thread)] = of_group;
  __syncthreads();
  const int wide = group_width % N == 0 ? group_width / N : (group_width + N - 2) / N + 1;  // lanes of a group
  Sums sums{};
  const Parts parts(r);
  parts.each_item(at.rows_together, wide, [&](int row, int i) {
    const int begin = parts.group * group_width, lane = begin / N + i;
    if (lane * N >= begin + group_width) return;
    const int before = i == 0 ? parts.group - begin / N * N / group_width : 0;  // groups that this lane has before
    const Sums& of_lane = of_threads[of_thread(before, row * r.lanes + lane)];
    sums.first += of_lane.first;
    sums.second += of_lane.second;
  });
  store_sums(r, at, parts.add(totals, sums));
}

template <class T, int N, bool kSilu> __global__ void __launch_bounds__(kThreads, kGroupNormResident)
    normalize(ForwardParams p) {
  constexpr int U = kRowsOfX;
  WARPSMITH_DYNAMIC_SHARED(memory);
  WARPSMITH_SHARED(Sums, totals, kThreads);
  WARPSMITH_SHARED(float, means, kThreads);
  WARPSMITH_SHARED(float, rstds, kThreads);
  const Ranges& r = p.ranges;
  const Place<N> at(r);
  Rows<T, N, 1, U, -1, device::Cache::streaming> rows(memory, at, {p.x}, {p.x_stride});  // of no kernel that still runs
  float weight[N], bias[N];
  load_channels(weight, p.weight, p.weight_dtype, at.own_channel(), 1.0f);
  load_channels(bias, p.bias, p.weight_dtype, at.own_channel(), 0.0f);
  const Parts parts(r);
  device::wait_for_previous_kernel();
  const Sums sums = parts.merged(r, at, totals);
  if (const int group = static_cast<int>(threadIdx.x); group < r.range_groups) {
    const double values = static_cast<double>(r.pixels) * static_cast<double>(r.group), mean = sums.first / values;
    const double var = sums.second / values - mean * mean;
    means[group] = static_cast<float>(mean);
    rstds[group] = static_cast<float>(1 / sqrt((var < 0 ? 0 : var) + p.eps));
    if (at.rank == 0 && at.tile == 0) {
      const int64_t place = at.sample * r.groups + at.first_group(r) + group;
      device::store(p.mean + place, means[group]);
      device::store(p.rstd + place, rstds[group]);
    }
  }
  __syncthreads();
  if (!at.here) return;
  Channel channels[N];
  at.each_group(r, [&](int k, int group) { channels[k] = Channel(means[group], rstds[group], weight[k], bias[k]); });
  RowsToWrite<T, N, U> y(p.y, r, at, rows.turns);
  rows.each_turn([&](int left) {
    Packed<T, N> x[U];
    rows.ring.take(x, 0);
    constexpr int kTogether = 2;  // rows side by side, so that one is computed while another waits
#pragma unroll
    for (int first = 0; first < U; first += kTogether) {
      float v[kTogether * N];
#pragma unroll
      for (int i = 0; i < kTogether * N; ++i) v[i] = channels[i % N].value(element<T, N>(x[first + i / N], i % N));
      if constexpr (kSilu) silu<T>(v);
#pragma unroll
      for (int u = 0; u < kTogether; ++u)
        if (first + u < left) y.store(first + u, v + u * N);
    }
    y.next_turn();
  });
}

}  // namespace warpsmith::group_norm
