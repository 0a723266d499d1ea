#pragma once
#include "kernels/group_norm/place.cuh"
#include "kernels/group_norm/silu.cuh"

// One kernel: a set of blocks reads a range of groups of a sample for the statistics, adds them up through global
// memory, and normalises what shared memory has kept and, read once more, the rest. Writes y once, in a fixed order.
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

constexpr int kRowsATurn = kGroupNormRows;
template <class T, int N> using RowsOfX = Turns<T, N, kRowsATurn, 1>;

// The sums of a thread's rows of one vector.
template <class T, int N> __device__ __forceinline__ void add_rows(RowsOfX<T, N>& rows, Moments<N>& m) {
  constexpr int U = kRowsATurn;
  rows.forwards([&](int turn) {
    Packed<T, N> x[U];
    rows.load(x, 0);
    const int left = rows.rows - turn * U;
    if (turn == 0) {
      const float part = 1.0f / static_cast<float>(min(left, U));
#pragma unroll
      for (int k = 0; k < N; ++k) {
        float sum = 0;
#pragma unroll
        for (int u = 0; u < U; ++u) sum += element<T, N>(x[u], k);  // behind the last row 0
        m.center[k] = sum * part;
      }
    }
    if (left >= U)
      add_turn<true, T, N>(m, x, U);
    else
      add_turn<false, T, N>(m, x, left);
  });
}

// The sum of x, or of its square, over a thread's rows of the channel `k` of its vector, in double: where those in
// float are not finite.
template <class T, int N> __device__ double add_in_double(const RowsOfX<T, N>& rows, int k, bool of_squares) {
  const T* const x = reinterpret_cast<const T*>(rows.from[0]) + k;
  double sum = 0;
  for (int row = 0; row < rows.rows; ++row) {
    const double value = device::to_float(device::load(x + row * rows.apart[0] * N));
    sum += of_squares ? value * value : value;
  }
  return sum;
}

// The rows of a thread of y; `to`: the last one of its last turn.
template <bool kSilu, class T, int N, class Next>
__device__ __forceinline__ void normalize(RowsOfX<T, N>& rows, const Channel* table, int lanes, Packed<T, N>* to,
                                          int64_t apart, int ahead, const Next& next) {
  constexpr int U = kRowsATurn;
  Channel channels[N];
#pragma unroll
  for (int k = 0; k < N; ++k) channels[k] = table[k * lanes];
  rows.backwards(
      ahead,
      [&](int turn) {
        Packed<T, N> x[U];
        rows.load(x, 0);
        const int left = rows.rows - turn * U;
#pragma unroll
        for (int u = U - 1; u >= 0; --u, to -= apart) {
          if (u >= left) continue;
          float y[N];
#pragma unroll
          for (int k = 0; k < N; ++k) y[k] = channels[k].value(element<T, N>(x[u], k));
          if constexpr (kSilu) silu<T>(y);
          device::store<device::Cache::streaming>(to, device::rounded<T>(y));
        }
      },
      next);
}

template <class T, int N> __global__ void __launch_bounds__(kThreads, kGroupNormResident) forward(ForwardParams p) {
  WARPSMITH_SHARED(double, sums, kApart* N);
  WARPSMITH_SHARED(double, totals, 2 * kThreads);
  WARPSMITH_SHARED(float, means, kThreads);
  WARPSMITH_SHARED(float, rstds, kThreads);
  WARPSMITH_SHARED(unsigned, number, 1);
  WARPSMITH_DYNAMIC_SHARED(shared);
  const Ranges& r = p.ranges;
  Place<N> at(r, block_number(r, number));
  RowsOfX<T, N> rows(at, r, shared, {p.x_stride});
  Channel* channels = static_cast<Channel*>(rows.end(shared));  // of the range at hand; beside it those of the next
  const int thread = static_cast<int>(threadIdx.x), groups = at.groups(r);
  const int64_t last = (r.vectors - 1) / r.lanes * r.lanes;               // tile
  const int wide = static_cast<int>(min(r.group, int64_t{r.lanes} * N));  // channels of a group in a tile
  const auto fill_channels = [&](const Place<N>& place, int64_t tile, Channel* table) {
    each_channel<N>(r, tile, [&](int c) {
      const int64_t channel = place.channel(r, tile) + c;
      Channel& of = table[in_table<N>(r, c)];
      of.scale = p.weight ? load_as(p.weight, p.weight_dtype, channel) : 1.0f;
      of.bias = p.bias ? load_as(p.bias, p.weight_dtype, channel) : 0.0f;
    });
  };
#pragma unroll 1
  for (bool begun = false; at.exists(r); at = at.next(r)) {
    double sum_of[N] = {}, square_of[N] = {};
    bool beyond = false;  // float
#pragma unroll 1
    for (int64_t v = at.lane; v < r.vectors; v += r.lanes) {
      if (!begun) {
        rows.follow(0, at, r, p.x, p.x_stride, v);
        rows.begin(0, rows.turns);
        if (v == at.lane) fill_channels(at, last, channels);
      }
      begun = false;
      rows.turn_round();
      Moments<N> m;
      add_rows<T, N>(rows, m);
      const double count = rows.rows;
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const double center = rows.rows > 0 ? m.center[k] : 0.0f, sum = m.sum[k];
        sum_of[k] += count * center + sum;
        square_of[k] += m.square[k] + center * (2 * sum + count * center);
        beyond = beyond || !is_finite(m.square[k]);
      }
    }
#pragma unroll 1
    for (int squares = 0; squares < 2; ++squares) {
      if (squares) __syncthreads();
#pragma unroll
      for (int k = 0; k < N; ++k) sums[of_thread<N>(k, thread)] = squares ? square_of[k] : sum_of[k];
#pragma unroll 1
      for (int k = beyond ? 0 : N; k < N; ++k) {
        double sum = 0;
        for (int64_t v = at.lane; v < r.vectors; v += r.lanes) {
          rows.follow(0, at, r, p.x, p.x_stride, v);
          sum += add_in_double<T, N>(rows, k, squares);
        }
        sums[of_thread<N>(k, thread)] = sum;
      }
      __syncthreads();
      double sum = 0;
      each_item(groups, at.rows, wide,
                [&](int group, int row, int c) { sum += sums[of_row<N>(r, row, group * wide + c)]; });
      totals[squares * kThreads + thread] = sum;
    }
    add_parts(totals, groups);
    const Place<N> next = at.next(r);
    const bool goes_on = last == 0 && next.exists(r);
    const int ahead = goes_on ? rows.turns : 0;
    Channel* const of_next = channels + (at.round % 2 ? 1 : -1) * r.lanes * N;
    const auto follow_next = [&] {
      if (goes_on) rows.follow(0, next, r, p.x, p.x_stride, at.lane);
    };
    double sum, square;
    totals_of_set(r, at, totals, groups, sum, square, [&] {
      if (rows.turns < rows.slots) {
        follow_next();
        rows.begin(rows.turns, ahead);
      }
      if (goes_on) fill_channels(next, last, of_next);
    });
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
    // The tile that was read last comes first: its last turns are still there.
    for (int64_t tile = last; tile >= 0; tile -= r.lanes) {
      __syncthreads();
      if (tile != last) fill_channels(at, tile, channels);
      each_channel<N>(r, tile, [&](int c) {
        const int group = at.group_of(r, tile, c);
        Channel& of = channels[in_table<N>(r, c)];
        of = Channel(means[group], rstds[group], of.scale, of.bias);
      });
      __syncthreads();
      const int64_t v = tile + at.lane;
      if (v >= r.vectors) continue;
      if (tile != last) {
        rows.follow(0, at, r, p.x, p.x_stride, v, rows.last_row(false));
        rows.begin_backwards();
      } else if (rows.turns > rows.slots) {
        rows.follow(0, at, r, p.x, p.x_stride, v, rows.last_row(true));
      }
      const int64_t channel_vectors = r.channels / N, apart = at.rows * channel_vectors;
      Packed<T, N>* const to = vector_at<T, N>(p.y, at.vector(r, channel_vectors, v)) + rows.last_row(false) * apart;
      if (p.silu)
        normalize<true, T, N>(rows, channels + at.lane, r.lanes, to, apart, ahead, follow_next);
      else
        normalize<false, T, N>(rows, channels + at.lane, r.lanes, to, apart, ahead, follow_next);
    }
    begun = goes_on;
    if (goes_on) channels = of_next;
  }
  device::copy_async_wait<0>();
}

}  // namespace warpsmith::group_norm
