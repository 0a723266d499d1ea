#pragma once
#include <algorithm>

#include "common/alignment.h"
#include "device/convert.h"
#include "device/launch.h"
#include "device/programmatic_launch.h"
#include "device/vector.h"

// The last step of column sums whose partial sums an earlier kernel has written.
namespace warpsmith::tiles {

constexpr int kSumColumns = 32, kMaxSumSlices = 32;

// sums[c], of type W: partials[r, c] added over all rows in P (float, double), in a fixed order, with `add` to what
// sums[c] is; and second[c], if it is not null, of the as many rows that follow. Each thread adds every row of its
// slice of a column, then pairs of slices are added.
template <class W, class P> __global__ void __launch_bounds__(kSumColumns* kMaxSumSlices)
    sum_partials(const P* partials, W* sums, W* second, int64_t rows, int64_t columns, bool add) {
  WARPSMITH_SHARED(P, scratch, kSumColumns * kMaxSumSlices);
  device::wait_for_previous_kernel();
  if (blockIdx.y) partials += rows * columns, sums = second;
  const int slice = threadIdx.x / kSumColumns, slices = blockDim.x / kSumColumns;
  const int64_t column = int64_t{blockIdx.x} * kSumColumns + threadIdx.x % kSumColumns;
  P sum = 0;
  constexpr int kTogether = 9;  // loads in flight: all of 264 rows
  for (int64_t first = slice; first < rows && column < columns; first += kTogether * slices) {
    P some[kTogether] = {};
#pragma unroll
    for (int k = 0; k < kTogether; ++k)
      if (first + k * slices < rows) some[k] = device::load(partials + (first + k * slices) * columns + column);
#pragma unroll
    for (const P one : some) sum += one;
  }
  scratch[threadIdx.x] = sum;
  __syncthreads();
  for (int half = kMaxSumSlices / 2; half > 0; half /= 2) {
    if (slice < half && slice + half < slices) scratch[threadIdx.x] += scratch[threadIdx.x + half * kSumColumns];
    __syncthreads();
  }
  if (slice == 0 && column < columns) {
    const float total = static_cast<float>(scratch[threadIdx.x]);
    device::store(sums + column,
                  device::from_float<W>(add ? device::to_float(device::load(sums + column)) + total : total));
  }
}

template <class W, class P = float> Status launch_sum_partials(const void* partials, void* sums, int64_t rows,
                                                               int64_t columns, void* stream, void* second = nullptr,
                                                               bool add = false) {
  if (columns == 0) return {};
  LaunchConfig config;
  config.grid.x = static_cast<unsigned>(ceil_div(columns, kSumColumns));
  config.grid.y = second ? 2 : 1;
  config.block.x = kSumColumns * static_cast<unsigned>(std::clamp<int64_t>(rows, 1, kMaxSumSlices));
  WARPSMITH_RETURN_IF_FAILED(allow_overlap(&config));
  return launch(sum_partials<W, P>, config, stream, static_cast<const P*>(partials), static_cast<W*>(sums),
                static_cast<W*>(second), rows, columns, add);
}

}  // namespace warpsmith::tiles
