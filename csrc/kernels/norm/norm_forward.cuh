#pragma once
#include "kernels/norm/norm_row.cuh"

// The forward of the norm family, as templates over the op, the storage types T (x and y) and R (residual) and the
// threads of a row. Statistics are float, in a fixed order.
//
// Contract. An element: reads x, writes y (2 * sizeof(T) bytes); with a residual also reads residual and writes
// residual_out (2 * sizeof(R) bytes). A row: writes rstd and for layer mean, 4 bytes each. Weight and bias come from a
// cache. forward_block: each thread also reads the row's first four elements, and rows whose sums cancel are read twice
// more, all from a cache.
//
// layer: mean and variance in one pass and one exchange, without the cancellation of mean(s^2) - mean^2: each thread
// sums deviations from its own first element, which is safe because that element is one of those it sums (for n
// elements the sum of squares is at most n times the spread); the parts are put together by Chan's formula (Chan,
// Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979).
namespace warpsmith::norm {

// Moments of U rows at once. `s` holds zeros where there is no column. `then` runs after the sums have been exchanged.
// It receives `finish(m)`, which computes the moments. `then` may issue its own loads before it calls `finish`, so that
// they overlap with that computation.
template <Scope S, int kBlockThreads, class R, int N, int V, int U, class Then>
__device__ __forceinline__ void rms_moments(Elements<R, N> (&s)[U][V], const Place<S>& at, float* scratch,
                                            float inverse_columns, float eps, Then&& then) {
  float sum[U] = {};
#pragma unroll
  for (int u = 0; u < U; ++u)
#pragma unroll
    for (int v = 0; v < V; ++v)
#pragma unroll
      for (int k = 0; k < N; ++k) sum[u] += s[u][v][k] * s[u][v][k];
  const auto rstd = [&](Moments(&m)[U]) {
#pragma unroll
    for (int u = 0; u < U; ++u) m[u] = {0.f, precise_rsqrt(sum[u] * inverse_columns + eps)};
  };
  group_sums(sum, S == Scope::group ? at.row_threads : 32);
  if constexpr (S == Scope::group) {
    then(rstd);
  } else {
    static_assert(U == 1, "a block or a cluster works on one row");
    Exchange<S, 1, kBlockThreads, 1> exchange{scratch};
    const float* all = exchange.arrive(sum);
    exchange.wait();
    then([&](Moments(&m)[U]) {
      sums_of_warps(sum, at.row_threads / 32,
                    [&](int w, bool here, float (&total)[1]) { total[0] += here ? all[w] : 0.f; });
      rstd(m);
    });
  }
}

__device__ __forceinline__ float not_negative(float x) { return x < 0 ? 0.f : x; }  // keeps NaN

// Mean and sum of squared deviations of a part of a row. Parts are exchanged together with their number of elements.
struct Part {
  float mean, spread;
};
constexpr int kPartValues = 3;

// Values of a warp that rms_moments or layer_moments exchanges.
template <class Op> constexpr int kMomentValues = Op::kLayer ? kPartValues : 1;

// Every lane of a group gets its parts together; the same bits in each, because both lanes of a pair compute the same,
// and the mean of equal parts is exactly theirs. kEven: all lanes hold `count` elements. Returns how many all hold.
template <bool kEven, int U> __device__ __forceinline__ float combine_lanes(Part (&part)[U], float count, int lanes) {
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
  return count;
}

// N elements that are all equal to the first of `from`.
template <class R, int N> __device__ __forceinline__ Elements<R, N> repeated_first(const Elements<R, N>& from) {
  Elements<R, N> all;
  const uint32_t word = sizeof(R) == 4 ? from.words[0] : (from.words[0] & 0xffffu) * 0x10001u;
#pragma unroll
  for (int i = 0; i < all.kWords; ++i) all.words[i] = word;
  return all;
}

// As above; may leave copies of the thread's first element in `s` where there is no column.
template <Scope S, int kBlockThreads, class R, int N, int V, int U, class Then>
__device__ __forceinline__ void layer_moments(Elements<R, N> (&s)[U][V], const Place<S>& at, float* scratch,
                                              int columns, float inverse_columns, float eps, Then&& then) {
  const bool even = columns == at.row_threads * V * N;
  float count = V * N;
  constexpr bool kFills = S != Scope::group;
  if (!even) {  // one branch, where a group has one for each vector: the differences of what is filled in are zero
    count = 0;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const bool here = at.template column<N>(v) < columns;
      if (here) count += N;
      if constexpr (kFills) {
#pragma unroll
        for (int u = 0; u < U; ++u) {
          if (!here) s[u][v] = repeated_first(s[u][0]);
        }
      }
    }
  }
  const float inverse_count = count > 0 ? 1.f / count : 0.f;
  Part part[U];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const float pivot = s[u][0][0];
    float sum = 0, square = 0;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (!kFills && at.template column<N>(v) >= columns) continue;
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float d = s[u][v][k] - pivot;
        sum += d;
        square += d * d;
      }
    }
    const float mean = sum * inverse_count;
    part[u] = {pivot + mean, not_negative(square - sum * mean)};
  }
  const int lanes = S == Scope::group ? at.row_threads : 32;
  if (even)
    count = combine_lanes<true>(part, count, lanes);
  else
    count = combine_lanes<false>(part, count, lanes);
  const auto rstd = [&](Moments(&m)[U]) {
#pragma unroll
    for (int u = 0; u < U; ++u) m[u] = {part[u].mean, precise_rsqrt(part[u].spread * inverse_columns + eps)};
  };
  if constexpr (S == Scope::group) {
    then(rstd);
  } else {
    static_assert(U == 1, "a block or a cluster works on one row");
    using Parts = Exchange<S, kPartValues, kBlockThreads, 1>;
    Parts exchange{scratch};
    const float* all = exchange.arrive({part[0].mean, part[0].spread, count});
    exchange.wait();
    then([&](Moments(&m)[U]) {
      // Of the warps' means as of a thread's elements: differences from the first of them, in one pass.
      const int warps = at.row_threads / 32;
      const float first = all[0];
      const auto add = [&](int w, float held, bool here, float (&sum)[2]) {
        const float d = all[w] - first, spread = all[Parts::kRowWarps + w];
        sum[0] += here ? held * d : 0.f;
        sum[1] += here ? held * d * d + spread : 0.f;
      };
      float sum[2];
      if (even)
        sums_of_warps(sum, warps, [&](int w, bool here, float (&total)[2]) { add(w, 32 * V * N, here, total); });
      else
        sums_of_warps(sum, warps,
                      [&](int w, bool here, float (&total)[2]) { add(w, all[2 * Parts::kRowWarps + w], here, total); });
      const float off = sum[0] * inverse_columns;
      part[0] = {first + off, not_negative(sum[1] - sum[0] * off)};
      rstd(m);
    });
  }
}

// A row has at most row_threads * V * N columns and lies in registers; a group of lanes works on U rows. Reads x (and
// residual) once, writes y (and residual_out) once, mean and rstd; weight and bias come once a row (U rows) from a
// cache: a weight alone is asked for together with x in groups and in blocks of two vectors a thread, otherwise while
// the sums travel. Until y is made the row stays packed, because registers decide how many rows are in flight.
template <class Op, class T, class R, class C> __global__ void __launch_bounds__(C::instance.max_threads, kMinBlocks<C>)
    forward_registers(NormForwardParams p, int lanes) {
  constexpr int V = C::instance.vectors, U = C::instance.rows, kMaxThreads = C::instance.max_threads, N = kVector<T>;
  constexpr Scope S = C::instance.scope;
  constexpr bool kWeightWithX = !Op::kResidual && (S == Scope::group || (!Op::kLayer && V <= 2));
  constexpr int kScratch = Exchange<S, kMomentValues<Op>, kMaxThreads, 1>::kFloats;
  WARPSMITH_SHARED(float, scratch, kScratch);
  const Place<S> at(lanes);
  if constexpr (S == Scope::cluster) device::cluster_arrive();
  const int columns = static_cast<int>(p.columns);
  const float inverse_columns = 1.f / static_cast<float>(columns), eps = static_cast<float>(p.eps);
  const DropOut drop(Op::kDropout ? p.dropout : Dropout{});
  const int64_t first_row = at.unit * U * at.groups + at.group;
  const auto row_of = [&](int u) { return first_row + int64_t{u} * at.groups; };
  const auto is_row = [&](int u) { return S != Scope::group || row_of(u) < p.rows; };
  const auto is_column = [&](int v) { return at.template column<N>(v) < columns; };

  Elements<T, N> x[U][V];
  Elements<R, N> s[U][V];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const T* from = static_cast<const T*>(p.x) + row_of(u) * p.x_stride;
    const R* residual = static_cast<const R*>(p.residual) + row_of(u) * p.residual_stride;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      x[u][v] = {}, s[u][v] = {};
      if (!is_row(u) || !is_column(v)) continue;
      x[u][v] = load_elements<T, N>(from, at.template column<N>(v));
      if constexpr (Op::kResidual) s[u][v] = load_elements<R, N>(residual, at.template column<N>(v));
    }
  }
  Elements<T, N> early_weight[V], early_bias[V];
  if constexpr (kWeightWithX) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int column = at.template column<N>(v);
      const bool here = p.weight_dtype == p.dtype && is_row(0) && is_column(v);
      early_weight[v] = load_stored<T, N>(p.weight, column, here, true);
      if constexpr (Op::kLayer) early_bias[v] = load_stored<T, N>(p.bias, column, here, false);
    }
  }
#pragma unroll
  for (int u = 0; u < U; ++u) {
    R* to = static_cast<R*>(p.residual_out) + row_of(u) * p.columns;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if constexpr (!Op::kResidual) {
        s[u][v] = x[u][v];
        continue;
      }
      const int column = at.template column<N>(v);
      Vector<float, N> sum;
#pragma unroll
      for (int k = 0; k < N; ++k) sum.at[k] = x[u][v][k];
      if constexpr (Op::kDropout) drop(sum, row_of(u) * p.columns + column);
#pragma unroll
      for (int k = 0; k < N; ++k) sum.at[k] += s[u][v][k];
      s[u][v] = rounded<R>(sum);
      if (is_row(u) && is_column(v)) store_elements(to, column, s[u][v]);
    }
  }

  if constexpr (S == Scope::cluster) device::cluster_wait();
  const float offset = p.weight ? static_cast<float>(p.weight_offset) : 0.f;
  const auto then = [&](auto&& finish) {
    with_weight<T, !Op::kLayer>(p.weight_dtype, offset, [&]<class W, bool kOffset>() {
      constexpr bool kLoaded = kWeightWithX && sizeof(W) == sizeof(T);
      // vectors, because no load may pass a store
      constexpr int kAhead = sizeof(W) > sizeof(T) ? 1 : Op::kLayer ? 2 : 4;
      Elements<W, N> w[V], b[V];
      const auto request = [&](int v) {
        const int column = at.template column<N>(v);
        const bool here = is_row(0) && is_column(v);
        w[v] = load_stored<W, N>(p.weight, column, here, true);
        if constexpr (Op::kLayer) b[v] = load_stored<W, N>(p.bias, column, here, false);
      };
      if constexpr (!kLoaded) {
#pragma unroll
        for (int v = 0; v < kAhead && v < V; ++v) request(v);
      }
      Moments m[U];
      finish(m);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if constexpr (kLoaded) {
          keep_packed(early_weight[v]);
          w[v] = early_weight[v];
          if constexpr (Op::kLayer) {
            keep_packed(early_bias[v]);
            b[v] = early_bias[v];
          }
        }
#pragma unroll
        for (int u = 0; u < U; ++u) keep_packed(s[u][v]);
      }
#pragma unroll
      for (int u = 0; u < U; ++u)
        if (at.lane == 0 && is_row(u)) {
          if (p.rstd) device::store(static_cast<float*>(p.rstd) + row_of(u), m[u].rstd);
          if (Op::kLayer && p.mean) device::store(static_cast<float*>(p.mean) + row_of(u), m[u].mean);
        }
      T* y_row[U];
#pragma unroll
      for (int u = 0; u < U; ++u) y_row[u] = static_cast<T*>(p.y) + row_of(u) * p.columns;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int column = at.template column<N>(v);
#pragma unroll
        for (int u = 0; u < U; ++u) {
          Vector<float, N> y;
#pragma unroll
          for (int k = 0; k < N; ++k) {
            const float scale = kOffset ? w[v][k] + offset : w[v][k];
            if constexpr (Op::kLayer)
              y.at[k] = (s[u][v][k] - m[u].mean) * m[u].rstd * scale + b[v][k];
            else
              y.at[k] = s[u][v][k] * m[u].rstd * scale;
          }
          if (is_row(u) && is_column(v)) store_elements(y_row[u], column, rounded<T>(y));
        }
        if constexpr (!kLoaded)
          if (v + kAhead < V) request(v + kAhead);
      }
    });
  };
  if constexpr (Op::kLayer)
    layer_moments<S, kMaxThreads>(s, at, scratch, columns, inverse_columns, eps, then);
  else
    rms_moments<S, kMaxThreads>(s, at, scratch, inverse_columns, eps, then);
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
