#pragma once
#include "device/bulk_copy.h"
#include "device/fence.h"
#include "kernels/norm/norm_launch.cuh"

// Bodies of the norms' forward that wait for a measurement (norm_forward.cu): bfloat16 rows whose length and threads
// the compiler knows, weight (and bias) given and bfloat16, no dropout. Why each:
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

// once: in one exchange (layer: by Chan's formula); twice: layer's mean in one exchange and the deviations' squares in
// a second, the deviations stay in registers as floats.
enum class Moment { once, twice };

// Rows of one warp: 32 / kLanes side by side, U of them one after the other, all of them contiguous in memory. A warp
// does one such batch, or steps through batches with the next one's rows on their way (kStream).
template <class Op, int kColumns, int kLanes, int U, Moment kMoment, bool kStream, int kMaxThreads, int kMinBlocks>
__global__ void __launch_bounds__(kMaxThreads, kMinBlocks) short_rows(NormForwardParams p, int) {
  constexpr int V = kColumns / (kLanes * N), kSide = 32 / kLanes, kRows = kSide * U;
  static_assert(V * kLanes * N == kColumns && kRows <= 32 && !Op::kResidual);
  const int thread = static_cast<int>(threadIdx.x % 32), lane = thread % kLanes, side = thread / kLanes;
  const int warps = static_cast<int>(blockDim.x / 32);
  int64_t first = (int64_t{blockIdx.x} * warps + threadIdx.x / 32) * kRows;
  if (first >= p.rows) return;
  const float eps = static_cast<float>(p.eps);
  const auto column = [&](int v) { return (v * kLanes + lane) * N; };

  Eight asked[U][V], x[U][V], w[V], b[V];
  const auto ask = [&](int64_t from) {
    const B* row = static_cast<const B*>(p.x) + (from + side) * p.x_stride;
#pragma unroll
    for (int u = 0; u < U; ++u) {
#pragma unroll
      for (int v = 0; v < V; ++v) asked[u][v] = load_elements<B, N>(row + u * kSide * p.x_stride, column(v));
    }
  };
  ask(first);
#pragma unroll
  for (int v = 0; v < V; ++v) {
    w[v] = load_elements<B, N>(p.weight, column(v));
    if constexpr (Op::kLayer) b[v] = load_elements<B, N>(p.bias, column(v));
  }
  for (;;) {
    const int64_t next = first + int64_t{gridDim.x} * warps * kRows;
#pragma unroll
    for (int u = 0; u < U; ++u) {
#pragma unroll
      for (int v = 0; v < V; ++v) x[u][v] = asked[u][v];
    }
    if constexpr (kStream) {
      if (next < p.rows) ask(next);
    }
    Moments m[U];
    constexpr bool kTwice = Op::kLayer && kMoment == Moment::twice;
    float deviation[kTwice ? U : 1][kTwice ? V * N : 1];
    if constexpr (kTwice) {
      float sum[U] = {}, square[U] = {};
#pragma unroll
      for (int u = 0; u < U; ++u) {
#pragma unroll
        for (int i = 0; i < V * N; ++i) sum[u] += x[u][i / N][i % N];
      }
      group_sums(sum, kLanes);
#pragma unroll
      for (int u = 0; u < U; ++u) {
        m[u].mean = sum[u] * (1.f / kColumns);
#pragma unroll
        for (int i = 0; i < V * N; ++i) {
          deviation[u][i] = x[u][i / N][i % N] - m[u].mean;
          square[u] += deviation[u][i] * deviation[u][i];
        }
      }
      group_sums(square, kLanes);
#pragma unroll
      for (int u = 0; u < U; ++u) m[u].rstd = precise_rsqrt(square[u] * (1.f / kColumns) + eps);
    } else {
      Place<Scope::group> at(kLanes);
      at.row_threads = kLanes, at.lane = lane;
      const auto then = [&](auto&& finish) { finish(m); };
      if constexpr (Op::kLayer)
        layer_moments<Scope::group, kMaxThreads>(x, at, nullptr, kColumns, 1.f / kColumns, eps, then);
      else
        rms_moments<Scope::group, kMaxThreads>(x, at, nullptr, 1.f / kColumns, eps, then);
    }
#pragma unroll
    for (int v = 0; v < V; ++v) {
      keep_packed(w[v]);
      if constexpr (Op::kLayer) keep_packed(b[v]);
      if constexpr (!kTwice) {
#pragma unroll
        for (int u = 0; u < U; ++u) keep_packed(x[u][v]);
      }
    }
    // The statistics of all rows in one store: lane i of the warp takes row i.
    Moments mine{};
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int from = thread % kSide * kLanes;
      const float rstd = kSide == 1 ? m[u].rstd : __shfl_sync(0xffffffffu, m[u].rstd, from, 32);
      if (thread / kSide == u) mine.rstd = rstd;
      if constexpr (Op::kLayer) {
        const float mean = kSide == 1 ? m[u].mean : __shfl_sync(0xffffffffu, m[u].mean, from, 32);
        if (thread / kSide == u) mine.mean = mean;
      }
    }
    if (thread < kRows) {
      if (p.rstd) device::store(static_cast<float*>(p.rstd) + first + thread, mine.rstd);
      if (Op::kLayer && p.mean) device::store(static_cast<float*>(p.mean) + first + thread, mine.mean);
    }
    B* to = static_cast<B*>(p.y) + (first + side) * kColumns;
#pragma unroll
    for (int v = 0; v < V; ++v) {
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if constexpr (kTwice) {
          Vector<float, N> y;
#pragma unroll
          for (int k = 0; k < N; ++k) y.at[k] = deviation[u][v * N + k] * m[u].rstd * w[v][k] + b[v][k];
          store_elements(to + u * kSide * kColumns, column(v), rounded<B>(y));
        } else {
          store_elements(to + u * kSide * kColumns, column(v), result<Op>(x[u][v], m[u], w[v], b[v]));
        }
      }
    }
    if (!kStream || next >= p.rows) return;
    first = next;
  }
}

// A row in the registers of a block. kAhead: vectors of weight (and bias) that are asked for while the sums travel, or
// all with x if 0. kLateSum: residual_out leaves beside y, not before the sums.
template <class Op, int kColumns, int kThreads, int kAhead, bool kLateSum, int kMaxThreads, int kMinBlocks>
__global__ void __launch_bounds__(kMaxThreads, kMinBlocks) wide_rows(NormForwardParams p, int lanes) {
  constexpr int V = kColumns / (kThreads * N);
  static_assert(V * kThreads * N == kColumns);
  constexpr Scope S = Scope::block;
  constexpr int kScratch = Exchange<S, Op::kSums, kThreads, 1>::kFloats;
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

// Persistent blocks; whole rows come and go by bulk copies through kStages slots of shared memory, which y (and
// residual_out) take over from x (and the residual). The first thread hands over the row before and asks for the one
// that follows the slots' rows, behind the barrier of the sums. The weight stays in registers.
template <class Op, int kColumns, int kThreads, int kStages, int kMinBlocks>
__global__ void __launch_bounds__(kThreads, kMinBlocks) streamed_rows(NormForwardParams p, int lanes) {
  constexpr int V = kColumns / (kThreads * N), kRowBytes = kColumns * 2;
  static_assert(V * kThreads * N == kColumns && !Op::kLayer);
  constexpr Scope S = Scope::block;
  using Sums = Exchange<S, 1, kThreads, 2>;
  constexpr int kScratch = Sums::kFloats;
  WARPSMITH_SHARED(float, scratch, kScratch);
  WARPSMITH_SHARED(device::Mbarrier, full, kStages);
  WARPSMITH_DYNAMIC_SHARED(shared);
  Place<S> at(lanes);
  at.row_threads = kThreads;
  Sums exchange{scratch};
  const auto column = [&](int v) { return at.template column<N>(v); };
  const auto x_of = [&](int slot) { return reinterpret_cast<B*>(shared) + slot * kColumns; };
  const auto sum_slot = [&](int slot) { return x_of(kStages + slot); };
  const int64_t rows = (p.rows - at.unit + at.units - 1) / at.units;  // of this block
  const auto row_of = [&](int64_t i) { return at.unit + i * at.units; };
  const auto ask = [&](int64_t i, int slot) {
    device::mbarrier_arrive_expect(full + slot, Op::kResidual ? 2 * kRowBytes : kRowBytes);
    device::bulk_load(x_of(slot), static_cast<const B*>(p.x) + row_of(i) * p.x_stride, kRowBytes, full + slot);
    if constexpr (Op::kResidual)
      device::bulk_load(sum_slot(slot), static_cast<const B*>(p.residual) + row_of(i) * p.residual_stride, kRowBytes,
                        full + slot);
  };
  const auto hand_over = [&](int64_t i, int slot) {
    device::bulk_store(static_cast<B*>(p.y) + row_of(i) * kColumns, x_of(slot), kRowBytes);
    if constexpr (Op::kResidual)
      device::bulk_store(static_cast<B*>(p.residual_out) + row_of(i) * kColumns, sum_slot(slot), kRowBytes);
    device::bulk_commit();
  };
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) device::mbarrier_init(full + i, 1);
    device::mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x == 0)
    for (int i = 0; i < kStages && i < rows; ++i) ask(i, i);
  Eight w[V];
#pragma unroll
  for (int v = 0; v < V; ++v) w[v] = load_elements<B, N>(p.weight, column(v));

  device::Ring<kStages> ring;
  int before = kStages - 1, last_but_one = kStages - 2;  // slots of the last two rows
  for (int64_t i = 0; i < rows; ++i) {
    device::mbarrier_wait(full + ring.stage, ring.parity);
    Eight s[V];
    float sum[1] = {};
#pragma unroll
    for (int v = 0; v < V; ++v) {
      s[v] = load_elements<B, N>(x_of(ring.stage), column(v));
      if constexpr (Op::kResidual) {
        s[v] = sum_of(s[v], load_elements<B, N>(sum_slot(ring.stage), column(v)));
        store_elements(sum_slot(ring.stage), column(v), s[v]);
      }
#pragma unroll
      for (int k = 0; k < N; ++k) sum[0] += s[v][k] * s[v][k];
    }
    group_sums(sum, 32);
    const float* all = exchange.arrive(sum);
    exchange.wait();
    if (threadIdx.x == 0 && i > 0) {
      hand_over(i - 1, before);
      if (i > 1 && i - 2 + kStages < rows) {
        device::bulk_wait_read<1>();
        ask(i - 2 + kStages, last_but_one);
      }
    }
    sums_of_warps(sum, kThreads / 32, [&](int w, bool here, float (&total)[1]) { total[0] += here ? all[w] : 0.f; });
    const Moments m{0.f, precise_rsqrt(sum[0] * (1.f / kColumns) + static_cast<float>(p.eps))};
    if (threadIdx.x == 0 && p.rstd) device::store(static_cast<float*>(p.rstd) + row_of(i), m.rstd);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      keep_packed(s[v]);
      keep_packed(w[v]);
      store_elements(x_of(ring.stage), column(v), result<Op>(s[v], m, w[v], w[v]));
    }
    device::fence_async_shared();
    last_but_one = before, before = ring.stage;
    ring.next();
  }
  __syncthreads();
  if (threadIdx.x == 0 && rows > 0) {
    hand_over(rows - 1, before);
    device::bulk_wait_read<0>();
  }
}

}  // namespace warpsmith::norm::candidates
