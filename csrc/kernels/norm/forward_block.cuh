#pragma once
#include "kernels/norm/forward.cuh"

namespace warpsmith::norm {

// Sums two values of a row over its block. Every thread gets the same bits.
template <int kThreads> struct BlockSums {
  static constexpr int kWarps = kThreads / 32;
  using Two = Vector<float, 2>;
  Two* of_warps;  // kWarps of them

  __device__ __forceinline__ void hand_over(float (&sum)[2]) const {
    group_sums(sum, 32);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = {{sum[0], sum[1]}};
  }
  __device__ __forceinline__ void read(float (&sum)[2]) const {
    sum[0] = sum[1] = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      const Two two = of_warps[i];
      sum[0] += two.at[0], sum[1] += two.at[1];
    }
  }
};

// The forward of layer_norm with a row in the registers of a block, for a weight and bias of x's type. At most kThreads
// * V * N columns; exactly that many if kFills.
//
// Sums are taken about a pivot, the mean of the row's first four elements: 30 instructions per thread fewer than
// merging parts by Chan's formula (forward.cuh). If the pivot is so far from the mean that the sum of squares
// exceeds kMostCancelled times the spread, every thread sees that in the same sums, and the row is summed again about
// its mean. That happens to one row in 2,000 of normal numbers.
template <class Op, class T, class C> __global__ void __launch_bounds__(C::instance.max_threads, kMinBlocks<C>)
    forward_block(NormForwardParams p, int) {
  static_assert(Op::kLayer && !Op::kResidual && !Op::kDropout && sizeof(T) == 2 &&
                C::instance.lanes == C::instance.max_threads);
  constexpr float kMostCancelled = 4;
  constexpr int V = C::instance.vectors, kThreads = C::instance.lanes, N = kVector<T>;
  constexpr int kAhead = V == 2 ? 2 : 1;  // vectors of weight and bias requested while the sums are exchanged
  constexpr bool kFills = C::instance.fills;
  using Sums = BlockSums<kThreads>;
  WARPSMITH_SHARED(typename Sums::Two, slots, 2 * Sums::kWarps);
  const int64_t row = blockIdx.x;
  const int columns = kFills ? kThreads * V * N : static_cast<int>(p.columns);
  const float inverse_columns = 1.f / static_cast<float>(columns);
  const auto column = [&](int v) { return (v * kThreads + static_cast<int>(threadIdx.x)) * N; };
  const auto is_column = [&](int v) { return kFills || column(v) < columns; };
  const T* const x = static_cast<const T*>(p.x) + row * p.x_stride;
  T* const y = static_cast<T*>(p.y) + row * columns;

  Elements<T, N> s[V], w[V], b[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if (is_column(v)) s[v] = load_elements<T, N>(x, column(v));
  }
  const Elements<T, 4> first = load_elements<T, 4>(x, 0);
  const auto request = [&](int v) {
    if (!is_column(v)) return;
    w[v] = load_elements<T, N>(p.weight, column(v));
    b[v] = load_elements<T, N>(p.bias, column(v));
  };
  const auto add = [](const Elements<T, N>& of, float pivot, float (&sum)[2]) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float d = of[k] - pivot;
      sum[0] += d;
      sum[1] += d * d;
    }
  };
  const auto rstd_of = [&](float spread) {
    return precise_rsqrt(not_negative(spread) * inverse_columns + static_cast<float>(p.eps));
  };
  const auto store_moments = [&](const Moments& m) {
    if (threadIdx.x == 0) {
      if (p.rstd) device::store(static_cast<float*>(p.rstd) + row, m.rstd);
      if (p.mean) device::store(static_cast<float*>(p.mean) + row, m.mean);
    }
  };
  const auto store_result = [&](int v, const Moments& m, const Elements<T, N>& s, const Elements<T, N>& w,
                                const Elements<T, N>& b) {
    Vector<float, N> result;
#pragma unroll
    for (int k = 0; k < N; ++k) result.at[k] = (s[k] - m.mean) * m.rstd * w[k] + b[k];
    store_elements(y, column(v), rounded<T>(result));
  };

  // The pivot's own sum cannot overflow, and the pivot of equal elements is exactly that element.
  const float pivot = fmaf(first[1], 0.25f, first[0] * 0.25f) + fmaf(first[3], 0.25f, first[2] * 0.25f);
  float sum[2] = {};
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if (is_column(v)) add(s[v], pivot, sum);
  }
  Sums{slots}.hand_over(sum);
  __syncthreads();
#pragma unroll
  for (int v = 0; v < kAhead; ++v) request(v);
  Sums{slots}.read(sum);
  float off = sum[0] * inverse_columns, spread = sum[1] - sum[0] * off;
  Moments m{pivot + off, 0};
  if (!(sum[1] <= kMostCancelled * spread)) {
    // Reads from memory again, one vector at a time: these rare rows must not cost the others registers.
    sum[0] = sum[1] = 0;
#pragma unroll 1
    for (int v = 0; v < V; ++v) {
      if (is_column(v)) add(load_elements<T, N>(x, column(v)), m.mean, sum);
    }
    Sums{slots + Sums::kWarps}.hand_over(sum);
    __syncthreads();
    Sums{slots + Sums::kWarps}.read(sum);
    off = sum[0] * inverse_columns;
    m = {m.mean + off, rstd_of(sum[1] - sum[0] * off)};
    store_moments(m);
#pragma unroll 1
    for (int v = 0; v < V; ++v) {
      const int c = column(v);
      if (is_column(v))
        store_result(v, m, load_elements<T, N>(x, c), load_elements<T, N>(p.weight, c), load_elements<T, N>(p.bias, c));
    }
    return;
  }
  m.rstd = rstd_of(spread);
#pragma unroll
  for (int v = 0; v < V; ++v) keep_packed(s[v]);
  store_moments(m);
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if (v + kAhead < V) request(v + kAhead);  // before the store: no load moves above a store
    if (is_column(v)) store_result(v, m, s[v], w[v], b[v]);
  }
}

}  // namespace warpsmith::norm
