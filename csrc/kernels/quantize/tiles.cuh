#pragma once
#include "device/reduce.h"
#include "kernels/quantize/cast.cuh"
#include "kernels/quantize/quantize.h"

// Squares of 128 by 128, one a block, that the block reads once and keeps in registers. What a block makes of its
// square:
//
//   amax  raises the largest magnitudes of rows, of columns or of all
//   cast  bytes, transposed bytes or both; by known scales, by scales that it makes of those magnitudes, or by scales
//         of the square: of its rows and columns, or one. Beside them the sums of its columns, and the largest
//         magnitude of all beside known scales
//
// Reads x once. Writes a byte a value and kind of bytes, 4 bytes a computed scale or partial sum; raises 4 bytes a row,
// a column or a square. Reads a scale, a magnitude or a factor of a row or column once, those of a tensor by every
// thread.
namespace warpsmith::quantize {

constexpr int kTile = static_cast<int>(kFp8Block);
template <class T> constexpr int kTileThreads = tile_threads(sizeof(T));

enum class TileWork { amax, cast };

struct Tiles {
  const void* x;
  uint8_t *data, *transposed;               // null: not wanted
  const float *column_factor, *row_factor;  // of the values of data, of transposed (quantize.h)
  float *row_scale, *column_scale;          // of the bytes; read if they are known, else written
  float *row_max, *column_max, *most;       // [rows], [columns], []; null: none. What the cast reads if from_max
  float* column_sums;                       // [tiles down, columns]; null: not wanted
  int64_t* counts;
  int64_t rows, columns, x_stride, factor_rows, across, down;
  bool of_square;  // cast: scales are those of the square
  bool from_max;   // cast: scales are made of largest magnitudes
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
    float four[4];  // chains: equal terms add up their rounding errors
#pragma unroll
    for (int w = 0; w < kWarps; ++w)
      four[w % 4] = w < 4 ? by_warp[w * kTile + thread] : op(four[w % 4], by_warp[w * kTile + thread]);
    of_column[thread] = op(op(four[0], four[1]), op(four[2], four[3]));
  }
}

// Of a multiprocessor. A pass that stores nothing has registers for a quarter more; at 1536 ptxas spills its factors.
constexpr int tile_threads_in_flight(TileWork work) { return work == TileWork::amax ? 1280 : 1024; }

template <class T, class F, TileWork kWork>
__global__ void __launch_bounds__(kTileThreads<T>, tile_threads_in_flight(kWork) / kTileThreads<T>) tiles(Tiles p) {
  constexpr int kThreads = kTileThreads<T>;
  constexpr int N = 16 / sizeof(T), G = kTile / N;                        // a row is read by G threads
  constexpr int L = kThreads / G, R = kTile / L, kWarps = kThreads / 32;  // each reads R rows
  WARPSMITH_SHARED(uint32_t, words, kWork == TileWork::amax ? 1 : kTile * kTile / 4);
  WARPSMITH_SHARED(float, by_warp, kWarps* kTile);
  // A row's or column's maximum or sum, then its scale; behind it the reciprocal.
  WARPSMITH_SHARED(float, of_row, 2 * kTile);
  WARPSMITH_SHARED(float, of_column, 2 * kTile);
  WARPSMITH_SHARED(float, scratch, kWarps);
  const int thread = static_cast<int>(threadIdx.x), group = thread % G, lane = thread / G;
  const int64_t down = blockIdx.x / static_cast<unsigned>(p.across), across = blockIdx.x - down * p.across;
  const int64_t first_row = down * kTile, first_column = across * kTile;
  const int64_t column = first_column + group * N;
  const int columns_here = p.columns - column < N ? static_cast<int>(p.columns - column) : N;
  const auto row_of = [&](int i) { return first_row + i / 4 * (4 * L) + lane * 4 + i % 4; };
  const auto row_factor = [&](int64_t row) {
    return p.row_factor && row < p.factor_rows ? device::load(p.row_factor + row) : 1.0f;
  };
  const auto column_factor = [&](int64_t c) {
    return p.column_factor && c < p.columns ? device::load(p.column_factor + c) : 1.0f;
  };

  Piece<T> held[R];
#pragma unroll
  for (int i = 0; i < R; ++i) {
    const int64_t row = row_of(i);
    held[i] =
        load_piece(static_cast<const T*>(p.x) + row * p.x_stride + column, row < p.rows ? columns_here : 0, p.whole);
  }

  const bool is_row = thread < kTile && first_row + thread < p.rows;  // has to do with one
  const bool is_column = thread < kTile && first_column + thread < p.columns;

  if (kWork == TileWork::cast && p.column_sums) {  // first: behind repair() no value is needed any more
    float sum[N] = {};
#pragma unroll
    for (int i = 0; i < R; ++i) {
      float value[N];
      device::unpack<T>(value, held[i]);
      device::forget(held[i]);
#pragma unroll
      for (int k = 0; k < N; ++k) sum[k] += value[k];
    }
    combine_columns<kThreads>(sum, device::Sum(), by_warp, of_column);
    if (is_column) device::store(p.column_sums + down * p.columns + first_column + thread, of_column[thread]);
    __syncthreads();
  }

  if (kWork == TileWork::cast && p.most && !p.from_max) {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < R; ++i) {
      float value[N];
      device::unpack<T>(value, held[i]);
      device::forget(held[i]);
#pragma unroll
      for (int k = 0; k < N; ++k) most = fmaxf(most, finite_magnitude(value[k]));
    }
    most = device::block_max<kThreads>(most, scratch);
    if (thread == 0) raise(p.most, most);
  }

  float one = 0.0f;  // the maximum of all, then its scale
  if (kWork == TileWork::amax || p.of_square) {
    float row_max[R], column_max[N];
    // Factors lie in shared memory: there are no registers for them.
    if (kWork == TileWork::amax) {
      if (thread < kTile) {
        of_row[kTile + thread] = row_factor(first_row + thread);
        of_column[kTile + thread] = column_factor(first_column + thread);
      }
      __syncthreads();
    }
#pragma unroll
    for (int k = 0; k < N; ++k) column_max[k] = 0.0f;
#pragma unroll
    for (int i = 0; i < R; ++i) {
      row_max[i] = 0.0f;
      float value[N];
      device::unpack<T>(value, held[i]);
      device::forget(held[i]);
      device::forget_memory();  // each row reads its factors anew
      const float down_columns = kWork == TileWork::amax ? of_row[kTile + row_of(i) - first_row] : 1.0f;
#pragma unroll
      for (int k = 0; k < N; ++k) {
        float in_row = finite_magnitude(value[k]), in_column = in_row;
        if (kWork == TileWork::amax) {  // fmaxf leaves NaN out; infinities are seen to below
          in_row = fabsf(value[k] * of_column[kTile + group * N + k]);
          in_column = fabsf(value[k] * down_columns);
        }
        row_max[i] = fmaxf(row_max[i], in_row);
        column_max[k] = fmaxf(column_max[k], in_column);
      }
      one = fmaxf(one, row_max[i]);
    }
    if constexpr (kWork == TileWork::amax) {
      float most = one;
#pragma unroll
      for (int k = 0; k < N; ++k) most = fmaxf(most, column_max[k]);
      if (most > FLT_MAX) {  // rare: what is finite raises the maxima singly
        one = 0.0f;
#pragma unroll
        for (int i = 0; i < R; ++i) row_max[i] = 0.0f;
#pragma unroll
        for (int k = 0; k < N; ++k) column_max[k] = 0.0f;
#pragma unroll 1
        for (int e = 0; e < R * N; ++e) {
          const int64_t row = row_of(e / N), c = column + e % N;
          if (row >= p.rows || c >= p.columns) continue;
          const float x = device::to_float(device::load(static_cast<const T*>(p.x) + row * p.x_stride + c));
          const float in_row = finite_magnitude(x * column_factor(c));
          if (p.most) raise(p.most, in_row);
          if (p.row_max) raise(p.row_max + row, in_row);
          if (p.column_max) raise(p.column_max + c, finite_magnitude(x * row_factor(row)));
        }
      }
    }
    if (kWork == TileWork::amax ? p.most != nullptr : p.square) {
      one = device::block_max<kThreads>(one, scratch);
    } else {
      if (kWork == TileWork::amax ? p.row_max != nullptr : p.data != nullptr) {
#pragma unroll
        for (int i = 0; i < R; ++i) {
          row_max[i] = device::group_max<G>(row_max[i]);
          if (group == 0) of_row[row_of(i) - first_row] = row_max[i];
        }
      }
      if (kWork == TileWork::amax ? p.column_max != nullptr : p.transposed != nullptr)
        combine_columns<kThreads>(column_max, device::Max(), by_warp, of_column);
    }
  }
  __syncthreads();

  if constexpr (kWork == TileWork::amax) {
    if (p.most && thread == 0) raise(p.most, one);
    if (p.row_max && is_row) raise(p.row_max + first_row + thread, of_row[thread]);
    if (p.column_max && is_column) raise(p.column_max + first_column + thread, of_column[thread]);
  }

  if constexpr (kWork != TileWork::amax) {
    if (p.square) {
      if (p.from_max) one = device::load(p.most);
      one = p.of_square || p.from_max ? scale_of_amax(one, kLimits<F>, p.power_of_two) : device::load(p.row_scale);
      if (p.of_square && thread == 0) {
        if (p.data) device::store(p.row_scale + blockIdx.x, one);
        if (p.transposed) device::store(p.column_scale + across * p.down + down, one);
      }
      if (p.from_max && blockIdx.x == 0 && thread == 0) device::store(p.row_scale, one);
    }
    // Threads of rows, then threads of columns: the scale of each, once.
    const auto prepare = [&](float* of, bool exists, const float* most, bool writes, float* scales, int64_t at) {
      if (thread >= kTile) return;
      float scale = one;
      if (!p.square && exists) {
        if (p.from_max) of[thread] = device::load(most + at);
        const bool known = !p.of_square && !p.from_max;
        scale = known ? device::load(scales + at) : scale_of_amax(of[thread], kLimits<F>, p.power_of_two);
        if (!known && writes) device::store(scales + at, scale);
      } else if (!p.square) {
        scale = 1.0f;
      }
      const Divisor d = divisor(scale);
      of[thread] = d.scale;
      of[kTile + thread] = d.reciprocal;
    };
    const int64_t my_row = first_row + thread, my_column = first_column + thread;
#pragma unroll 1
    for (int side = p.data ? 0 : 1; side < (p.transposed ? 2 : 1); ++side) {
      if (side == 0)
        prepare(of_row, is_row, p.row_max, p.of_square || across == 0, p.row_scale,
                p.of_square ? my_row * p.across + across : my_row);
      else
        prepare(of_column, is_column, p.column_max, p.of_square || down == 0, p.column_scale,
                p.of_square ? my_column * p.down + down : my_column);
    }
    __syncthreads();

    bool odd = false, odd_transposed = false;
    if (p.data) {
      float factor[N];
#pragma unroll
      for (int k = 0; k < N; ++k) factor[k] = column_factor(column + k);
#pragma unroll
      for (int i = 0; i < R; ++i) {
        const int64_t row = row_of(i);
        if (row >= p.rows || columns_here <= 0) continue;
        const int in_tile = static_cast<int>(row - first_row);
        float value[N];
        device::unpack<T>(value, held[i]);
        device::forget(held[i]);
#pragma unroll
        for (int k = 0; k < N; ++k) value[k] *= factor[k];
        Vector<uint32_t, N / 4> bytes;
        odd |= cast<F>(value, {of_row[in_tile], of_row[kTile + in_tile]}, bytes);
        store_bytes(p.data + row * p.columns + column, bytes, columns_here, p.whole_data);
      }
    }
    if (p.transposed) {
#pragma unroll
      for (int i = 0; i < R; i += 4) {
        const float factor[4] = {row_factor(row_of(i)), row_factor(row_of(i + 1)), row_factor(row_of(i + 2)),
                                 row_factor(row_of(i + 3))};
#pragma unroll
        for (int k = 0; k < N; ++k) {
          const float four[4] = {element<T>(held[i], k) * factor[0], element<T>(held[i + 1], k) * factor[1],
                                 element<T>(held[i + 2], k) * factor[2], element<T>(held[i + 3], k) * factor[3]};
          Vector<uint32_t, 1> bytes;
          const int c = group * N + k;
          odd_transposed |= cast<F>(four, {of_column[c], of_column[kTile + c]}, bytes);
          words[word_at<N>(c, i / 4 * L + lane)] = bytes.at[0];
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
    // Once more, each value alone, behind the stores of all threads. One loop without branches: with nested ones the
    // call of the division's rare cases takes a stack. An element counts once.
    __syncthreads();
    if (__any_sync(0xffffffffu, odd || odd_transposed)) {
#pragma unroll 1
      for (int e = 0; e < R * N; ++e) {
        const int64_t row = row_of(e / N), c = column + e % N;
        const bool exists = row < p.rows && c < p.columns;
        const float x =
            exists ? device::to_float(device::load(static_cast<const T*>(p.x) + row * p.x_stride + c)) : 0.0f;
        Counts in_row, in_column;
        const uint8_t of_data = repair<F>(x * column_factor(c), of_row[row - first_row], in_row);
        const uint8_t turned = repair<F>(x * row_factor(row), of_column[c - first_column], in_column);
        if (exists && odd) device::store(p.data + row * p.columns + c, of_data);
        if (exists && odd_transposed) device::store(p.transposed + c * p.rows + row, turned);
        if (p.data ? odd : odd_transposed) counts.add(p.data ? in_row : in_column);
      }
    }
    add_counts(counts, p.counts);
  }
}

}  // namespace warpsmith::quantize
