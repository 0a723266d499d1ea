#pragma once
#include <cstdint>

#include "device/vector.h"

// Copies what lies above the diagonal of square matrices below it. Reads half of the elements and writes half.
namespace warpsmith::linear {

constexpr int kMirrorSide = 32, kMirrorThreads = 256;

// T: an integer of the size of an element. Grid: tiles of all matrices, sides * sides each, row by row; those below the
// diagonal do nothing.
template <class T> __global__ void __launch_bounds__(kMirrorThreads) mirror(T* x, int64_t n, unsigned sides) {
  WARPSMITH_SHARED(T, tile, kMirrorSide * (kMirrorSide + 1));
  const unsigned line = blockIdx.x / sides, tile_row = line % sides, tile_column = blockIdx.x - line * sides;
  if (tile_row > tile_column) return;
  T* const matrix = x + int64_t{line / sides} * n * n;
  const int lane = threadIdx.x % kMirrorSide, first = threadIdx.x / kMirrorSide;
  const int64_t row = int64_t{tile_row} * kMirrorSide, column = int64_t{tile_column} * kMirrorSide;
  for (int i = first; i < kMirrorSide; i += kMirrorThreads / kMirrorSide)
    if (row + i < n && column + lane < n)
      tile[i * (kMirrorSide + 1) + lane] = device::load(matrix + (row + i) * n + column + lane);
  __syncthreads();
  for (int i = first; i < kMirrorSide; i += kMirrorThreads / kMirrorSide)
    if (column + i < n && row + lane < n && row + lane < column + i)
      device::store(matrix + (column + i) * n + row + lane, tile[lane * (kMirrorSide + 1) + i]);
}

}  // namespace warpsmith::linear
