#pragma once
#include "kernels/batch_norm/batch_norm.h"
#include "tiles/row_ring.cuh"

// Where a thread works, and what all passes over activations share.
namespace warpsmith::batch_norm {

using namespace tiles;

constexpr int kThreads = kBatchNormThreads;

// The turns of rows of a pass (BatchNormConfig). The last pass over a tensor goes from its end to its start: there lies
// what the L2 cache still holds of the pass before.
struct Turns {
  int64_t rows, columns, vectors, turns, slices, rows_a_turn, tiles;  // vectors: of a row
  int lanes;
};

// A thread's vector of channels, and its row in a turn.
template <int N> struct Place {
  int64_t tile, slice, vector, column;
  int lane, row, rows_together;
  bool here;

  __device__ __forceinline__ explicit Place(const Turns& t)
      : tile(blockIdx.x % static_cast<unsigned>(t.tiles)),
        slice(blockIdx.x / static_cast<unsigned>(t.tiles)),
        vector(0),
        column(0),
        lane(static_cast<int>(threadIdx.x) % t.lanes),
        row(static_cast<int>(threadIdx.x) / t.lanes),
        rows_together(kThreads / t.lanes),
        here(false) {
    vector = tile * t.lanes + lane;
    column = vector * N;
    here = column < t.columns;
  }
};

constexpr int kRowsAStage = BatchNormTogether::sums;
static_assert(BatchNormTogether::normalize == kRowsAStage && BatchNormTogether::gradients == kRowsAStage);
static_assert(kThreads == kRingThreads);
template <class T, int N, int kTensors> using Ring = RowRing<T, N, kTensors, kRowsAStage>;

// Sums of the threads of a block over each of its channels, of two values a thread and channel: add(place, sum, square)
// adds those at `place` in the order of threads. Every thread takes N rows of a channel, then one thread all of these.
// Returns whether this thread has a channel, the `column`-th. In double: a rounded sum of a whole block would show in
// the mean, and its error once for each row in the gradient of the weight. Two barriers; `scratch` has 2 doubles a
// thread.
template <int N, class Add> __device__ __forceinline__ bool sums_of_block(const Turns& t, int64_t tile, double* scratch,
                                                                          Add&& add, int64_t& column, double& first,
                                                                          double& second) {
  const int width = t.lanes * N, thread = static_cast<int>(threadIdx.x), item = thread % width;
  __syncthreads();
  double sum = 0, other = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) add((thread / width * N + i) * width + item, sum, other);
  scratch[thread] = sum;
  scratch[kThreads + thread] = other;
  __syncthreads();
  column = tile * width + item;
  if (thread >= width || column >= t.columns) return false;
  first = second = 0;
#pragma unroll 4
  for (int part = thread; part < kThreads; part += width) {
    first += scratch[part];
    second += scratch[kThreads + part];
  }
  return true;
}

// v = (x - mean) * rstd * weight + bias: the same roundings in the forward and where a backward computes it again.
struct Affine {
  const void *weight, *bias;  // [columns], dtype, or null
  const float *mean, *rstd;   // [columns]
  Dtype dtype;
};
template <int N> struct Channels {
  float unit[N], offset[N], scale[N], bias[N];  // offset: of -mean; scale: rstd / unit * weight

  __device__ __forceinline__ Channels(const Affine& a, int64_t column, bool with_bias) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float mean = device::load(a.mean + column + k), rstd = device::load(a.rstd + column + k);
      unit[k] = unit_of(mean, rstd);
      offset[k] = -mean * unit[k];
      scale[k] = share_of(rstd, unit[k]);
      if (a.weight) scale[k] *= load_as(a.weight, a.dtype, column + k);
      bias[k] = with_bias && a.bias ? load_as(a.bias, a.dtype, column + k) : 0.0f;
    }
  }
  __device__ __forceinline__ float centered(float x, int k) const { return fmaf(x, unit[k], offset[k]); }
  __device__ __forceinline__ float value(float x, int k) const { return fmaf(centered(x, k), scale[k], bias[k]); }
};

// Whether ReLU keeps v. It keeps NaN.
__device__ __forceinline__ bool keeps(float v) { return !(v <= 0.0f); }

}  // namespace warpsmith::batch_norm
