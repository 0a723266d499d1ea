#pragma once
#include "device/programmatic_launch.h"
#include "kernels/norm/row.cuh"

// The second stage of the parameter gradients: sums the partial rows that a backward wrote.
namespace warpsmith::norm {

struct SumPartialsParams {
  const float* partials[2];  // [rows, columns]; grid.y of them
  void* sums[2];             // [columns], dtype
  int64_t rows, columns;
  Dtype dtype;
};

constexpr int kMaxSumTileVectors = 16, kMaxSumThreads = 512;

// Sums columns over the partial rows in a fixed order: first interleaved rows in each thread, with all its loads in
// flight, then the warp's threads that hold the same columns, then the warps. A block takes `tile_vectors` (a power of
// two up to 16) vectors of N columns. Launch bounds limit the registers so that two blocks fit on a multiprocessor.
template <int N> __global__ void __launch_bounds__(kMaxSumThreads, 2)
    sum_partials(SumPartialsParams p, int tile_vectors) {
  using Part = Vector<float, N>;
  WARPSMITH_SHARED(Part, sums, kMaxSumThreads / 32 * kMaxSumTileVectors);
  device::wait_for_previous_kernel();
  const int in_tile = static_cast<int>(threadIdx.x) % tile_vectors, tile = tile_vectors * N;
  const int slices = static_cast<int>(blockDim.x) / tile_vectors, slice = static_cast<int>(threadIdx.x) / tile_vectors;
  const int64_t column = int64_t{blockIdx.x} * tile + in_tile * N;
  Part sum = {};
  if (column < p.columns) {
    const float* next = (blockIdx.y == 0 ? p.partials[0] : p.partials[1]) + slice * p.columns + column;
    const int64_t step = slices * p.columns;
    constexpr int kTogether = 5;
    for (int64_t left = p.rows - slice; left > 0; left -= slices * kTogether) {
      Part part[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        part[i] = {};
        if (i * slices < left) part[i] = device::load(reinterpret_cast<const Part*>(next));
        next += step;
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
#pragma unroll
        for (int k = 0; k < N; ++k) sum.at[k] += part[i].at[k];
      }
    }
  }
  for (int distance = tile_vectors; distance < 32; distance *= 2) {
#pragma unroll
    for (int k = 0; k < N; ++k) sum.at[k] += __shfl_xor_sync(0xffffffffu, sum.at[k], distance, 32);
  }
  const int warp = static_cast<int>(threadIdx.x / 32), warps = static_cast<int>(blockDim.x / 32);
  if (static_cast<int>(threadIdx.x % 32) < tile_vectors) sums[warp * tile_vectors + in_tile] = sum;
  __syncthreads();
  const int64_t out = int64_t{blockIdx.x} * tile + threadIdx.x;
  if (static_cast<int>(threadIdx.x) >= tile || out >= p.columns) return;
  const float* of_column = reinterpret_cast<const float*>(sums) + threadIdx.x;
  float total = 0;
#pragma unroll 8
  for (int w = 0; w < warps; ++w) total += of_column[w * tile];
  Vector<float, 1> one{{total}};
  store_as(blockIdx.y == 0 ? p.sums[0] : p.sums[1], out, one, p.dtype);
}

}  // namespace warpsmith::norm
