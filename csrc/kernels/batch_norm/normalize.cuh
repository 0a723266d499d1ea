#pragma once
#include "device/programmatic_launch.h"
#include "kernels/batch_norm/place.cuh"

// y = (x - mean) * rstd * weight + bias (+ residual), behind it ReLU. Reads x and residual once, writes y once, and
// with a mask a byte for each vector of 16 bytes.
namespace warpsmith::batch_norm {

struct NormalizeParams {
  const void *x, *residual;
  void* y;
  uint8_t* mask;
  Affine affine;
  int64_t x_stride, residual_stride;  // in vectors
  Turns turns;
  bool relu;
};

template <class T, int N, bool kResidual> __global__ void __launch_bounds__(kThreads, kBatchNormResident)
    normalize(NormalizeParams p) {
  constexpr int U = kRowsAStage;
  WARPSMITH_DYNAMIC_SHARED(memory);
  const Turns& t = p.turns;
  const Place<N> at(t);
  Ring<T, N, kResidual ? 2 : 1> ring(memory);
  int64_t ahead = t.turns - 1 - at.slice;
  const auto copy = [&] {
    if (ahead >= 0) {
      const int64_t first = ahead * t.rows_a_turn + at.row;
      ring.copy(0, p.x, p.x_stride, at.vector, first, at.rows_together, t.rows);
      if constexpr (kResidual) ring.copy(1, p.residual, p.residual_stride, at.vector, first, at.rows_together, t.rows);
    }
    ring.copied();
    ahead -= t.slices;
  };
  if (at.here) {  // of no kernel that still runs
    for (int stage = 0; stage < ring.kStages; ++stage) copy();
  }
  device::wait_for_previous_kernel();
  if (!at.here) return;
  const Channels<N> channels(p.affine, at.column, true);
  for (int64_t turn = t.turns - 1 - at.slice; turn >= 0; turn -= t.slices, copy()) {
    Packed<T, N> x[U], residual[U];
    ring.wait();
    ring.take(x, 0);
    if constexpr (kResidual) ring.take(residual, 1);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t row = turn * t.rows_a_turn + at.row + u * at.rows_together;
      if (row >= t.rows) break;
      float v[N];
      unsigned kept = 0;
#pragma unroll
      for (int k = 0; k < N; ++k) {
        v[k] = channels.value(element<T, N>(x[u], k), k);
        if constexpr (kResidual) v[k] += element<T, N>(residual[u], k);
        if (p.relu) {
          kept |= static_cast<unsigned>(keeps(v[k])) << k;
          v[k] = keeps(v[k]) ? v[k] : 0.0f;
        }
      }
      device::store(vector_at<T, N>(p.y, row * t.vectors + at.vector), device::rounded<T>(v));
      if (p.mask) device::store(p.mask + row * t.vectors + at.vector, static_cast<uint8_t>(kept));
    }
  }
}

}  // namespace warpsmith::batch_norm
