#pragma once
#include <cstdint>

#include "device/convert.h"
#include "device/platform.h"
#include "device/programmatic_launch.h"
#include "device/vector.h"
#include "kernels/linear/linear.h"

// The first step of column sums in float: partials[slice, c] of a slice of the rows, which `tiles/sum_partials.cuh`
// adds in a fixed order. Reads sizeof(T) bytes an element.
namespace warpsmith::linear {

using device::Vector;

constexpr int kColumnLanes = 32, kColumnWarps = 8;  // a warp reads rows of 512 bytes
constexpr int kRowsAStep = 8;                       // rows whose loads are in flight together

// Adds pairs, then pairs of pairs. The rounding errors of one long chain of additions would grow with its length.
template <class T, int N> __device__ __forceinline__ float sum_of_step(const Vector<T, N> (&row)[kRowsAStep], int k) {
  float part[kRowsAStep];
#pragma unroll
  for (int u = 0; u < kRowsAStep; ++u) part[u] = device::to_float(row[u].at[k]);
#pragma unroll
  for (int width = kRowsAStep / 2; width > 0; width /= 2)
#pragma unroll
    for (int u = 0; u < width; ++u) part[u] += part[u + width];
  return part[0];
}

// N columns a thread: 16 bytes, or 1 where rows do not lie on 16 bytes. Warps take steps of the slice in turn. Grid:
// (column tiles, slices); rows: of a slice, a multiple of kRowsAStep.
template <class T, int N> __global__ void __launch_bounds__(kColumnLanes* kColumnWarps)
    sum_slices(ColumnSumsParams p, int64_t rows) {
  WARPSMITH_SHARED(float, scratch, kColumnWarps * kColumnLanes * N);
  device::launch_dependents();
  const int lane = threadIdx.x % kColumnLanes, warp = threadIdx.x / kColumnLanes;
  const int64_t column = (int64_t{blockIdx.x} * kColumnLanes + lane) * N;
  const int64_t first = int64_t{blockIdx.y} * rows, last = first + rows < p.rows ? first + rows : p.rows;
  const int here = p.columns - column >= N ? N : p.columns > column ? static_cast<int>(p.columns - column) : 0;
  const T* x = static_cast<const T*>(p.x) + column;
  float sum[N] = {};
  for (int64_t r = first + warp * kRowsAStep; r < last; r += kColumnWarps * kRowsAStep) {
    if (here == N && r + kRowsAStep <= last) {
      Vector<T, N> row[kRowsAStep];
#pragma unroll
      for (int u = 0; u < kRowsAStep; ++u) row[u] = device::load_vector<N>(x + (r + u) * p.x_stride);
#pragma unroll
      for (int k = 0; k < N; ++k) sum[k] += sum_of_step(row, k);
    } else {
      for (int64_t one = r; one < last && one < r + kRowsAStep; ++one)
#pragma unroll
        for (int k = 0; k < N; ++k)
          if (k < here) sum[k] += device::to_float(device::load(x + one * p.x_stride + k));
    }
  }
#pragma unroll
  for (int k = 0; k < N; ++k) scratch[(warp * N + k) * kColumnLanes + lane] = sum[k];
  __syncthreads();
  float* to = static_cast<float*>(p.partials) + blockIdx.y * p.columns + int64_t{blockIdx.x} * kColumnLanes * N;
  for (int c = threadIdx.x; c < kColumnLanes * N; c += kColumnLanes * kColumnWarps) {
    if (int64_t{blockIdx.x} * kColumnLanes * N + c >= p.columns) break;
    const float* of = scratch + c % N * kColumnLanes + c / N;
    float part[kColumnWarps];
#pragma unroll
    for (int w = 0; w < kColumnWarps; ++w) part[w] = of[w * N * kColumnLanes];
#pragma unroll
    for (int width = kColumnWarps / 2; width > 0; width /= 2)
#pragma unroll
      for (int w = 0; w < width; ++w) part[w] += part[w + width];
    device::store(to + c, part[0]);
  }
}

}  // namespace warpsmith::linear
