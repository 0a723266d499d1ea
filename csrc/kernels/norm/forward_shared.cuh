#pragma once
#include "device/async_copy.h"
#include "kernels/norm/forward.cuh"

namespace warpsmith::norm {

// The forward of wide rows, one row per block in shared memory, loaded by asynchronous copies. More rows are in flight
// than registers could hold, because a thread keeps nothing of its row between the sums and y. Each thread reads only
// what it copied itself, so the only barrier is the one of the sums.
//
// For rows that fill their threads, columns == kThreads * V * N, with a weight (and bias) of x's type and no offset.
// kWeightWithX: weight and bias are requested together with the row and wait in registers. Otherwise they are requested
// vector by vector while y is computed.
template <class Op, class T, class C> __global__ void __launch_bounds__(C::instance.max_threads, kMinBlocks<C>)
    forward_shared(NormForwardParams p, int lanes) {
  static_assert(!Op::kResidual && !Op::kDropout);
  constexpr int V = C::instance.vectors, kThreads = C::instance.lanes;
  constexpr bool kWeightWithX = C::instance.weight_with_x;
  constexpr int N = kVector<T>, kColumns = kThreads * V * N;
  constexpr Scope S = Scope::block;
  constexpr int kScratch = Exchange<S, kMomentValues<Op>, kThreads, 1>::kFloats;
  WARPSMITH_SHARED(float, scratch, kScratch);
  WARPSMITH_DYNAMIC_SHARED(shared);
  RowSlot<S> at(lanes);
  at.row_threads = kThreads;  // a constant for the compiler
  const int64_t row = at.unit;
  constexpr float kInverseColumns = 1.f / kColumns;
  const float eps = static_cast<float>(p.eps);
  T* held = reinterpret_cast<T*>(shared);

#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int column = at.template column<N>(v);
    device::copy_async<16>(held + column, static_cast<const T*>(p.x) + row * p.x_stride + column);
  }
  device::copy_async_commit();
  Elements<T, N> w[V], b[V];
  const auto request_weight = [&](int v) { w[v] = load_elements<T, N>(p.weight, at.template column<N>(v)); };
  const auto request_bias = [&](int v) {
    if constexpr (Op::kLayer) b[v] = load_elements<T, N>(p.bias, at.template column<N>(v));
  };
  constexpr int kBiasesWithX = V < 4 ? V : 4;  // the others while the sums are exchanged: saves registers
  if constexpr (kWeightWithX) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      request_weight(v);
      if (v < kBiasesWithX) request_bias(v);
    }
  }
  device::copy_async_wait<0>();
  Elements<T, N> s[1][V];
#pragma unroll
  for (int v = 0; v < V; ++v) s[0][v] = load_elements<T, N>(held, at.template column<N>(v));

  const auto then = [&](auto&& finish) {
    if constexpr (kWeightWithX) {
#pragma unroll
      for (int v = kBiasesWithX; v < V; ++v) request_bias(v);
    }
    Moments m[1];
    finish(m);
    if (at.lane == 0) {
      if (p.rstd) device::store(static_cast<float*>(p.rstd) + row, m[0].rstd);
      if (Op::kLayer && p.mean) device::store(static_cast<float*>(p.mean) + row, m[0].mean);
    }
    if constexpr (kWeightWithX) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        keep_packed(w[v]);
        if constexpr (Op::kLayer) keep_packed(b[v]);
      }
    }
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int column = at.template column<N>(v);
      if constexpr (!kWeightWithX) {
        request_weight(v);
        request_bias(v);
      }
      const Elements<T, N> again = load_elements<T, N>(held, column);
      Vector<float, N> y;
#pragma unroll
      for (int k = 0; k < N; ++k) {
        if constexpr (Op::kLayer)
          y.at[k] = (again[k] - m[0].mean) * m[0].rstd * w[v][k] + b[v][k];
        else
          y.at[k] = again[k] * m[0].rstd * w[v][k];
      }
      store_elements(p.y, row * kColumns + column, rounded<T>(y));
    }
  };
  if constexpr (Op::kLayer)
    layer_moments<S, kThreads>(s, at, scratch, kColumns, kInverseColumns, eps, then);
  else
    rms_moments<S, kThreads>(s, at, scratch, kInverseColumns, eps, then);
}

}  // namespace warpsmith::norm
