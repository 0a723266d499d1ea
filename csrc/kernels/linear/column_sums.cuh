#pragma once
#include <cstdint>

#include "device/convert.h"
#include "device/vector.h"
#include "kernels/linear/linear.h"

// Column sums in float, in two stages of fixed order: each block adds one slice of the rows for a tile of columns, then
// the slices are added. Reads sizeof(T) bytes an element. Writes and reads 4 bytes of partial sums a column and slice;
// a single slice needs none. Writes 4 bytes a column, and with `add` reads them first.
namespace warpsmith::linear {

using device::Vector;

constexpr int kColumnThreads = 256;
constexpr int kRowsAStep = 8;  // rows whose loads are in flight together

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

// N columns a thread: 16 bytes, or 1 where rows do not lie on 16 bytes. Grid: (column tiles, slices).
template <class T, int N> __global__ void __launch_bounds__(kColumnThreads)
    sum_slices(ColumnSumsParams p, int64_t rows) {
  const int64_t column = (int64_t{blockIdx.x} * kColumnThreads + threadIdx.x) * N;
  if (column >= p.columns) return;
  const int64_t first = int64_t{blockIdx.y} * rows, last = first + rows < p.rows ? first + rows : p.rows;
  const int here = p.columns - column < N ? static_cast<int>(p.columns - column) : N;
  const T* x = static_cast<const T*>(p.x) + column;
  float sum[N] = {};
  int64_t r = first;
  if (here == N) {
    for (; r + kRowsAStep <= last; r += kRowsAStep) {
      Vector<T, N> row[kRowsAStep];
#pragma unroll
      for (int u = 0; u < kRowsAStep; ++u) row[u] = device::load_vector<N>(x + (r + u) * p.x_stride);
#pragma unroll
      for (int k = 0; k < N; ++k) sum[k] += sum_of_step(row, k);
    }
    for (; r < last; ++r) {
      const Vector<T, N> row = device::load_vector<N>(x + r * p.x_stride);
#pragma unroll
      for (int k = 0; k < N; ++k) sum[k] += device::to_float(row.at[k]);
    }
  } else {
    for (; r < last; ++r)
#pragma unroll
      for (int k = 0; k < N; ++k)
        if (k < here) sum[k] += device::to_float(device::load(x + r * p.x_stride + k));
  }
  const bool direct = gridDim.y == 1;
  float* to = static_cast<float*>(direct ? p.sums : p.partials) + (direct ? 0 : blockIdx.y * p.columns) + column;
#pragma unroll
  for (int k = 0; k < N; ++k)
    if (k < here) device::store(to + k, direct && p.add ? device::load(to + k) + sum[k] : sum[k]);
}

__global__ void __launch_bounds__(kColumnThreads) add_slices(ColumnSumsParams p, int64_t slices) {
  const int64_t column = int64_t{blockIdx.x} * kColumnThreads + threadIdx.x;
  if (column >= p.columns) return;
  const float* partials = static_cast<const float*>(p.partials) + column;
  float* sums = static_cast<float*>(p.sums) + column;
  float total = 0;
  for (int64_t s = 0; s < slices; ++s) total += device::load(partials + s * p.columns);
  device::store(sums, p.add ? device::load(sums) + total : total);
}

}  // namespace warpsmith::linear
