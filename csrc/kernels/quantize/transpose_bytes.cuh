#pragma once
#include "kernels/quantize/tiles.cuh"

// transposed[c, r] = data[r, c] for bytes. Squares of 128 by 128, one a block: a thread takes 16 columns of 4 rows,
// turns 4 by 4 bytes in registers, and the words pass through shared memory as those of a cast do. Reads and writes
// each byte once.
namespace warpsmith::quantize {

constexpr int kTransposeThreads = 256;

__global__ void __launch_bounds__(kTransposeThreads)
    transpose_bytes(TransposeBytesParams p, bool whole, bool whole_to) {
  constexpr int N = 16, G = kTile / N, kHalf = kTile * kTurnRows / 4;
  WARPSMITH_SHARED(Pair, pairs, kHalf);
  uint32_t* const words = pairs->at;
  const unsigned group = threadIdx.x % G, quad = threadIdx.x / G;
  const int64_t across = ceil_div(p.columns, kTile), down = blockIdx.x / static_cast<unsigned>(across);
  const int64_t first_row = down * kTile, first_column = (blockIdx.x - down * across) * kTile;
  const int64_t column = first_column + group * N;
  const int columns_here = p.columns - column < N ? static_cast<int>(p.columns - column) : N;
  Vector<uint32_t, N / 4> row[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t r = first_row + quad * 4 + i;
    const int here = r < p.rows ? columns_here : 0;
    const uint8_t* from = static_cast<const uint8_t*>(p.data) + r * p.columns + column;
    row[i] = {};
    if (whole && here == N) {
      row[i] = device::load(reinterpret_cast<const Vector<uint32_t, N / 4>*>(from));
    } else {
#pragma unroll
      for (int k = 0; k < N; ++k)
        if (k < here) row[i].at[k / 4] |= uint32_t{device::load(from + k)} << (8 * (k % 4));
    }
  }
#pragma unroll
  for (int w = 0; w < N / 4; ++w) {
    const uint32_t low = __byte_perm(row[0].at[w], row[1].at[w], 0x5140),
                   low2 = __byte_perm(row[2].at[w], row[3].at[w], 0x5140);
    const uint32_t high = __byte_perm(row[0].at[w], row[1].at[w], 0x7362),
                   high2 = __byte_perm(row[2].at[w], row[3].at[w], 0x7362);
    const uint32_t turned[4] = {__byte_perm(low, low2, 0x5410), __byte_perm(low, low2, 0x7632),
                                __byte_perm(high, high2, 0x5410), __byte_perm(high, high2, 0x7632)};
#pragma unroll
    for (int k = 0; k < 4; ++k) words[quad / 16 * kHalf + word_at(group * N + w * 4 + k, quad % 16)] = turned[k];
  }
  __syncthreads();
#pragma unroll
  for (int half = 0; half < 2; ++half)
    store_turned<kTransposeThreads>(static_cast<uint8_t*>(p.transposed), words + half * kHalf,
                                    first_row + half * kTurnRows, p.rows_to, first_column, p.columns, whole_to);
}

}  // namespace warpsmith::quantize
