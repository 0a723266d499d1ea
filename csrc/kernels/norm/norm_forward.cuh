#pragma once
#include "kernels/norm/norm_row.cuh"

// The forward of the norm family, as templates over the op, the storage types T (x and y) and R (residual) and the
// threads of a row. Statistics are float, in a fixed order.
//
// layer: mean and variance in one pass and one exchange, without the cancellation of mean(s^2) - mean^2: each thread
// sums deviations from its own first element, which is safe because that element is one of those it sums (for n
// elements the sum of squares is at most n times the spread); the parts are put together by Chan's formula (Chan,
// Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979).
namespace warpsmith::norm {

// How many columns the row's warp `w` holds.
template <int N, int V> __device__ __forceinline__ float columns_of_warp(int w, int row_threads, int columns) {
  int count = 0;
#pragma unroll
  for (int v = 0; v < V; ++v) count += min(max(columns - (v * row_threads + w * 32) * N, 0), 32 * N);
  return static_cast<float>(count);
}

// Of U rows at once. `s` holds zeros where there is no column.
template <Scope S, int kBlockThreads, class R, int N, int V, int U>
__device__ __forceinline__ void rms_moments(Moments (&m)[U], const Elements<R, N> (&s)[U][V], const Place<S>& at,
                                            float* scratch, int columns, float eps) {
  float sum[U] = {};
#pragma unroll
  for (int u = 0; u < U; ++u)
#pragma unroll
    for (int v = 0; v < V; ++v)
#pragma unroll
      for (int k = 0; k < N; ++k) sum[u] += s[u][v][k] * s[u][v][k];
  group_sums(sum, S == Scope::group ? at.row_threads : 32);
  if constexpr (S != Scope::group) {
    static_assert(U == 1, "a block or a cluster works on one row");
    Exchange<S, 1, kBlockThreads, 1> exchange{scratch};
    const float* all = exchange.arrive(sum);
    exchange.wait();
    sum[0] = sum_of_warps(at.row_threads / 32, [&](int w) { return all[w]; });
  }
#pragma unroll
  for (int u = 0; u < U; ++u) m[u] = {0.f, precise_rsqrt(sum[u] / static_cast<float>(columns) + eps)};
}

__device__ __forceinline__ float not_negative(float x) { return x < 0 ? 0.f : x; }  // keeps NaN

// Mean and sum of squared deviations of a part of a row.
struct Part {
  float mean, spread;
};

// Every lane of a group gets its parts together; the same bits in each, because both lanes of a pair compute the same,
// and the mean of equal parts is exactly theirs. kEven: all lanes hold `count` elements.
template <bool kEven, int U> __device__ __forceinline__ void combine_lanes(Part (&part)[U], float count, int lanes) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    const float other_count = kEven ? count : __shfl_xor_sync(0xffffffffu, count, distance, 32);
    const float total = count + other_count, inverse = kEven ? 0.f : total > 0 ? 1.f / total : 0.f;
    const bool lower = !(threadIdx.x & static_cast<unsigned>(distance));
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const Part other{__shfl_xor_sync(0xffffffffu, part[u].mean, distance, 32),
                       __shfl_xor_sync(0xffffffffu, part[u].spread, distance, 32)};
      const float d = part[u].mean - other.mean;
      const float weight = kEven ? 0.5f * count : count * other_count * inverse;
      part[u].spread = (part[u].spread + other.spread) + d * d * weight;
      if constexpr (kEven) {
        part[u].mean = (part[u].mean + other.mean) * 0.5f;
      } else {  // from the lower lane's side, so that both round alike
        const float from = lower ? part[u].mean : other.mean;
        part[u].mean = from + (lower ? -d : d) * ((lower ? other_count : count) * inverse);
      }
    }
    count = total;
  }
}

template <Scope S, int kBlockThreads, class R, int N, int V, int U>
__device__ __forceinline__ void layer_moments(Moments (&m)[U], const Elements<R, N> (&s)[U][V], const Place<S>& at,
                                              float* scratch, int columns, float eps) {
  const int lanes = S == Scope::group ? at.row_threads : 32;
  const bool even = columns == at.row_threads * V * N;
  float count = 0;
#pragma unroll
  for (int v = 0; v < V; ++v)
    if (at.template column<N>(v) < columns) count += N;
  const float inverse_count = count > 0 ? 1.f / count : 0.f;
  Part part[U];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const float pivot = s[u][0][0];
    float sum = 0, square = 0;
#pragma unroll
    for (int v = 0; v < V; ++v)
      if (at.template column<N>(v) < columns)
#pragma unroll
        for (int k = 0; k < N; ++k) {
          const float d = s[u][v][k] - pivot;
          sum += d;
          square += d * d;
        }
    const float mean = sum * inverse_count;
    part[u] = {pivot + mean, not_negative(square - sum * mean)};
  }
  if (even)
    combine_lanes<true>(part, count, lanes);
  else
    combine_lanes<false>(part, count, lanes);

  const float inverse = 1.f / static_cast<float>(columns);
  if constexpr (S != Scope::group) {
    static_assert(U == 1, "a block or a cluster works on one row");
    using Pair = Exchange<S, 2, kBlockThreads, 1>;
    Pair exchange{scratch};
    const float* all = exchange.arrive({part[0].mean, part[0].spread});
    exchange.wait();
    const int warps = at.row_threads / 32;
    const auto held = [&](int w) {
      return even ? static_cast<float>(32 * V * N) : columns_of_warp<N, V>(w, at.row_threads, columns);
    };
    const float first = all[0];
    part[0].mean = first + sum_of_warps(warps, [&](int w) { return held(w) * (all[w] - first); }) * inverse;
    part[0].spread = sum_of_warps(warps, [&](int w) {
      const float d = all[w] - part[0].mean;
      return all[Pair::kRowWarps + w] + held(w) * d * d;
    });
  }
#pragma unroll
  for (int u = 0; u < U; ++u) m[u] = {part[u].mean, precise_rsqrt(part[u].spread / static_cast<float>(columns) + eps)};
}

// A row has at most row_threads * V * N columns and lies in registers; a group of lanes works on U rows. Reads x (and
// residual) once, writes y (and residual_out) once, mean and rstd; weight and bias come once a row (U rows) from a
// cache.
template <class Op, class T, class R, int V, int U, Scope S, int kMaxThreads, int kMinBlocks>
__global__ void __launch_bounds__(kMaxThreads, kMinBlocks) forward_registers(NormForwardParams p, int lanes) {
  constexpr int N = kVector<T>;
  constexpr int kScratch = Exchange<S, Op::kSums, kMaxThreads, 1>::kFloats;
  WARPSMITH_SHARED(float, scratch, kScratch);
  const Place<S> at(lanes);
  if constexpr (S == Scope::cluster) device::cluster_arrive();
  const int columns = static_cast<int>(p.columns);
  const int64_t first_row = at.unit * U * at.groups + at.group;
  const auto row_of = [&](int u) { return first_row + int64_t{u} * at.groups; };

  Elements<T, N> x[U][V];
  Elements<R, N> s[U][V];
#pragma unroll
  for (int u = 0; u < U; ++u)
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int column = at.template column<N>(v);
      x[u][v] = {}, s[u][v] = {};
      if (row_of(u) < p.rows && column < columns) {
        x[u][v] = load_elements<T, N>(p.x, row_of(u) * p.x_stride + column);
        if constexpr (Op::kResidual) s[u][v] = load_elements<R, N>(p.residual, row_of(u) * p.residual_stride + column);
      }
    }
#pragma unroll
  for (int u = 0; u < U; ++u)
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int column = at.template column<N>(v);
      const int64_t element = row_of(u) * p.columns + column;
      if constexpr (Op::kResidual) {
        Vector<float, N> sum;
#pragma unroll
        for (int k = 0; k < N; ++k) sum.at[k] = x[u][v][k];
        if constexpr (Op::kDropout) drop_out(sum, p.dropout, element);
#pragma unroll
        for (int k = 0; k < N; ++k) sum.at[k] += s[u][v][k];
        s[u][v] = rounded<R>(sum);
        if (row_of(u) < p.rows && column < columns) store_elements(p.residual_out, element, s[u][v]);
      } else {
        s[u][v] = x[u][v];
      }
    }

  if constexpr (S == Scope::cluster) device::cluster_wait();
  Moments m[U];
  if constexpr (Op::kLayer)
    layer_moments<S, kMaxThreads>(m, s, at, scratch, columns, static_cast<float>(p.eps));
  else
    rms_moments<S, kMaxThreads>(m, s, at, scratch, columns, static_cast<float>(p.eps));
  if (at.lane == 0) {
#pragma unroll
    for (int u = 0; u < U; ++u)
      if (row_of(u) < p.rows) {
        if (p.rstd) device::store(static_cast<float*>(p.rstd) + row_of(u), m[u].rstd);
        if (Op::kLayer && p.mean) device::store(static_cast<float*>(p.mean) + row_of(u), m[u].mean);
      }
  }
  const float offset = static_cast<float>(p.weight_offset);
  with_weight<T, !Op::kLayer>(p.weight_dtype, offset, [&]<class W, bool kOffset>() {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int column = at.template column<N>(v);
      if (column >= columns) continue;
      const Vector<float, N> w = load_affine<W, N, kOffset>(p.weight, column, offset, 1.f);
      Vector<float, N> b;
      if constexpr (Op::kLayer) b = load_affine<W, N, false>(p.bias, column, 0.f, 0.f);
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (row_of(u) >= p.rows) continue;
        Vector<float, N> y;
#pragma unroll
        for (int k = 0; k < N; ++k) {
          const float value = s[u][v][k];
          y.at[k] = Op::kLayer ? (value - m[u].mean) * m[u].rstd * w.at[k] + b.at[k] : value * m[u].rstd * w.at[k];
        }
        store_elements(p.y, row_of(u) * p.columns + column, rounded<T>(y));
      }
    }
  });
}

// Any length, alignment and dtype, N elements at a time: reads a row twice (three times for layer), after the first
// time mostly from a cache. With a residual, later passes read residual_out, each thread what it wrote.
template <class Op, int N> __global__ void __launch_bounds__(1024, 1) forward_looped(NormForwardParams p, int lanes) {
  WARPSMITH_SHARED(float, scratch, 2 * kMaxWarps);
  LoopedSum row_sum{scratch, lanes};
  const int groups = blockDim.x / lanes, lane = threadIdx.x % lanes;
  const int64_t step = int64_t{lanes} * N, first = int64_t{lane} * N;
  const float columns = static_cast<float>(p.columns);

  for (int64_t r = int64_t{blockIdx.x} * groups + threadIdx.x / lanes; r < p.rows; r += int64_t{gridDim.x} * groups) {
    const auto value = [&](int64_t c) {
      return Op::kResidual ? load_as<N>(p.residual_out, r * p.columns + c, p.residual_dtype)
                           : load_as<N>(p.x, r * p.x_stride + c, p.dtype);
    };
    if constexpr (Op::kResidual)
      for (int64_t c = first; c < p.columns; c += step) {
        auto s = load_as<N>(p.x, r * p.x_stride + c, p.dtype);
        if constexpr (Op::kDropout) drop_out(s, p.dropout, r * p.columns + c);
        const auto residual = load_as<N>(p.residual, r * p.residual_stride + c, p.residual_dtype);
#pragma unroll
        for (int k = 0; k < N; ++k) s.at[k] += residual.at[k];
        store_as(p.residual_out, r * p.columns + c, s, p.residual_dtype);
      }
    // Where the squares of float's largest numbers overflow, once more with all of them scaled: the result may be an
    // ordinary one. The second pass corrects the mean that the first one rounded.
    float mean = 0, rstd = 0, scale = 1;
    for (int attempt = 0; attempt < 2 && !(rstd > 0); ++attempt, scale = 0x1p-64f) {
      float center = 0;
      if constexpr (Op::kLayer) {
        float sum = 0;
        for (int64_t c = first; c < p.columns; c += step) {
          const auto s = value(c);
#pragma unroll
          for (int k = 0; k < N; ++k) sum += s.at[k] * scale;
        }
        center = row_sum(sum) / columns;
      }
      float sum = 0, square = 0;
      for (int64_t c = first; c < p.columns; c += step) {
        const auto s = value(c);
#pragma unroll
        for (int k = 0; k < N; ++k) {
          const float d = s.at[k] * scale - center;
          if constexpr (Op::kLayer) sum += d;
          square += d * d;
        }
      }
      const float off = Op::kLayer ? row_sum(sum) / columns : 0.f;
      const float variance = not_negative(row_sum(square) / columns - off * off);
      rstd = precise_rsqrt(variance + static_cast<float>(p.eps) * scale * scale) * scale;
      mean = (center + off) / scale;
    }
    if (lane == 0) {
      if (p.rstd) device::store(static_cast<float*>(p.rstd) + r, rstd);
      if (Op::kLayer && p.mean) device::store(static_cast<float*>(p.mean) + r, mean);
    }
    for (int64_t c = first; c < p.columns; c += step) {
      auto y = value(c);
      const auto w = load_affine_as<N>(p.weight, c, p.weight_dtype, static_cast<float>(p.weight_offset), 1.f);
#pragma unroll
      for (int k = 0; k < N; ++k) y.at[k] = (y.at[k] - mean) * rstd * w.at[k];
      if constexpr (Op::kLayer) {
        const auto b = load_affine_as<N>(p.bias, c, p.weight_dtype, 0.f, 0.f);
#pragma unroll
        for (int k = 0; k < N; ++k) y.at[k] += b.at[k];
      }
      store_as(p.y, r * p.columns + c, y, p.dtype);
    }
  }
}

}  // namespace warpsmith::norm
