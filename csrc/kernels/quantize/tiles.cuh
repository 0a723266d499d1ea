#pragma once
#include "device/reduce.h"
#include "kernels/quantize/cast.cuh"
#include "kernels/quantize/quantize.h"

// Squares of 128 by 128, one a block, that the block reads once and keeps in registers. What a block makes of its
// square:
//
//   amax    the largest magnitudes of its rows, of its columns or of all, as partial results
//   cast    bytes, transposed bytes or both; by scales that are known, or by scales of the square itself: of its rows
//   and
//           of its columns, or one. Beside them the sums of its columns
//
// Reads x once. Writes a byte a value and kind of bytes, 4 bytes a
// computed scale or partial result. The threads of a row read its given scale, those of a column likewise.
namespace warpsmith::quantize {

constexpr int kTile = static_cast<int>(kFp8Block);
template <class T> constexpr int kTileThreads = tile_threads(sizeof(T));

enum class TileWork { amax, cast };

struct Tiles {
  const void* x;
  uint8_t *data, *transposed;                        // null: not wanted
  float *row_scale, *column_scale;                   // of the bytes; written if of_square, else read
  float *row_partials, *column_partials, *partials;  // of amax: [tiles across, rows], [tiles down, columns], [tiles]
  float* column_sums;                                // [tiles down, columns]; null: not wanted
  int64_t* counts;
  int64_t rows, columns, x_stride, across, down;
  bool of_square;  // cast: scales are those of the square, else known
  bool square;     // cast: one scale for all of it
  bool power_of_two;
  bool whole, whole_data, whole_transposed;  // accesses of vectors are possible: to x, data, transposed
};

// Where the word of 4 rows of a column lies, so that neither writing 4 N words nor reading 16 bytes has bank conflicts.
template <int N> __device__ __forceinline__ int word_at(int column, int quad) {
  return column * (kTile / 4) + (quad + column / N * (N / 4) + (column & 3)) % (kTile / 4);
}

// Combines N values of each thread over the threads of the same columns: within warps, then over all, in a fixed order.
// One barrier inside. of_column has the results after the next one.
template <int kThreads, int N, class Op>
__device__ __forceinline__ void combine_columns(float (&mine)[N], Op op, float* by_warp, float* of_column) {
  constexpr int G = kTile / N, kWarps = kThreads / 32;
  const int thread = static_cast<int>(threadIdx.x), first = thread % G * N;
#pragma unroll
  for (int k = 0; k < N; ++k) {
#pragma unroll
    for (int distance = G; distance < 32; distance *= 2)
      mine[k] = op(mine[k], __shfl_xor_sync(0xffffffffu, mine[k], distance));
  }
  if (thread % 32 < G) {
#pragma unroll
    for (int k = 0; k < N; ++k) by_warp[thread / 32 * kTile + first + k] = mine[k];
  }
  __syncthreads();
  if (thread < kTile) {
    float all = by_warp[thread];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) all = op(all, by_warp[w * kTile + thread]);
    of_column[thread] = all;
  }
}

template <class T, class F, TileWork kWork> __global__ void __launch_bounds__(kTileThreads<T>, 512 / kTileThreads<T>)
    tiles(Tiles p) {
  constexpr int kThreads = kTileThreads<T>;
  constexpr int N = 16 / sizeof(T), G = kTile / N;                        // a row is read by G threads
  constexpr int L = kThreads / G, R = kTile / L, kWarps = kThreads / 32;  // each reads R rows
  WARPSMITH_SHARED(uint32_t, words, kWork == TileWork::amax ? 1 : kTile * kTile / 4);
  WARPSMITH_SHARED(float, by_warp, kWarps* kTile);
  WARPSMITH_SHARED(float, of_column, kTile);
  WARPSMITH_SHARED(float, scratch, kWarps);
  const int thread = static_cast<int>(threadIdx.x), group = thread % G, lane = thread / G;
  const int64_t down = blockIdx.x / static_cast<unsigned>(p.across), across = blockIdx.x - down * p.across;
  const int64_t first_row = down * kTile, first_column = across * kTile;
  const int64_t column = first_column + group * N;
  const int columns_here = p.columns - column < N ? static_cast<int>(p.columns - column) : N;
  const auto row_of = [&](int i) { return first_row + i / 4 * (4 * L) + lane * 4 + i % 4; };

  Piece<T> held[R];
#pragma unroll
  for (int i = 0; i < R; ++i) {
    const int64_t row = row_of(i);
    held[i] =
        load_piece(static_cast<const T*>(p.x) + row * p.x_stride + column, row < p.rows ? columns_here : 0, p.whole);
  }

  const auto is_column = [&] { return thread < kTile && first_column + thread < p.columns; };

  float row_max[R];
  if (kWork == TileWork::amax || p.of_square) {
    float column_max[N] = {}, largest = 0.0f;
#pragma unroll
    for (int i = 0; i < R; ++i) {
      row_max[i] = 0.0f;
      float value[N];
      device::unpack<T>(value, held[i]);
      device::forget(held[i]);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float m = finite_magnitude(value[k]);
        row_max[i] = fmaxf(row_max[i], m);
        column_max[k] = fmaxf(column_max[k], m);
      }
      largest = fmaxf(largest, row_max[i]);
    }
    if (kWork == TileWork::amax ? p.partials != nullptr : p.square) {
      largest = device::block_max<kThreads>(largest, scratch);
#pragma unroll
      for (int i = 0; i < R; ++i) row_max[i] = largest;
      if constexpr (kWork == TileWork::amax) {
        if (thread == 0) device::store(p.partials + blockIdx.x, largest);
      } else {
        if (thread < kTile) of_column[thread] = largest;
      }
    } else {
      if (kWork == TileWork::amax ? p.row_partials != nullptr : p.data != nullptr) {
#pragma unroll
        for (int i = 0; i < R; ++i) {
          row_max[i] = device::group_max<G>(row_max[i]);
          if constexpr (kWork == TileWork::amax) {
            if (group == 0 && row_of(i) < p.rows)
              device::store(p.row_partials + across * p.rows + row_of(i), row_max[i]);
          }
        }
      }
      if (kWork == TileWork::amax ? p.column_partials != nullptr : p.transposed != nullptr) {
        combine_columns<kThreads>(column_max, device::Max(), by_warp, of_column);
        if constexpr (kWork == TileWork::amax) {
          if (is_column())
            device::store(p.column_partials + down * p.columns + first_column + thread, of_column[thread]);
        }
      }
    }
  }

  if constexpr (kWork != TileWork::amax) {
    Divisor by_column[N];
    float one = 1.0f;
    if (p.of_square) {
      __syncthreads();
      if (p.square) {
        one = scale_of_amax(row_max[0], kLimits<F>, p.power_of_two);
        if (thread == 0 && p.data) device::store(p.row_scale + blockIdx.x, one);
        if (thread == 0 && p.transposed) device::store(p.column_scale + across * p.down + down, one);
      } else if (p.transposed && is_column()) {
        device::store(p.column_scale + (first_column + thread) * p.down + down,
                      scale_of_amax(of_column[thread], kLimits<F>, p.power_of_two));
      }
    } else if (p.square) {
      one = device::load(p.row_scale);
    }
    if (p.transposed) {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        float scale = one;
        if (!p.square && p.of_square)
          scale = scale_of_amax(of_column[group * N + k], kLimits<F>, p.power_of_two);
        else if (!p.square && k < columns_here)
          scale = device::load(p.column_scale + column + k);
        by_column[k] = divisor(scale);
      }
    }

    bool odd = false, odd_transposed = false;
    if (p.data) {
#pragma unroll
      for (int i = 0; i < R; ++i) {
        const int64_t row = row_of(i);
        if (row >= p.rows || columns_here <= 0) continue;
        float scale = one, value[N];
        if (!p.square && p.of_square) {
          scale = scale_of_amax(row_max[i], kLimits<F>, p.power_of_two);
          if (group == 0) device::store(p.row_scale + row * p.across + across, scale);
        } else if (!p.square) {
          scale = device::load(p.row_scale + row);
        }
        device::unpack<T>(value, held[i]);
        device::forget(held[i]);
        Vector<uint32_t, N / 4> bytes;
        odd |= cast<F>(value, divisor(scale), bytes);
        store_bytes(p.data + row * p.columns + column, bytes, columns_here, p.whole_data);
      }
    }
    if (p.transposed) {
#pragma unroll
      for (int i = 0; i < R; i += 4) {
        float rows[4][N];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          device::unpack<T>(rows[j], held[i + j]);
          device::forget(held[i + j]);
        }
#pragma unroll
        for (int k = 0; k < N; ++k) {
          const float four[4] = {rows[0][k], rows[1][k], rows[2][k], rows[3][k]};
          Vector<uint32_t, 1> bytes;
          odd_transposed |= cast<F>(four, by_column[k], bytes);
          words[word_at<N>(group * N + k, i / 4 * L + lane)] = bytes.at[0];
        }
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kTile * kTile / 16 / kThreads; ++i) {
        const int sixteen = i * kThreads + thread, c = sixteen / (kTile / 16), q = sixteen % (kTile / 16);
        const int64_t row = first_row + q * 16;
        if (first_column + c >= p.columns || row >= p.rows) continue;
        Vector<uint32_t, 4> bytes;
#pragma unroll
        for (int j = 0; j < 4; ++j) bytes.at[j] = words[word_at<N>(c, q * 4 + j)];
        store_bytes(p.transposed + (first_column + c) * p.rows + row, bytes,
                    p.rows - row < 16 ? static_cast<int>(p.rows - row) : 16, p.whole_transposed);
      }
    }
    Counts counts;
    // Once more, each value alone, behind the stores of all threads. An element counts once.
    if (__syncthreads_or(odd || odd_transposed) && (odd || odd_transposed)) {
      Counts of_transposed;
#pragma unroll 1
      for (int i = 0; i < R; ++i) {
        const int64_t row = row_of(i);
        if (row >= p.rows) break;
#pragma unroll 1
        for (int64_t c = column; c < column + columns_here; ++c) {
          const float x = device::to_float(device::load(static_cast<const T*>(p.x) + row * p.x_stride + c));
          if (odd) {
            const float scale =
                p.square ? one : device::load(p.row_scale + (p.of_square ? row * p.across + across : row));
            device::store(p.data + row * p.columns + c, repair<F>(x, scale, counts));
          }
          if (odd_transposed) {
            const float scale = p.square ? one : device::load(p.column_scale + (p.of_square ? c * p.down + down : c));
            device::store(p.transposed + c * p.rows + row, repair<F>(x, scale, of_transposed));
          }
        }
      }
      if (!p.data) counts = of_transposed;
    }
    if (p.column_sums) {
      float sum[N] = {};
#pragma unroll
      for (int i = 0; i < R; ++i) {
        float value[N];
        device::unpack<T>(value, held[i]);
#pragma unroll
        for (int k = 0; k < N; ++k) sum[k] += value[k];
      }
      __syncthreads();  // of_column has been read
      combine_columns<kThreads>(sum, device::Sum(), by_warp, of_column);
      if (is_column()) device::store(p.column_sums + down * p.columns + first_column + thread, of_column[thread]);
    }
    add_counts(counts, p.counts);
  }
}

}  // namespace warpsmith::quantize
