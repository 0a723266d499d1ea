#pragma once
#include <cstdint>

#include "device/convert.h"
#include "device/packed.h"
#include "device/vector.h"
#include "kernels/batch_norm/batch_norm.h"

// Where a thread works, and what all passes over activations share.
namespace warpsmith::batch_norm {

using device::Packed;
using device::Vector;

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

// Element k of a vector as it lies in memory.
template <class T, int N> __device__ __forceinline__ float element(const Packed<T, N>& v, int k) {
  if constexpr (sizeof(T) == 2 && N % 2 == 0)
    return k % 2 ? device::high_half<T>(v.at[k / 2]) : device::low_half<T>(v.at[k / 2]);
  else
    return device::to_float(v.at[k]);
}

// Where a vector lies. Counted in vectors: of an address in elements nvcc does not see that it is aligned, and takes a
// store of 16 bytes apart.
template <class T, int N> __device__ __forceinline__ const Packed<T, N>* vector_at(const void* base, int64_t i) {
  return static_cast<const Packed<T, N>*>(base) + i;
}
template <class T, int N> __device__ __forceinline__ Packed<T, N>* vector_at(void* base, int64_t i) {
  return static_cast<Packed<T, N>*>(base) + i;
}

// The vectors of a thread in U rows, `step` rows apart from `first` on; zeros behind the last row.
template <class T, int N, device::Cache cache = device::Cache::keep, int U>
__device__ __forceinline__ void load_rows(Packed<T, N> (&to)[U], const void* base, int64_t stride_vectors,
                                          int64_t vector, int64_t first, int step, int64_t rows) {
  const auto* from = vector_at<T, N>(base, first * stride_vectors + vector);
  int64_t left = rows - first;
#pragma unroll
  for (int u = 0; u < U; ++u, from += step * stride_vectors, left -= step) {  // no registers for U addresses
    to[u] = {};
    if (left > 0) to[u] = device::load<cache>(from);
  }
}

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

// One element of a dtype known at run time.
__device__ __forceinline__ float load_as(const void* base, Dtype dtype, int64_t i) {
  if (dtype == Dtype::float32) return device::load(static_cast<const float*>(base) + i);
  if (dtype == Dtype::float16) return device::to_float(device::load(static_cast<const float16*>(base) + i));
  return device::to_float(device::load(static_cast<const bfloat16*>(base) + i));
}
__device__ __forceinline__ void store_as(void* base, Dtype dtype, int64_t i, float value) {
  if (dtype == Dtype::float32)
    device::store(static_cast<float*>(base) + i, value);
  else if (dtype == Dtype::float16)
    device::store(static_cast<float16*>(base) + i, device::from_float<float16>(value));
  else
    device::store(static_cast<bfloat16*>(base) + i, device::from_float<bfloat16>(value));
}

// A power of two of rstd's size: (x - mean) * unit is about x_hat, rounded as x - mean is, and overflows only where
// that does. rstd / unit is in [0.5, 1], so that its product with a weight does not overflow either.
__device__ __forceinline__ float unit_of(float mean, float rstd) {
  const float power = 2.0f * __uint_as_float(__float_as_uint(rstd) & 0x7f800000u);
  const float unit = fminf(fmaxf(power, 0x1p-126f), 0x1p64f);
  return fabsf(mean) * unit < 0x1p120f ? unit : 1.0f;
}

// rstd / unit, by unit's exponent.
__device__ __forceinline__ float share_of(float rstd, float unit) {
  return rstd * __uint_as_float(0x7f000000u - __float_as_uint(unit));
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
