#pragma once
#include <cstdint>

#include "device/async_copy.h"
#include "device/convert.h"
#include "device/math.h"
#include "device/programmatic_launch.h"
#include "device/reduce.h"
#include "device/vector.h"
#include "kernels/rms_norm/rms_norm.h"

// Kernels of rms_norm. T: storage of the activations, W: of the weight; statistics and sums are float, in a fixed
// order. N elements make one memory access, whose address is a multiple of N * sizeof(T). A row belongs to `lanes`
// threads: the whole block (kBlock), or a power of two up to 32, and then no barrier is needed and a warp holds 32 /
// lanes rows side by side.
namespace warpsmith::rms_norm {

using device::Cache;
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

template <class T, int N> __device__ __forceinline__ float sum_of_squares(const Vector<T, N>& x) {
  float sum = 0;
#pragma unroll
  for (int k = 0; k < N; ++k) sum += device::to_float(x.at[k]) * device::to_float(x.at[k]);
  return sum;
}

template <class T, int N>
__device__ __forceinline__ Vector<T, N> normalised(const Vector<T, N>& x, float rstd, const Vector<float, N>& w) {
  Vector<T, N> y;
#pragma unroll
  for (int k = 0; k < N; ++k) y.at[k] = device::from_float<T>(device::to_float(x.at[k]) * rstd * w.at[k]);
  return y;
}

template <class T, int N>
__device__ __forceinline__ float dot(const Vector<T, N>& dy, const Vector<T, N>& x, const Vector<float, N>& w) {
  float sum = 0;
#pragma unroll
  for (int k = 0; k < N; ++k) sum += device::to_float(dy.at[k]) * w.at[k] * device::to_float(x.at[k]);
  return sum;
}

// dx = rstd * dy * w - x * correction, correction = rstd^3 * mean(dy * w * x)
template <class T, int N>
__device__ __forceinline__ Vector<T, N> input_gradient(const Vector<T, N>& dy, const Vector<T, N>& x,
                                                       const Vector<float, N>& w, float rstd, float correction) {
  Vector<T, N> dx;
#pragma unroll
  for (int k = 0; k < N; ++k)
    dx.at[k] =
        device::from_float<T>(rstd * device::to_float(dy.at[k]) * w.at[k] - device::to_float(x.at[k]) * correction);
  return dx;
}

template <class T, int N> __device__ __forceinline__ void add_weight_gradient(float (&sum)[N], const Vector<T, N>& dy,
                                                                              const Vector<T, N>& x, float rstd) {
#pragma unroll
  for (int k = 0; k < N; ++k) sum[k] += device::to_float(dy.at[k]) * (device::to_float(x.at[k]) * rstd);
}

// Reads x once and writes y once: 2 * sizeof(T) bytes an element, and the weight once a row from the L2. A row has at
// most lanes * V * N columns and lies in registers; R rows of a group are in flight together.
template <class T, class W, int N, int V, int R, bool kBlock> __global__ void __launch_bounds__(!kBlock ? 256
                                                                                                : V > 4 ? 512
                                                                                                        : 1024,
                                                                                                1)
    forward_registers(RmsNormFwdParams p, int lanes) {
  WARPSMITH_SHARED(float, scratch, 2 * kMaxWarps);
  const Place<kBlock> at(lanes);
  RowSum<kBlock> row_sum{scratch, lanes};
  const float offset = static_cast<float>(p.weight_offset), eps = static_cast<float>(p.eps);
  const float columns = static_cast<float>(p.columns);
  const W* weight = static_cast<const W*>(p.weight);
  const int64_t stride = int64_t{gridDim.x} * at.units * at.side_by_side * R;

  for (int64_t base = (int64_t{blockIdx.x} * at.units + at.unit) * at.side_by_side * R; base < p.rows; base += stride) {
    const int64_t first = base + at.side * R;
    Vector<T, N> x[R][V];
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int64_t column = (int64_t{v} * lanes + at.lane) * N;
        x[r][v] = {};
        if (first + r < p.rows && column < p.columns)
          x[r][v] = device::load<Cache::streaming>(vector_at<T, N>(p.x, (first + r) * p.x_stride + column));
      }
    float rstd[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      float sum = 0;
#pragma unroll
      for (int v = 0; v < V; ++v) sum += sum_of_squares(x[r][v]);
      rstd[r] = device::rsqrt(row_sum(sum) / columns + eps);
      if (p.rstd && at.lane == 0 && first + r < p.rows) static_cast<float*>(p.rstd)[first + r] = rstd[r];
    }
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int64_t column = (int64_t{v} * lanes + at.lane) * N;
      if (column >= p.columns) continue;
      const Vector<float, N> w = load_weight<W, N>(weight, column, offset);
#pragma unroll
      for (int r = 0; r < R; ++r)
        if (first + r < p.rows)
          device::store<Cache::streaming>(vector_at<T, N>(p.y, (first + r) * p.columns + column),
                                          normalised(x[r][v], rstd[r], w));
    }
  }
}

// Any length and alignment: reads x twice (the second time mostly from a cache) and writes y once.
template <class T, class W, int N, bool kBlock> __global__ void __launch_bounds__(1024, 1)
    forward_looped(RmsNormFwdParams p, int lanes) {
  WARPSMITH_SHARED(float, scratch, 2 * kMaxWarps);
  const Place<kBlock> at(lanes);
  RowSum<kBlock> row_sum{scratch, lanes};
  const int64_t step = int64_t{lanes} * N;

  for (int64_t r = int64_t{blockIdx.x} * at.units + at.unit; r < p.rows; r += int64_t{gridDim.x} * at.units) {
    float sum = 0;
    for (int64_t c = int64_t{at.lane} * N; c < p.columns; c += step)
      sum += sum_of_squares(device::load<Cache::keep>(vector_at<T, N>(p.x, r * p.x_stride + c)));
    const float rstd = device::rsqrt(row_sum(sum) / static_cast<float>(p.columns) + static_cast<float>(p.eps));
    if (p.rstd && at.lane == 0) static_cast<float*>(p.rstd)[r] = rstd;
    for (int64_t c = int64_t{at.lane} * N; c < p.columns; c += step) {
      const auto w = load_weight<W, N>(static_cast<const W*>(p.weight), c, static_cast<float>(p.weight_offset));
      const auto x = device::load<Cache::keep>(vector_at<T, N>(p.x, r * p.x_stride + c));
      device::store<Cache::streaming>(vector_at<T, N>(p.y, r * p.columns + c), normalised(x, rstd, w));
    }
  }
}

// Waits for the oldest of the `stages` groups of copies that are in flight.
__device__ __forceinline__ void wait_for_oldest(int stages) {
  if (stages == 2)
    device::copy_async_wait<1>();
  else if (stages == 3)
    device::copy_async_wait<2>();
  else
    device::copy_async_wait<3>();
}

// Reads dy and x once and writes dx once: 3 * sizeof(T) bytes an element, and gridDim.x rows of partial sums.
//
// A block takes contiguous rows. Each thread copies its own 16-byte pieces of dy and x asynchronously into slots of its
// own, stages - 1 rows ahead (2 to 4 stages), and reads back only those: the ring needs no barrier. The weight lies in
// shared memory, the weight gradient in registers until the block's last row. A row has at most lanes * V * 16 /
// sizeof(T) columns.
//
// Shared memory: stages * 2 * V slots of 16 bytes a thread, then the weight; at the end the slots take the sums of the
// block's groups (4 bytes a column and group, never more than the slots).
template <class T, class W, int V, bool kBlock> __global__ void __launch_bounds__(kBlock ? 1024 : 256, 1)
    backward_ring(RmsNormBwdParams p, int lanes, int stages) {
  constexpr int N = 16 / sizeof(T);
  WARPSMITH_SHARED(float, scratch, 2 * kMaxWarps);
  WARPSMITH_DYNAMIC_SHARED(shared);
  const Place<kBlock> at(lanes);
  RowSum<kBlock> row_sum{scratch, lanes};
  const float offset = static_cast<float>(p.weight_offset), columns = static_cast<float>(p.columns);
  Vector<T, N>* slots = reinterpret_cast<Vector<T, N>*>(shared);
  W* shared_weight = reinterpret_cast<W*>(slots + stages * 2 * V * blockDim.x);
  const auto slot = [&](int stage, int tensor, int v) {
    return slots + ((stage * 2 + tensor) * V + v) * blockDim.x + threadIdx.x;
  };

  if (p.weight) {
    constexpr int kPiece = 16 / sizeof(W);
    for (int64_t c = int64_t{threadIdx.x} * kPiece; c < p.columns; c += int64_t{blockDim.x} * kPiece)
      device::store(vector_at<W, kPiece>(static_cast<void*>(shared_weight), c),
                    device::load(vector_at<W, kPiece>(p.weight, c)));
    __syncthreads();
  }
  const W* weight = p.weight ? shared_weight : nullptr;

  const int64_t begin = p.rows * blockIdx.x / gridDim.x, end = p.rows * (blockIdx.x + 1) / gridDim.x;
  const int64_t base = begin + at.unit * at.side_by_side, step = int64_t{at.units} * at.side_by_side;
  const auto request = [&](int64_t unit_row, int stage) {
    const int64_t row = unit_row + at.side;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int64_t column = (int64_t{v} * lanes + at.lane) * N;
      const bool valid = row < end && column < p.columns;
      const int64_t dy_at = valid ? row * p.dy_stride + column : 0, x_at = valid ? row * p.x_stride + column : 0;
      device::copy_async<16>(slot(stage, 0, v), vector_at<T, N>(p.dy, dy_at), valid);
      device::copy_async<16>(slot(stage, 1, v), vector_at<T, N>(p.x, x_at), valid);
    }
    device::copy_async_commit();
  };
  const auto rstd_of = [&](int64_t unit_row) {
    const int64_t row = unit_row + at.side;
    return row < end ? static_cast<const float*>(p.rstd)[row] : 0.f;
  };

  for (int s = 0; s < stages - 1; ++s) request(base + s * step, s);
  float next_rstd = rstd_of(base);
  float gradient[V][N] = {};
  int stage = 0;
  for (int64_t unit_row = base; unit_row < end; unit_row += step) {
    request(unit_row + (stages - 1) * step, stage == 0 ? stages - 1 : stage - 1);
    wait_for_oldest(stages);
    const float rstd = next_rstd;
    next_rstd = rstd_of(unit_row + step);
    const int64_t row = unit_row + at.side;
    const auto weight_at = [&](int64_t column) { return load_weight<W, N>(weight, column, offset); };

    if (p.dx) {
      float sum = 0;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int64_t column = (int64_t{v} * lanes + at.lane) * N;
        if (column < p.columns) sum += dot(*slot(stage, 0, v), *slot(stage, 1, v), weight_at(column));
      }
      const float correction = row_sum(sum) / columns * rstd * rstd * rstd;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int64_t column = (int64_t{v} * lanes + at.lane) * N;
        if (row < end && column < p.columns)
          device::store<Cache::streaming>(
              vector_at<T, N>(p.dx, row * p.columns + column),
              input_gradient(*slot(stage, 0, v), *slot(stage, 1, v), weight_at(column), rstd, correction));
      }
    }
    if (p.partials)
#pragma unroll
      for (int v = 0; v < V; ++v) add_weight_gradient(gradient[v], *slot(stage, 0, v), *slot(stage, 1, v), rstd);
    stage = stage + 1 == stages ? 0 : stage + 1;
  }
  device::copy_async_wait<0>();
  device::launch_dependents();
  if (!p.partials) return;

  float* partial = static_cast<float*>(p.partials) + blockIdx.x * p.columns;
  if constexpr (kBlock) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int64_t column = (int64_t{v} * lanes + at.lane) * N;
      if (column < p.columns)
#pragma unroll
        for (int k = 0; k < N; ++k) partial[column + k] = gradient[v][k];
    }
  } else {
    float* sums = reinterpret_cast<float*>(shared);
    const int group = threadIdx.x / lanes, groups = blockDim.x / lanes;
    __syncthreads();
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int64_t column = (int64_t{v} * lanes + at.lane) * N;
      if (column < p.columns)
#pragma unroll
        for (int k = 0; k < N; ++k) sums[group * p.columns + column + k] = gradient[v][k];
    }
    __syncthreads();
    for (int64_t c = threadIdx.x; c < p.columns; c += blockDim.x) {
      float sum = 0;
      for (int g = 0; g < groups; ++g) sum += sums[g * p.columns + c];
      partial[c] = sum;
    }
  }
}

// Any length and alignment: reads dy and x twice. Each group (a warp, or the block) keeps its weight gradient in a row
// of `partials` of its own, of which every column belongs to one thread.
template <class T, class W, int N, bool kBlock> __global__ void __launch_bounds__(1024, 1)
    backward_looped(RmsNormBwdParams p, int lanes) {
  WARPSMITH_SHARED(float, scratch, 2 * kMaxWarps);
  const Place<kBlock> at(lanes);
  RowSum<kBlock> row_sum{scratch, lanes};
  const int64_t group = int64_t{blockIdx.x} * at.units + at.unit, groups = int64_t{gridDim.x} * at.units;
  const int64_t step = int64_t{lanes} * N, first = int64_t{at.lane} * N;
  float* partial = p.partials ? static_cast<float*>(p.partials) + group * p.columns : nullptr;
  if (partial)
    for (int64_t c = first; c < p.columns; c += step)
#pragma unroll
      for (int k = 0; k < N; ++k) partial[c + k] = 0.f;

  for (int64_t r = group; r < p.rows; r += groups) {
    const float rstd = static_cast<const float*>(p.rstd)[r];
    const auto dy_at = [&](int64_t c) { return device::load<Cache::keep>(vector_at<T, N>(p.dy, r * p.dy_stride + c)); };
    const auto x_at = [&](int64_t c) { return device::load<Cache::keep>(vector_at<T, N>(p.x, r * p.x_stride + c)); };
    const auto weight_at = [&](int64_t c) {
      return load_weight<W, N>(static_cast<const W*>(p.weight), c, static_cast<float>(p.weight_offset));
    };
    float sum = 0;
    if (p.dx)
      for (int64_t c = first; c < p.columns; c += step) sum += dot(dy_at(c), x_at(c), weight_at(c));
    const float correction = row_sum(sum) / static_cast<float>(p.columns) * rstd * rstd * rstd;
    for (int64_t c = first; c < p.columns; c += step) {
      const auto dy = dy_at(c), x = x_at(c);
      if (p.dx)
        device::store<Cache::streaming>(vector_at<T, N>(p.dx, r * p.columns + c),
                                        input_gradient(dy, x, weight_at(c), rstd, correction));
      if (partial) {
        float gradient[N] = {};
        add_weight_gradient(gradient, dy, x, rstd);
#pragma unroll
        for (int k = 0; k < N; ++k) partial[c + k] += gradient[k];
      }
    }
  }
  device::launch_dependents();
}

constexpr int kSumColumns = 32, kSumSlices = 32;

// dweight[c] = sum over the partial rows, in two fixed steps: kSumSlices interleaved sums, then those in order.
template <class W> __global__ void __launch_bounds__(kSumColumns* kSumSlices)
    sum_partials(RmsNormBwdParams p, int64_t partial_rows) {
  WARPSMITH_SHARED(float, sums, kSumColumns* kSumSlices);
  device::wait_for_previous_kernel();
  const int slice = threadIdx.x / kSumColumns;
  const int64_t column = int64_t{blockIdx.x} * kSumColumns + threadIdx.x % kSumColumns;
  const float* partials = static_cast<const float*>(p.partials);
  float sum = 0;
  if (column < p.columns)
#pragma unroll 4
    for (int64_t r = slice; r < partial_rows; r += kSumSlices) sum += partials[r * p.columns + column];
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (slice != 0 || column >= p.columns) return;
  float total = 0;
#pragma unroll
  for (int s = 0; s < kSumSlices; ++s) total += sums[s * kSumColumns + threadIdx.x];
  static_cast<W*>(p.dweight)[column] = device::from_float<W>(total);
}

}  // namespace warpsmith::rms_norm
