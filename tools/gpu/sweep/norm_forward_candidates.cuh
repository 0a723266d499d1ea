#pragma once
#include "kernels/norm/norm_launch.cuh"

// A body of the norms' forward beside the package's (norm_forward.cu): bfloat16 rows whose length and threads the
// compiler knows, weight (and bias) given and bfloat16, no dropout. What it was worth:
// docs/design/2026-11-22-norm-forward.md.
namespace warpsmith::norm::candidates {

using B = bfloat16;
constexpr int N = kVector<B>;
using Eight = Elements<B, N>;

template <class Op>
__device__ __forceinline__ Eight result(const Eight& s, const Moments& m, const Eight& weight, const Eight& bias) {
  Vector<float, N> y;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if constexpr (Op::kLayer)
      y.at[k] = (s[k] - m.mean) * m.rstd * weight[k] + bias[k];
    else
      y.at[k] = s[k] * m.rstd * weight[k];
  }
  return rounded<B>(y);
}

__device__ __forceinline__ Eight sum_of(const Eight& x, const Eight& residual) {
  Vector<float, N> sum;
#pragma unroll
  for (int k = 0; k < N; ++k) sum.at[k] = x[k] + residual[k];
  return rounded<B>(sum);
}

// A row in the registers of a block. kAhead: vectors of weight (and bias) that are asked for while the sums travel, or
// all with x if 0. kLateSum: residual_out leaves beside y, not before the sums.
template <class Op, int kColumns, int kThreads, int kAhead, bool kLateSum, int kMaxThreads, int kMinBlocks>
__global__ void __launch_bounds__(kMaxThreads, kMinBlocks) wide_rows(NormForwardParams p, int lanes) {
  constexpr int V = kColumns / (kThreads * N);
  static_assert(V * kThreads * N == kColumns);
  constexpr Scope S = Scope::block;
  constexpr int kScratch = Exchange<S, kMomentValues<Op>, kThreads, 1>::kFloats;
  WARPSMITH_SHARED(float, scratch, kScratch);
  Place<S> at(lanes);
  at.row_threads = kThreads;
  const int64_t row = at.unit;
  const auto column = [&](int v) { return at.template column<N>(v); };
  Eight s[1][V], residual[V], w[V], b[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    s[0][v] = load_elements<B, N>(static_cast<const B*>(p.x) + row * p.x_stride, column(v));
    if constexpr (Op::kResidual)
      residual[v] = load_elements<B, N>(static_cast<const B*>(p.residual) + row * p.residual_stride, column(v));
  }
  const auto request = [&](int v) {
    w[v] = load_elements<B, N>(p.weight, column(v));
    if constexpr (Op::kLayer) b[v] = load_elements<B, N>(p.bias, column(v));
  };
  if constexpr (kAhead == 0) {
#pragma unroll
    for (int v = 0; v < V; ++v) request(v);
  }
  if constexpr (Op::kResidual) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      s[0][v] = sum_of(s[0][v], residual[v]);
      if constexpr (!kLateSum) store_elements(p.residual_out, row * kColumns + column(v), s[0][v]);
    }
  }
  const auto then = [&](auto&& finish) {
    if constexpr (kAhead > 0) {
#pragma unroll
      for (int v = 0; v < kAhead && v < V; ++v) request(v);
    }
    Moments m[1];
    finish(m);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      keep_packed(s[0][v]);
      if constexpr (kAhead == 0) {
        keep_packed(w[v]);
        if constexpr (Op::kLayer) keep_packed(b[v]);
      }
    }
    if (at.lane == 0) {
      if (p.rstd) device::store(static_cast<float*>(p.rstd) + row, m[0].rstd);
      if (Op::kLayer && p.mean) device::store(static_cast<float*>(p.mean) + row, m[0].mean);
    }
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const Eight y = result<Op>(s[0][v], m[0], w[v], b[v]);
      if constexpr (kAhead > 0) {
        if (v + kAhead < V) request(v + kAhead);
      }
      if constexpr (Op::kResidual && kLateSum) store_elements(p.residual_out, row * kColumns + column(v), s[0][v]);
      store_elements(p.y, row * kColumns + column(v), y);
    }
  };
  if constexpr (Op::kLayer)
    layer_moments<S, kThreads>(s, at, scratch, kColumns, 1.f / kColumns, static_cast<float>(p.eps), then);
  else
    rms_moments<S, kThreads>(s, at, scratch, 1.f / kColumns, static_cast<float>(p.eps), then);
}

}  // namespace warpsmith::norm::candidates
