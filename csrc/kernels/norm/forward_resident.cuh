#pragma once
#include "device/bulk_copy.h"
#include "device/fence.h"
#include "kernels/norm/forward.cuh"

namespace warpsmith::norm {

// The forward of wide rows if the chip can hold all of them at once. Each block keeps at most kSlots rows in shared
// memory and requests all of them at the start, one bulk copy per row. y overwrites the row and leaves by a bulk copy
// after the barrier of the next row's sums. Sums are added in the order of forward_shared with as many threads.
//
// For rows that fill their threads, columns == kThreads * V * N, with a weight (and bias) of x's type and no offset.
// Weight and bias stay in registers.
template <class Op, class T, class C> __global__ void __launch_bounds__(C::instance.max_threads, kMinBlocks<C>)
    forward_resident(NormForwardParams p, int lanes) {
  static_assert(!Op::kResidual && !Op::kDropout && C::instance.lanes == C::instance.max_threads);
  constexpr int V = C::instance.vectors, kThreads = C::instance.lanes, kSlots = C::instance.rows;
  constexpr int N = kVector<T>, kColumns = kThreads * V * N, kRowBytes = kColumns * static_cast<int>(sizeof(T));
  constexpr Scope S = Scope::block;
  constexpr int kScratch = Exchange<S, kMomentValues<Op>, kThreads, 1>::kFloats;
  constexpr float kInverseColumns = 1.f / kColumns;
  WARPSMITH_SHARED(float, scratch, 2 * kScratch);
  WARPSMITH_SHARED(device::Mbarrier, full, kSlots);
  WARPSMITH_DYNAMIC_SHARED(shared);
  RowSlot<S> at(lanes);
  at.row_threads = kThreads;  // a constant for the compiler
  const float eps = static_cast<float>(p.eps);
  const auto column = [&](int v) { return at.template column<N>(v); };
  const auto slot = [&](int i) { return reinterpret_cast<T*>(shared) + i * kColumns; };
  const auto row_of = [&](int i) { return at.unit + i * at.units; };
  const auto hand_over = [&](int i) {
    device::bulk_store(static_cast<T*>(p.y) + row_of(i) * kColumns, slot(i), kRowBytes);
    device::bulk_commit();
  };
  const int rows = static_cast<int>((p.rows - at.unit + at.units - 1) / at.units);  // rows of this block
  if (threadIdx.x == 0) {
    for (int i = 0; i < rows; ++i) device::mbarrier_init(full + i, 1);
    device::mbarrier_init_fence();
    for (int i = 0; i < rows; ++i) {
      device::mbarrier_arrive_expect(full + i, kRowBytes);
      device::bulk_load(slot(i), static_cast<const T*>(p.x) + row_of(i) * p.x_stride, kRowBytes, full + i);
    }
  }
  Elements<T, N> w[V], b[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    w[v] = load_elements<T, N>(p.weight, column(v));
    if constexpr (Op::kLayer) b[v] = load_elements<T, N>(p.bias, column(v));
  }
  __syncthreads();
  for (int i = 0; i < rows; ++i) {
    device::mbarrier_wait(full + i, 0);
    Elements<T, N> s[1][V];
#pragma unroll
    for (int v = 0; v < V; ++v) s[0][v] = load_elements<T, N>(slot(i), column(v));
    const auto then = [&](auto&& finish) {
      if (threadIdx.x == 0 && i > 0) hand_over(i - 1);
      Moments m[1];
      finish(m);
      if (threadIdx.x == 0) {
        if (p.rstd) device::store(static_cast<float*>(p.rstd) + row_of(i), m[0].rstd);
        if (Op::kLayer && p.mean) device::store(static_cast<float*>(p.mean) + row_of(i), m[0].mean);
      }
#pragma unroll
      for (int v = 0; v < V; ++v) {
        keep_packed(s[0][v]);
        keep_packed(w[v]);
        if constexpr (Op::kLayer) keep_packed(b[v]);
        Vector<float, N> y;
#pragma unroll
        for (int k = 0; k < N; ++k) {
          if constexpr (Op::kLayer)
            y.at[k] = (s[0][v][k] - m[0].mean) * m[0].rstd * w[v][k] + b[v][k];
          else
            y.at[k] = s[0][v][k] * m[0].rstd * w[v][k];
        }
        store_elements(slot(i), column(v), rounded<T>(y));
      }
    };
    float* sums = scratch + i % 2 * kScratch;
    if constexpr (Op::kLayer)
      layer_moments<S, kThreads>(s, at, sums, kColumns, kInverseColumns, eps, then);
    else
      rms_moments<S, kThreads>(s, at, sums, kInverseColumns, eps, then);
    device::fence_async_shared();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    hand_over(rows - 1);
    device::bulk_wait_read<0>();
  }
}

}  // namespace warpsmith::norm
