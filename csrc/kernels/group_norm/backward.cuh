#pragma once
#include "kernels/group_norm/place.cuh"
#include "kernels/group_norm/silu.cuh"

// One kernel: a set of blocks reads dy and x of a range of groups of a sample for two sums a channel, adds them up to
// those of groups, and makes dx of what shared memory has kept and, read once more, the rest. Each block writes its two
// sums a channel, from which `sum_partials` makes dweight and dbias. Writes dx once, in a fixed order.
namespace warpsmith::group_norm {

struct BackwardParams {
  const void *dy, *x, *weight, *bias;
  void* dx;
  const float *mean, *rstd;
  double* partials;             // [2, samples * set, channels]: of g * x_hat, and of g; or null
  int64_t dy_stride, x_stride;  // in vectors
  Ranges ranges;
  int64_t slices;  // samples * set
  Dtype weight_dtype;
  bool silu;
};

// What dx takes of the group of a channel, times -rstd: the mean of g * weight; that of g * weight * x_hat, times x_hat
// of one unit.
struct alignas(8) Means {
  float of_gradient, of_product;
};

struct alignas(8) Affine {
  float rstd, weight;
};

constexpr int kRowsOfBoth = kGroupNormRows / 2;
template <class T, int N> using RowsOfDyAndX = Turns<T, N, kRowsOfBoth, 2>;

// g of a vector of channels: dy, or dy times the derivative of silu.
template <bool kSilu, class T, int N>
__device__ __forceinline__ void gradients_of(const Channel (&channels)[N], const Packed<T, N>& dy,
                                             const Packed<T, N>& x, float (&g)[N]) {
#pragma unroll
  for (int k = 0; k < N; ++k) g[k] = element<T, N>(dy, k);
  if constexpr (kSilu) {
    float v[N];
#pragma unroll
    for (int k = 0; k < N; ++k) v[k] = channels[k].value(element<T, N>(x, k));
    times_silu_derivative<T>(g, v);
  }
}

// Adds up g and g * centered(x) over the rows of a thread.
template <bool kSilu, class T, int N>
__device__ __forceinline__ void add_gradients(RowsOfDyAndX<T, N>& rows, const Channel* table, int lanes,
                                              float (&of_g)[N], float (&of_products)[N]) {
  constexpr int U = kRowsOfBoth;
  Channel channels[N];
#pragma unroll
  for (int k = 0; k < N; ++k) channels[k] = table[k * lanes];
  rows.forwards([&](int) {
    Packed<T, N> dy[U], x[U];
    rows.load(dy, 0);
    rows.load(x, 1);
    float g[U][N];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      gradients_of<kSilu, T>(channels, dy[u], x[u], g[u]);  // behind the last row 0
#pragma unroll
      for (int k = 0; k < N; ++k)
        of_products[k] = fmaf(g[u][k], channels[k].centered(element<T, N>(x[u], k)), of_products[k]);
    }
    static_assert(U == 2);
#pragma unroll
    for (int k = 0; k < N; ++k) of_g[k] += g[0][k] + g[1][k];
  });
}

// The rows of a thread of dx; `to`: the last one of its last turn.
template <bool kSilu, class T, int N, class Next>
__device__ __forceinline__ void write_dx(RowsOfDyAndX<T, N>& rows, const Channel* table, const Means* means_of,
                                         int lanes, Packed<T, N>* to, int64_t apart, int ahead, const Next& next) {
  constexpr int U = kRowsOfBoth;
  Channel channels[N];
  Means means[N];
#pragma unroll
  for (int k = 0; k < N; ++k) {
    channels[k] = table[k * lanes];
    means[k] = means_of[k * lanes];
  }
  rows.backwards(
      ahead,
      [&](int turn) {
        Packed<T, N> dy[U], x[U];
        rows.load(dy, 0);
        rows.load(x, 1);
        const int left = rows.rows - turn * U;
#pragma unroll
        for (int u = U - 1; u >= 0; --u, to -= apart) {
          if (u >= left) continue;
          float g[N], dx[N];
          gradients_of<kSilu, T>(channels, dy[u], x[u], g);
#pragma unroll
          for (int k = 0; k < N; ++k) {
            const float value = element<T, N>(x[u], k);
            const float of_group = fmaf(channels[k].centered(value), means[k].of_product, means[k].of_gradient);
            dx[k] = fmaf(g[k] * channels[k].unit, channels[k].scale, of_group);  // weight * rstd = unit * scale
          }
          device::store<device::Cache::streaming>(to, device::rounded<T>(dx));
        }
      },
      next);
}

template <class T, int N> __global__ void __launch_bounds__(kThreads, kGroupNormResident) backward(BackwardParams p) {
  WARPSMITH_SHARED(Means, means, kApart * N / 2);  // after the sums, in their place
  WARPSMITH_SHARED(float, products, kApart* N);
  WARPSMITH_SHARED(double, of_channels, 2 * kThreads);
  WARPSMITH_SHARED(double, totals, 2 * kThreads);
  WARPSMITH_SHARED(unsigned, number, 1);
  WARPSMITH_DYNAMIC_SHARED(shared);
  float* const sums = reinterpret_cast<float*>(means);
  const Ranges& r = p.ranges;
  Place<N> at(r, block_number(r, number));
  RowsOfDyAndX<T, N> rows(at, r, shared, {p.dy_stride, p.x_stride});
  Channel* channels = static_cast<Channel*>(rows.end(shared));  // of the range at hand; beside it those of the next
  const int in_tables = r.lanes * N;
  Affine* affine = reinterpret_cast<Affine*>(channels + 2 * in_tables);
  const int thread = static_cast<int>(threadIdx.x), groups = at.groups(r);
  const int64_t last = (r.vectors - 1) / r.lanes * r.lanes;  // tile
  const auto follow = [&](const Place<N>& place, int64_t v, int row) {
    rows.follow(0, place, r, p.dy, p.dy_stride, v, row);
    rows.follow(1, place, r, p.x, p.x_stride, v, row);
  };
  const auto fill_channels = [&](const Place<N>& place, int64_t tile, int offset) {
    each_channel<N>(r, tile, [&](int c) {
      const int64_t channel = place.channel(r, tile) + c, group = place.first_group(r) + place.group_of(r, tile, c);
      const Affine of{device::load(p.rstd + group), p.weight ? load_as(p.weight, p.weight_dtype, channel) : 1.0f};
      affine[offset + in_table<N>(r, c)] = of;
      channels[offset + in_table<N>(r, c)] =
          Channel(device::load(p.mean + group), of.rstd, of.weight,
                  p.silu && p.bias ? load_as(p.bias, p.weight_dtype, channel) : 0.0f);
    });
  };
#pragma unroll 1
  for (bool begun = false; at.exists(r); at = at.next(r)) {
    double sum = 0, product = 0;  // of this thread's channels, of g * weight and of g * weight * x_hat
#pragma unroll 1
    for (int64_t tile = 0; tile < r.vectors; tile += r.lanes) {
      const int64_t v = tile + at.lane;
      if (!begun) {
        if (v < r.vectors) {
          follow(at, v, 0);
          rows.begin(0, rows.turns);
        }
        __syncthreads();
        fill_channels(at, tile, 0);
        __syncthreads();
      }
      begun = false;
      float of_g[N] = {}, of_products[N] = {};
      if (v < r.vectors) {
        rows.turn_round();
        if (p.silu)
          add_gradients<true, T, N>(rows, channels + at.lane, r.lanes, of_g, of_products);
        else
          add_gradients<false, T, N>(rows, channels + at.lane, r.lanes, of_g, of_products);
      }
      __syncthreads();  // every warp has read the means
#pragma unroll
      for (int k = 0; k < N; ++k) {
        sums[of_thread<N>(k, thread)] = of_g[k];
        products[of_thread<N>(k, thread)] = of_products[k];
      }
      __syncthreads();
      // Where a tile has fewer channels than threads, each takes every parts-th row of a channel.
      const int width = static_cast<int>(min(int64_t{r.lanes}, r.vectors - tile)) * N, parts = max(1, kThreads / width);
      const auto rows_of_channel = [&](int c, int part, double& g, double& g_x_hat) {
        for (int row = part; row < at.rows; row += parts) {
          g += sums[of_row<N>(r, row, c)];
          g_x_hat += products[of_row<N>(r, row, c)];
        }
      };
      if (parts > 1) {
        double g = 0, g_x_hat = 0;
        if (thread < parts * width) rows_of_channel(thread % width, thread / width, g, g_x_hat);
        totals[thread] = g;
        totals[kThreads + thread] = g_x_hat;
        __syncthreads();
      }
      each_channel<N>(r, tile, [&](int c) {
        double g = 0, g_x_hat = 0;
        if (parts == 1) rows_of_channel(c, 0, g, g_x_hat);
        for (int part = 0; parts > 1 && part < parts; ++part) {
          g += totals[part * width + c];
          g_x_hat += totals[kThreads + part * width + c];
        }
        const Affine of = affine[in_table<N>(r, c)];
        g_x_hat *= share_of(of.rstd, channels[in_table<N>(r, c)].unit);
        if (p.partials) {
          const int64_t place = (at.sample * r.set + at.rank) * r.channels + at.channel(r, tile) + c;
          device::store(p.partials + place, g_x_hat);
          device::store(p.partials + p.slices * r.channels + place, g);
        }
        const double weight = of.weight;
        sum += weight * g;
        product += weight * g_x_hat;
      });
    }
    of_channels[thread] = sum;
    of_channels[kThreads + thread] = product;
    __syncthreads();
    const int wide = groups > 1 ? static_cast<int>(r.group) : kThreads;  // threads with channels of a group
    sum = product = 0;
    each_item(groups, 1, wide, [&](int group, int, int i) {
      sum += of_channels[group * wide + i];
      product += of_channels[kThreads + group * wide + i];
    });
    totals[thread] = sum;
    totals[kThreads + thread] = product;
    add_parts(totals, groups);
    const Place<N> next = at.next(r);
    const bool goes_on = last == 0 && next.exists(r);
    const int ahead = goes_on ? rows.turns : 0;
    const auto follow_next = [&] {
      if (goes_on) follow(next, at.lane, 0);
    };
    const int to_next = at.round % 2 ? in_tables : -in_tables;
    totals_of_set(r, at, totals, groups, sum, product, [&] {
      if (const int kept = p.dx ? rows.turns : 0; kept < rows.slots) {
        follow_next();
        rows.begin(kept, ahead);
      }
      if (goes_on) fill_channels(next, last, to_next);
    });
    // `of_channels` now has the means of groups.
    const double values = static_cast<double>(r.pixels) * static_cast<double>(r.group);
    if (thread < groups) {
      const double undefined = (sum - sum) + (product - product);  // 0, or NaN where a sum is infinite: so is all dx
      of_channels[thread] = sum / values + undefined;
      of_channels[kThreads + thread] = product / values + undefined;
    }
    // The tile that was read last comes first: its last turns are still there.
#pragma unroll 1
    for (int64_t tile = last; p.dx && tile >= 0; tile -= r.lanes) {
      __syncthreads();
      if (tile != last) fill_channels(at, tile, 0);
      each_channel<N>(r, tile, [&](int c) {
        const int group = at.group_of(r, tile, c), place = in_table<N>(r, c);
        const float rstd = affine[place].rstd;
        means[place] = {
            static_cast<float>(of_channels[group]) * -rstd,
            static_cast<float>(of_channels[kThreads + group]) * -rstd * share_of(rstd, channels[place].unit)};
      });
      __syncthreads();
      const int64_t v = tile + at.lane;
      if (v >= r.vectors) continue;
      if (tile != last) {
        follow(at, v, rows.last_row(false));
        rows.begin_backwards();
      } else if (rows.turns > rows.slots) {
        follow(at, v, rows.last_row(true));
      }
      const int64_t step = r.channels / N, apart = at.rows * step;
      Packed<T, N>* const to = vector_at<T, N>(p.dx, at.vector(r, step, v)) + rows.last_row(false) * apart;
      if (p.silu)
        write_dx<true, T, N>(rows, channels + at.lane, means + at.lane, r.lanes, to, apart, ahead, follow_next);
      else
        write_dx<false, T, N>(rows, channels + at.lane, means + at.lane, r.lanes, to, apart, ahead, follow_next);
    }
    begun = goes_on;
    if (goes_on) channels += to_next, affine += to_next;
  }
  device::copy_async_wait<0>();
}

}  // namespace warpsmith::group_norm
