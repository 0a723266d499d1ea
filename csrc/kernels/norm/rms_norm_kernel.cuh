#pragma once
#include <cstdint>

#include "device/async_copy.h"
#include "device/convert.h"
#include "device/math.h"
#include "device/programmatic_launch.h"
#include "device/reduce.h"
#include "device/vector.h"
#include "kernels/norm/norm_forward.cuh"
#include "kernels/norm/rms_norm.h"
#include "kernels/norm/rms_norm_config.h"

// The forward of rms_norm is that of the norm family, with neither mean nor residual: an element reads x and writes y
// (2
// * sizeof(T) bytes); a row: 4 bytes for rstd. Here are the kernels of its backward. T: storage of the activations, W:
// of the weight; statistics and sums are float, in a fixed order. N elements make one memory access, whose address is a
// multiple of N * sizeof(T). A row belongs to `lanes` threads: the whole block (kBlock), or a power of two up to 32,
// and then no barrier is needed and a warp holds 32 / lanes rows side by side.
namespace warpsmith::norm {

using RmsNorm = NormOp<false, false, false>;

}  // namespace warpsmith::norm

namespace warpsmith::rms_norm {

using device::Vector;

constexpr int kMaxWarps = 32;

// Where a thread stands: a unit (the block, or a warp) works on `side_by_side` rows together, because a row's sum needs
// all its threads at the same place.
template <bool kBlock> struct Place {
  int lane;          // of the row
  int side;          // which of the unit's rows
  int side_by_side;  // rows of a unit
  int unit;          // of the block
  int units;         // of a block

  __device__ __forceinline__ explicit Place(int lanes)
      : lane(kBlock ? threadIdx.x : threadIdx.x % lanes),
        side(kBlock ? 0 : threadIdx.x % 32 / lanes),
        side_by_side(kBlock ? 1 : 32 / lanes),
        unit(kBlock ? 0 : threadIdx.x / 32),
        units(kBlock ? 1 : blockDim.x / 32) {}
};

// Sum over the threads of a row, the same bits in each of them. `scratch`: 2 * kMaxWarps floats; its halves take turns,
// so that one barrier a call is enough.
template <bool kBlock> struct RowSum {
  float* scratch;
  int lanes;
  int turn = 0;

  __device__ __forceinline__ float operator()(float x) {
    if constexpr (kBlock) return device::block_sum(x, scratch + (turn++ % 2) * kMaxWarps);
    return device::group_sum(x, lanes);
  }
};

template <class T, int N> __device__ __forceinline__ const Vector<T, N>* vector_at(const void* base, int64_t element) {
  return reinterpret_cast<const Vector<T, N>*>(static_cast<const T*>(base) + element);
}

template <class T, int N> __device__ __forceinline__ Vector<T, N>* vector_at(void* base, int64_t element) {
  return reinterpret_cast<Vector<T, N>*>(static_cast<T*>(base) + element);
}

// N weights and their offset as floats, from global or shared memory, in pieces of at most 16 bytes; ones without a
// weight.
template <class W, int N>
__device__ __forceinline__ Vector<float, N> load_weight(const W* weight, int64_t column, float offset) {
  constexpr int kPiece = N * sizeof(W) > 16 ? 16 / sizeof(W) : N;
  Vector<float, N> w;
#pragma unroll
  for (int first = 0; first < N; first += kPiece) {
    Vector<W, kPiece> piece;
    if (weight) piece = device::load(vector_at<W, kPiece>(weight, column + first));
#pragma unroll
    for (int k = 0; k < kPiece; ++k) w.at[first + k] = weight ? device::to_float(piece.at[k]) + offset : 1.f;
  }
  return w;
}

// dx = rstd * (g - x_hat * mean), with g = dy * w and mean = mean(g * x_hat) of the row
template <class T, int N> __device__ __forceinline__ Vector<T, N> input_gradient(const Vector<float, N>& g,
                                                                                 const Vector<float, N>& x_hat,
                                                                                 float rstd, float mean) {
  Vector<T, N> dx;
#pragma unroll
  for (int k = 0; k < N; ++k) dx.at[k] = device::from_float<T>(rstd * (g.at[k] - x_hat.at[k] * mean));
  return dx;
}

// Stores N sums in pieces of at most 16 bytes.
template <int N> __device__ __forceinline__ void store_sums(float* to, const float (&sums)[N]) {
  constexpr int kPiece = N > 4 ? 4 : N;
#pragma unroll
  for (int first = 0; first < N; first += kPiece) {
    Vector<float, kPiece> piece;
#pragma unroll
    for (int k = 0; k < kPiece; ++k) piece.at[k] = sums[first + k];
    device::store(vector_at<float, kPiece>(to, first), piece);
  }
}

// Rows on their way through shared memory, in slots of 16 bytes: each thread copies its own pieces of a row
// asynchronously, stages - 1 steps ahead (2 to 4 stages), and reads back only those, so that no barrier is needed.
template <class T, int V, int kTensors> struct Ring {
  static constexpr int N = 16 / sizeof(T);
  Vector<T, N>* slots;  // [stages, kTensors, V, threads of the block]
  int stages;
  int stage = 0;  // of the step in hand

  __device__ __forceinline__ Vector<T, N>* slot(int of_stage, int tensor, int v) const {
    return slots + ((of_stage * kTensors + tensor) * V + v) * blockDim.x + threadIdx.x;
  }

  // Asks for this thread's pieces of the row that begins at element `row_at`; zeros where there is no row or no column.
  __device__ __forceinline__ void request(int of_stage, int tensor, const void* base, int64_t row_at, bool valid,
                                          int lane, int lanes, int64_t columns) const {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int64_t column = (int64_t{v} * lanes + lane) * N;
      const bool here = valid && column < columns;
      device::copy_async<16>(slot(of_stage, tensor, v), vector_at<T, N>(base, here ? row_at + column : 0), here);
    }
  }

  __device__ __forceinline__ int last_stage() const { return stage == 0 ? stages - 1 : stage - 1; }
  __device__ __forceinline__ void advance() { stage = stage + 1 == stages ? 0 : stage + 1; }

  __device__ __forceinline__ void wait_for_oldest() const {
    if (stages == 2)
      device::copy_async_wait<1>();
    else if (stages == 3)
      device::copy_async_wait<2>();
    else
      device::copy_async_wait<3>();
  }
};

// The weight of this thread's columns, kept in registers for every row that it will see.
template <class T, class W, int V> __device__ __forceinline__ void load_weights(Vector<float, 16 / sizeof(T)> (&w)[V],
                                                                                const void* weight, int lane, int lanes,
                                                                                int64_t columns, float offset) {
  constexpr int N = 16 / sizeof(T);
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int64_t column = (int64_t{v} * lanes + lane) * N;
    w[v] = {};
    if (column < columns) w[v] = load_weight<W, N>(static_cast<const W*>(weight), column, offset);
  }
}

// Reads dy and x once and writes dx once: 3 * sizeof(T) bytes an element, and gridDim.x rows of partial sums.
// Persistent blocks step through the rows side by side; the weight and its gradient stay in registers until the block's
// last row. A row has at most lanes * V * 16 / sizeof(T) columns. In contiguous pieces of rows a block, instead of side
// by side, the same kernel ran up to 5 % slower on an H200.
//
// Shared memory: a Ring of dy and x; at the end it takes the sums of the block's groups (4 bytes a column and group,
// never more than the ring).
template <class T, class W, int V, bool kBlock> __global__ void __launch_bounds__(kBlock ? ring_threads(V) : 256, 1)
    backward_ring(NormBackwardParams p, int lanes, int stages) {
  constexpr int N = 16 / sizeof(T);
  constexpr bool kKeep = V == 1;  // g and x_hat stay in registers over the row's sum; else the row is unpacked again
  WARPSMITH_SHARED(float, scratch, 2 * kMaxWarps);
  WARPSMITH_DYNAMIC_SHARED(shared);
  const Place<kBlock> at(lanes);
  RowSum<kBlock> row_sum{scratch, lanes};
  const float columns = static_cast<float>(p.columns);
  const int64_t base = (int64_t{blockIdx.x} * at.units + at.unit) * at.side_by_side;
  const int64_t step = int64_t{gridDim.x} * at.units * at.side_by_side;
  Ring<T, V, 2> ring{reinterpret_cast<Vector<T, N>*>(shared), stages};
  const auto request = [&](int64_t unit_row, int stage) {
    const int64_t row = unit_row + at.side;
    ring.request(stage, 0, p.dy, row * p.dy_stride, row < p.rows, at.lane, lanes, p.columns);
    ring.request(stage, 1, p.s, row * p.s_stride, row < p.rows, at.lane, lanes, p.columns);
    device::copy_async_commit();
  };
  const auto rstd_of = [&](int64_t unit_row) {
    const int64_t row = unit_row + at.side;
    return row < p.rows ? device::load(static_cast<const float*>(p.rstd) + row) : 0.f;
  };

  for (int s = 0; s < stages - 1; ++s) request(base + s * step, s);
  float next_rstd = rstd_of(base);
  float gradient[V][N] = {};
  Vector<float, N> w[V];
  load_weights<T, W>(w, p.weight, at.lane, lanes, p.columns, static_cast<float>(p.weight_offset));
  for (int64_t unit_row = base; unit_row < p.rows; unit_row += step) {
    request(unit_row + (stages - 1) * step, ring.last_stage());
    ring.wait_for_oldest();
    const float rstd = next_rstd;
    next_rstd = rstd_of(unit_row + step);
    const int64_t row = unit_row + at.side;
    Vector<float, N> g[V], x_hat[V];
    const auto unpack = [&](int v) {  // fills g and x_hat of vector v, gives dy
      const Vector<T, N> dy = *ring.slot(ring.stage, 0, v), x = *ring.slot(ring.stage, 1, v);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        x_hat[v].at[k] = device::to_float(x.at[k]) * rstd;
        g[v].at[k] = device::to_float(dy.at[k]) * w[v].at[k];
      }
      return dy;
    };
    float sum = 0;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const Vector<T, N> dy = unpack(v);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        sum += g[v].at[k] * x_hat[v].at[k];
        gradient[v][k] += device::to_float(dy.at[k]) * x_hat[v].at[k];
      }
    }
    if (p.dx) {
      const float mean = row_sum(sum) / columns;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (!kKeep) unpack(v);
        const int64_t column = (int64_t{v} * lanes + at.lane) * N;
        if (row < p.rows && column < p.columns)
          device::store(vector_at<T, N>(p.dx, row * p.columns + column), input_gradient<T>(g[v], x_hat[v], rstd, mean));
      }
    }
    ring.advance();
  }
  device::copy_async_wait<0>();
  device::launch_dependents();
  if (!p.dweight_partials) return;

  float* partial = static_cast<float*>(p.dweight_partials) + blockIdx.x * p.columns;
  if constexpr (kBlock) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int64_t column = (int64_t{v} * lanes + at.lane) * N;
      if (column < p.columns) store_sums(partial + column, gradient[v]);
    }
  } else {
    float* sums = reinterpret_cast<float*>(shared);
    const int group = threadIdx.x / lanes, groups = blockDim.x / lanes;
    __syncthreads();
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int64_t column = (int64_t{v} * lanes + at.lane) * N;
      if (column < p.columns) store_sums(sums + group * p.columns + column, gradient[v]);
    }
    __syncthreads();
    for (int64_t c = threadIdx.x; c < p.columns; c += blockDim.x) {
      float sum = 0;
      for (int g = 0; g < groups; ++g) sum += sums[g * p.columns + c];
      device::store(partial + c, sum);
    }
  }
}

// Any length and alignment: reads dy and x twice. Each group (a warp, or the block) keeps its weight gradient in a row
// of `dweight_partials` of its own, of which every column belongs to one thread.
template <class T, class W, int N, bool kBlock> __global__ void __launch_bounds__(1024, 1)
    backward_looped(NormBackwardParams p, int lanes) {
  WARPSMITH_SHARED(float, scratch, 2 * kMaxWarps);
  const Place<kBlock> at(lanes);
  RowSum<kBlock> row_sum{scratch, lanes};
  const int64_t group = int64_t{blockIdx.x} * at.units + at.unit, groups = int64_t{gridDim.x} * at.units;
  const int64_t step = int64_t{lanes} * N, first = int64_t{at.lane} * N;
  float* partial = p.dweight_partials ? static_cast<float*>(p.dweight_partials) + group * p.columns : nullptr;
  if (partial)
    for (int64_t c = first; c < p.columns; c += step)
#pragma unroll
      for (int k = 0; k < N; ++k) partial[c + k] = 0.f;

  for (int64_t r = group; r < p.rows; r += groups) {
    const float rstd = device::load(static_cast<const float*>(p.rstd) + r);
    Vector<float, N> g, x_hat;
    const auto read = [&](int64_t c) {  // fills g and x_hat, gives dy
      const auto dy = device::load(vector_at<T, N>(p.dy, r * p.dy_stride + c));
      const auto x = device::load(vector_at<T, N>(p.s, r * p.s_stride + c));
      const auto w = load_weight<W, N>(static_cast<const W*>(p.weight), c, static_cast<float>(p.weight_offset));
#pragma unroll
      for (int k = 0; k < N; ++k) {
        g.at[k] = device::to_float(dy.at[k]) * w.at[k];
        x_hat.at[k] = device::to_float(x.at[k]) * rstd;
      }
      return dy;
    };
    float sum = 0;
    if (p.dx)
      for (int64_t c = first; c < p.columns; c += step) {
        read(c);
#pragma unroll
        for (int k = 0; k < N; ++k) sum += g.at[k] * x_hat.at[k];
      }
    const float mean = row_sum(sum) / static_cast<float>(p.columns);
    for (int64_t c = first; c < p.columns; c += step) {
      const auto dy = read(c);
      if (p.dx) device::store(vector_at<T, N>(p.dx, r * p.columns + c), input_gradient<T>(g, x_hat, rstd, mean));
      if (partial)
#pragma unroll
        for (int k = 0; k < N; ++k) partial[c + k] += device::to_float(dy.at[k]) * x_hat.at[k];
    }
  }
  device::launch_dependents();
}

constexpr int kSumColumns = 32, kMaxSumSlices = 32;

// dweight[c] = sum over the partial rows, in two fixed steps: blockDim.x / kSumColumns interleaved sums, then those in
// order.
template <class W> __global__ void __launch_bounds__(kSumColumns* kMaxSumSlices)
    sum_partials(NormBackwardParams p, int64_t partial_rows) {
  WARPSMITH_SHARED(float, sums, kSumColumns* kMaxSumSlices);
  device::wait_for_previous_kernel();
  const int slice = threadIdx.x / kSumColumns, slices = blockDim.x / kSumColumns;
  const int64_t column = int64_t{blockIdx.x} * kSumColumns + threadIdx.x % kSumColumns;
  const float* partials = static_cast<const float*>(p.dweight_partials);
  float sum = 0;
  if (column < p.columns)
#pragma unroll 4
    for (int64_t r = slice; r < partial_rows; r += slices) sum += device::load(partials + r * p.columns + column);
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (slice != 0 || column >= p.columns) return;
  float total = 0;
  for (int s = 0; s < slices; ++s) total += sums[s * kSumColumns + threadIdx.x];
  device::store(static_cast<W*>(p.dweight) + column, device::from_float<W>(total));
}

}  // namespace warpsmith::rms_norm
