#pragma once
#include "kernels/norm/row.cuh"
#include "tiles/float8_cast.cuh"

// The forward kernels of the norm family: templates over the op, the storage types T (x and y) and R (residual), and
// the threads per row. Statistics are float and summed in a fixed order.
//
// Bytes. Per element: reads x and writes y (2 * sizeof(T)); with a residual also reads residual and writes residual_out
// (2 * sizeof(R)). Per row: writes rstd, and for layer_norm mean, 4 bytes each. Weight and bias come from a cache.
// forward_block: each thread also reads the row's first four elements, and rows whose sums cancel are read twice more,
// all from a cache.
//
// layer_norm computes mean and variance in one pass and one exchange. mean(s^2) - mean^2 would cancel, so each thread
// sums deviations from its own first element. That is safe because the element is part of the sum: for n elements the
// sum of squares is at most n times the spread. Chan's formula merges the threads' results (Chan, Golub, LeVeque,
// "Updating formulae and a pairwise algorithm for computing sample variances", 1979).
namespace warpsmith::norm {

// Computes the moments of U rows at once. `s` holds zeros past the row's end. `then` runs after the sums have been
// exchanged; it receives `finish(m)`, which computes the moments. `then` may issue its own loads before it calls
// `finish`, so that they overlap with that computation.
template <Scope S, int kBlockThreads, class R, int N, int V, int U, class Then>
__device__ __forceinline__ void rms_moments(Elements<R, N> (&s)[U][V], const RowSlot<S>& at, float* scratch,
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

// Mean and sum of squared deviations of part of a row. Parts are exchanged together with their element count.
struct Part {
  float mean, spread;
};
constexpr int kPartValues = 3;

// Values that a warp sends in one exchange of rms_moments or layer_moments.
template <class Op> constexpr int kMomentValues = Op::kLayer ? kPartValues : 1;

// Merges the parts of a group's lanes. Every lane gets the same bits: both lanes of a pair compute the same sums, and
// the mean of equal parts is exactly their mean. kEven: every lane holds `count` elements. Returns the count after
// merging.
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
      } else {  // computed from the lower lane's side, so that both lanes round alike
        const float from = lower ? part[u].mean : other.mean;
        part[u].mean = from + (lower ? -d : d) * ((lower ? other_count : count) * inverse);
      }
    }
    count = total;
  }
  return count;
}

// N copies of the first element of `from`.
template <class R, int N> __device__ __forceinline__ Elements<R, N> repeated_first(const Elements<R, N>& from) {
  Elements<R, N> all;
  const uint32_t word = sizeof(R) == 4 ? from.words[0] : (from.words[0] & 0xffffu) * 0x10001u;
#pragma unroll
  for (int i = 0; i < all.kWords; ++i) all.words[i] = word;
  return all;
}

// The same for layer_norm. May leave copies of the thread's first element in `s` past the row's end.
template <Scope S, int kBlockThreads, class R, int N, int V, int U, class Then>
__device__ __forceinline__ void layer_moments(Elements<R, N> (&s)[U][V], const RowSlot<S>& at, float* scratch,
                                              int columns, float inverse_columns, float eps, Then&& then) {
  const bool even = columns == at.row_threads * V * N;
  float count = V * N;
  constexpr bool kFills = S != Scope::group;
  if (!even) {  // one branch; a group has one per vector. The filled-in elements differ by zero from the pivot
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
      // Merges the warps' means as a thread merges its elements: differences from the first mean, in one pass.
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

// The blocks per multiprocessor that a kernel's registers allow: one less with a cast of four vectors, which would
// spill.
template <class C, bool kCasts> constexpr int kBlocksWithCast =
    kMinBlocks<C> - (kCasts && C::instance.vectors == 4 ? 1 : 0);

// One row per group, block or cluster, in registers: at most row_threads * V * N columns. A group works on U rows.
//
// Reads x (and residual) once. Writes y (and residual_out), mean and rstd once. Reads weight and bias once per row
// (once per U rows in a group), from a cache: together with x in groups, and in rms_norm's blocks with two vectors per
// thread; while the sums are exchanged otherwise, and always with a residual. The row stays packed until y is computed,
// because registers decide how many rows are in flight.
//
// kCasts (norm_casts): writes also a byte an element and 4 bytes a row of p.cast, by one more exchange.
template <class Op, class T, class R, class C, bool kCasts>
__global__ void __launch_bounds__(C::instance.max_threads, kBlocksWithCast<C, kCasts>)
    forward_registers(NormForwardParams p, int lanes) {
  constexpr int V = C::instance.vectors, U = C::instance.rows, kMaxThreads = C::instance.max_threads, N = kVector<T>;
  constexpr Scope S = C::instance.scope;
  constexpr bool kWeightWithX = !Op::kResidual && (S == Scope::group || (!Op::kLayer && V <= 2));
  constexpr int kScratch = Exchange<S, kMomentValues<Op>, kMaxThreads, 1>::kFloats;
  WARPSMITH_SHARED(float, scratch, kCasts ? 2 * kScratch : kScratch);
  const RowSlot<S> at(lanes);
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
      // Vectors of weight and bias requested ahead, because the compiler moves no load above a store.
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
          if constexpr (kCasts) {
            s[u][v] = rounded<T>(y);
            if (is_column(v)) store_elements(y_row[u], column, s[u][v]);
          } else if (is_row(u) && is_column(v)) {
            store_elements(y_row[u], column, rounded<T>(y));
          }
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
  if constexpr (kCasts) {
    const auto y = [&](int v, float (&values)[N]) {
#pragma unroll
      for (int k = 0; k < N; ++k) values[k] = s[0][v][k];
    };
    quantize::cast_row<T, V>(
        y, [&](int v) { return at.template column<N>(v); }, columns, static_cast<const T*>(p.y) + first_row * p.columns,
        p.cast, first_row, scratch + kScratch);
  }
}

// Any length, alignment and dtype, N elements at a time. Reads a row twice (three times for layer_norm), after the
// first time mostly from a cache. With a residual, later passes read residual_out: each thread reads what it wrote.
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
    // If the squares overflow float, a second attempt scales all elements down: the result may still be an ordinary
    // number. The second pass over the row corrects the rounding error of the first pass's mean.
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
