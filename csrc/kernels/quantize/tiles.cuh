#pragma once
#include "device/async_copy.h"
#include "device/programmatic_launch.h"
#include "device/reduce.h"
#include "kernels/quantize/cast.cuh"
#include "kernels/quantize/quantize.h"

// Squares of 128 by 128, one a block, that lie in shared memory. A thread takes 16 bytes of four rows a turn; the block
// takes half a square. The loop over turns is not unrolled: the second turn, and the multiprocessor's other blocks,
// find its code in the instruction cache. What a block makes of its square:
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
constexpr int64_t kMostDown = 65535;  // of a grid's y and z
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

constexpr int kTurnRows = kTile / 2;  // of half a square

// Where the word of 4 rows of a column lies in half a square that is turned. A line of all banks has two columns, 64
// apart; 8 columns of a vector lie in 8 lines. No bank conflicts: neither where a warp writes words of 16-bit values
// nor in store_turned; words of float32 are written two to a bank.
using Pair = Vector<uint32_t, 2>;
constexpr unsigned kTurnLine = 32;
__device__ __forceinline__ unsigned word_at(unsigned column, unsigned quad) {
  return column % (kTile / 2) * kTurnLine + column / (kTile / 2) * 16 + (quad + column / 8 * 2) % 16;
}

// Stores half a square that is turned, whose rows, from `row` on, are those of `to`, [columns, rows]. `whole`: one
// access may store 16 rows.
template <int kThreads> __device__ __forceinline__ void store_turned(uint8_t* to, const uint32_t* words, int64_t row,
                                                                     int64_t rows, int64_t column, int64_t columns,
                                                                     bool whole) {
  const unsigned q = threadIdx.x % 4, at = threadIdx.x / 4;
  row += q * 16;
  const int here = rows - row < 16 ? static_cast<int>(rows - row) : 16;
  if (here <= 0) return;
#pragma unroll
  for (int i = 0; i < kTile * 4 / kThreads; ++i) {
    // 16 threads read words of 2 columns of each half, 8 apart.
    const unsigned four = i * (kThreads / 16) + at / 4,
                   c = (at & 2) * (kTile / 4) + (four % 4 * 2 + (at & 1)) * 8 + four / 4;
    if (column + c >= columns) continue;
    uint8_t* const sixteen = to + (column + c) * rows + row;
    if (whole && here == 16) {
      Vector<uint32_t, 4> bytes;
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const Pair two = device::load_vector<2>(words + word_at(c, q * 4 + j));
        bytes.at[j] = two.at[0];
        bytes.at[j + 1] = two.at[1];
      }
      device::store(reinterpret_cast<Vector<uint32_t, 4>*>(sixteen), bytes);
    } else {
#pragma unroll 1
      for (int k = 0; k < here; ++k)
        device::store(sixteen + k, static_cast<uint8_t>(words[word_at(c, q * 4 + k / 4)] >> (8 * (k % 4))));
    }
  }
}

// Combines N values of each thread over the threads of the same columns: within warps, then over all, in a fixed order.
// One barrier inside. of_column has the results after the next one.
template <int kThreads, int N, class Op>
__device__ __forceinline__ void combine_columns(float (&mine)[N], Op op, float* by_warp, float* of_column) {
  constexpr int G = kTile / N, kWarps = kThreads / 32;
  const unsigned thread = threadIdx.x, first = thread % G * N;
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

// What the threads of a block know of their square.
template <class T> struct Square {
  static constexpr int kThreads = kTileThreads<T>, N = 16 / sizeof(T), G = kTile / N;  // a row is read by G threads
  static constexpr int L = kThreads / G;
  static_assert(4 * L == kTurnRows);
  const Tiles& p;
  Piece<T>* square;  // [kTile][G]
  int64_t down, across, first_row, first_column, column;
  int rows_here, columns_here;  // of the square; of a thread's N
  unsigned thread, group, lane;

  __device__ __forceinline__ Square(const Tiles& p, unsigned char* memory)
      : p(p),
        square(reinterpret_cast<Piece<T>*>(memory)),
        down(int64_t{blockIdx.z} * kMostDown + blockIdx.y),
        across(blockIdx.x),
        first_row(down * kTile),
        first_column(across * kTile),
        thread(threadIdx.x),
        group(thread % G),
        lane(thread / G) {
    column = first_column + group * N;
    rows_here = p.rows - first_row < kTile ? static_cast<int>(p.rows - first_row) : kTile;
    columns_here = p.columns - column < N ? static_cast<int>(p.columns - column) : N;
  }

  // Begins to copy the square; zeros behind its ends.
  __device__ __forceinline__ void copy() const {
    const T* from = static_cast<const T*>(p.x) + (first_row + lane) * p.x_stride + column;
    Piece<T>* to = square + thread;
    if (p.whole && (columns_here == N || columns_here <= 0)) {
      const int rows = columns_here > 0 ? rows_here - static_cast<int>(lane) : 0;
#pragma unroll
      for (int r = 0; r < kTile; r += L, from += L * p.x_stride, to += L * G)
        device::copy_async<16>(to, from, r < rows);
    } else {
      const int rows = rows_here - static_cast<int>(lane);
#pragma unroll 1
      for (int r = 0; r < kTile; r += L, from += L * p.x_stride, to += L * G)
        *to = load_piece(from, r < rows ? columns_here : 0, false);
    }
    device::copy_async_commit();
  }

  // A thread's rows of a turn begin here, within the square.
  __device__ __forceinline__ unsigned quad_of(unsigned turn) const { return turn * kTurnRows + lane * 4; }
  __device__ __forceinline__ Piece<T> piece(unsigned row) const { return square[row * G + group]; }
  __device__ __forceinline__ float value(unsigned row, unsigned c) const {
    return device::to_float(reinterpret_cast<const T*>(square)[row * kTile + c]);
  }
  __device__ __forceinline__ unsigned turns() const { return rows_here > kTurnRows ? 2 : 1; }
  // Of element e of a thread's rows, turn by turn, in the square.
  __device__ __forceinline__ unsigned row_of(unsigned e) const { return quad_of(e / (4 * N)) + e / N % 4; }
  __device__ __forceinline__ unsigned column_of(unsigned e) const { return group * N + e % N; }
  __device__ __forceinline__ bool exists(unsigned e) const {
    return static_cast<int>(row_of(e)) < rows_here && static_cast<int>(e % N) < columns_here;
  }
};

// Of rows or columns, in shared memory: maxima or sums, which become scales; their reciprocals; factors of the values.
struct Table {
  using Four = Vector<float, 4>;
  float* of;
  __device__ __forceinline__ float& value(unsigned i) const { return of[i]; }
  __device__ __forceinline__ float& reciprocal(unsigned i) const { return of[kTile + i]; }
  __device__ __forceinline__ float& factor(unsigned i) const { return of[2 * kTile + i]; }
  template <int M> __device__ __forceinline__ void load(float (&to)[M], unsigned part, unsigned first) const {
#pragma unroll
    for (int k = 0; k < M; k += 4) {
      const Four four = device::load_vector<4>(of + part * kTile + first + k);
#pragma unroll
      for (int j = 0; j < 4; ++j) to[k + j] = four.at[j];
    }
  }
};

template <class T, class F, TileWork kWork> __global__ void __launch_bounds__(kTileThreads<T>, 1024 / kTileThreads<T>)
    tiles(Tiles p) {
  using S = Square<T>;
  constexpr int kThreads = S::kThreads, N = S::N, G = S::G, kWarps = kThreads / 32;
  constexpr bool kAmax = kWork == TileWork::amax;
  static_assert(kWarps <= 16);
  WARPSMITH_DYNAMIC_SHARED(memory);
  // Of vectors: they are read by 8 and 16 bytes.
  WARPSMITH_SHARED(Pair, pairs, (kAmax ? kWarps * kTile : kTile * kTurnRows / 4) / 2);
  WARPSMITH_SHARED(Table::Four, row_table, 3 * kTile / 4);
  WARPSMITH_SHARED(Table::Four, column_table, 3 * kTile / 4);
  WARPSMITH_SHARED(float, scratch, kWarps);
  uint32_t* const words = pairs->at;
  float* const by_warp = reinterpret_cast<float*>(words);  // until the first words are there
  const Table of_row{row_table->at}, of_column{column_table->at};
  const S s(p, memory);
  if (s.down >= p.down) return;
  s.copy();
  device::launch_dependents();  // the sum of column sums

  // A thread of each row, then of each column.
  const unsigned thread = s.thread, mine = thread % kTile;
  const bool is_row = static_cast<int>(thread) < s.rows_here;  // has to do with one
  const bool is_column = thread >= kTile && thread < 2 * kTile && s.first_column + mine < p.columns;
  if (thread < kTile) {
    const int64_t row = s.first_row + mine;
    of_row.factor(mine) = p.row_factor && row < p.factor_rows ? device::load(p.row_factor + row) : 1.0f;
  } else if (thread < 2 * kTile) {
    of_column.factor(mine) =
        p.column_factor && is_column ? device::load(p.column_factor + s.first_column + mine) : 1.0f;
  }

  float one = 0.0f;  // the maximum of all, then its scale
  // Makes or reads the scale of each row and column, once. Returns whether one has no exact reciprocal.
  const auto prepare = [&] {
    if (p.square) {
      if (p.from_max) one = device::load(p.most);
      one = p.of_square || p.from_max ? scale_of_amax(one, kLimits<F>, p.power_of_two) : device::load(p.row_scale);
      if (p.of_square && thread == 0) {
        if (p.data) device::store(p.row_scale + s.down * p.across + s.across, one);
        if (p.transposed) device::store(p.column_scale + s.across * p.down + s.down, one);
      }
      if (p.from_max && s.down == 0 && s.across == 0 && thread == 0) device::store(p.row_scale, one);
    }
    if (thread >= 2 * kTile) return false;
    const bool by_rows = thread < kTile;
    const Table table{by_rows ? of_row.of : of_column.of};
    const int64_t at = (by_rows ? s.first_row : s.first_column) + mine;
    float scale = p.square ? one : 1.0f;
    if (!p.square && (by_rows ? is_row && p.data : is_column && p.transposed)) {
      float* scales = by_rows ? p.row_scale : p.column_scale;
      bool writes = by_rows ? s.across == 0 : s.down == 0;
      if (p.of_square) {
        scales += by_rows ? at * p.across + s.across : at * p.down + s.down;
        writes = true;
      } else {
        scales += at;
      }
      if (p.of_square || p.from_max) {
        const float most = p.from_max ? device::load((by_rows ? p.row_max : p.column_max) + at) : table.value(mine);
        scale = scale_of_amax(most, kLimits<F>, p.power_of_two);
        if (writes) device::store(scales, scale);
      } else {
        scale = device::load(scales);
      }
    }
    const Divisor d = divisor(scale);
    table.value(mine) = d.scale;
    table.reciprocal(mine) = d.reciprocal;
    return !has_exact_reciprocal(scale);
  };

  if (kAmax || p.of_square || p.column_sums || (p.most && !p.from_max)) {
    device::copy_async_wait<0>();
    __syncthreads();
    const bool magnitudes = kAmax || p.of_square || (p.most && !p.from_max);
    float sum[N] = {}, column_max[N] = {};
#pragma unroll 1
    for (unsigned turn = 0; turn < s.turns(); ++turn) {
      const unsigned quad = s.quad_of(turn);
      if (!kAmax && p.column_sums) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float value[N];
          device::unpack<T>(value, s.piece(quad + i));
#pragma unroll
          for (int k = 0; k < N; ++k) sum[k] += value[k];
        }
      }
      if (!magnitudes) continue;
      float row_max[4] = {}, rows_factor[4], columns_factor[N];
      if (kAmax) {
        of_row.load(rows_factor, 2, quad);
        of_column.load(columns_factor, 2, s.group * N);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float in_row[N], in_column[N];
        device::unpack<T>(in_row, s.piece(quad + i));
#pragma unroll
        for (int k = 0; k < N; ++k) {
          if (!kAmax) in_row[k] = finite_magnitude(in_row[k]);
          in_column[k] = in_row[k];
        }
        if (kAmax && p.column_factor) {
#pragma unroll
          for (int k = 0; k < N; ++k) in_row[k] *= columns_factor[k];
        }
        if (kAmax && p.row_factor) {
#pragma unroll
          for (int k = 0; k < N; ++k) in_column[k] *= rows_factor[i];
        }
#pragma unroll
        for (int k = 0; k < N; ++k) {  // fmaxf leaves NaN out; infinities are seen to below
          row_max[i] = fmaxf(row_max[i], fabsf(in_row[k]));
          column_max[k] = fmaxf(column_max[k], fabsf(in_column[k]));
        }
      }
      if constexpr (kAmax) {
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) most = fmaxf(most, row_max[i]);
#pragma unroll
        for (int k = 0; k < N; ++k) most = fmaxf(most, column_max[k]);
        if (most > FLT_MAX) {  // rare: what is finite, of this turn and of those before, raises the maxima singly
          one = 0.0f;
#pragma unroll
          for (int i = 0; i < 4; ++i) row_max[i] = 0.0f;
#pragma unroll
          for (int k = 0; k < N; ++k) column_max[k] = 0.0f;
#pragma unroll 1
          for (unsigned e = 0; e < (turn + 1) * 4 * N; ++e) {
            if (!s.exists(e)) continue;
            const unsigned row = s.row_of(e), c = s.column_of(e);
            const float x = s.value(row, c), in_row = finite_magnitude(x * of_column.factor(c));
            if (p.most) raise(p.most, in_row);
            if (p.row_max) raise(p.row_max + s.first_row + row, in_row);
            if (p.column_max) raise(p.column_max + s.first_column + c, finite_magnitude(x * of_row.factor(row)));
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) one = fmaxf(one, row_max[i]);
      if (kAmax ? p.row_max != nullptr : p.of_square && !p.square && p.data) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          row_max[i] = device::group_max<G>(row_max[i]);
          if (s.group == 0) of_row.value(quad + i) = row_max[i];
        }
      }
    }
    if (!kAmax && p.column_sums) {
      combine_columns<kThreads>(sum, device::Sum(), by_warp, of_column.of);
      __syncthreads();
      if (is_column) device::store(p.column_sums + s.down * p.columns + s.first_column + mine, of_column.value(mine));
    }
    if (kAmax ? p.column_max != nullptr : p.of_square && !p.square && p.transposed) {
      __syncthreads();  // by_warp, and the sums of columns, have been read
      combine_columns<kThreads>(column_max, device::Max(), by_warp, of_column.of);
    }
    if (magnitudes && (kAmax || !p.of_square ? p.most != nullptr : p.square))
      one = device::block_max<kThreads>(one, scratch);
    if (!p.of_square && p.most && !p.from_max && thread == 0) raise(p.most, one);
    __syncthreads();
    if constexpr (kAmax) {
      if (p.row_max && is_row) raise(p.row_max + s.first_row + mine, of_row.value(mine));
      if (p.column_max && is_column) raise(p.column_max + s.first_column + mine, of_column.value(mine));
    }
  }

  if constexpr (!kAmax) {
    bool inexact = prepare();
    device::copy_async_wait<0>();
    inexact = __syncthreads_or(inexact) != 0;
    bool odd = false;
    const auto casts = [&]<bool kExact>() {
#pragma unroll 1
      for (unsigned turn = 0; turn < s.turns(); ++turn) {
        const unsigned quad = s.quad_of(turn);
        device::forget_memory();  // shared memory is read where it is needed: there are no registers to keep it in
        if (p.data) {
          float factor[N];
          of_column.load(factor, 2, s.group * N);
          uint8_t* to = p.data + (s.first_row + quad) * p.columns + s.column;
#pragma unroll(kExact ? 4 : 1)
          for (int i = 0; i < 4; ++i, to += p.columns) {
            if (static_cast<int>(quad) + i >= s.rows_here || s.columns_here <= 0) continue;
            float value[N];
            device::unpack<T>(value, s.piece(quad + i));
            if (p.column_factor) {
#pragma unroll
              for (int k = 0; k < N; ++k) value[k] *= factor[k];
            }
            Vector<uint32_t, N / 4> bytes;
            odd |= cast<F, kExact>(value, {of_row.value(quad + i), of_row.reciprocal(quad + i)}, bytes);
            store_bytes(to, bytes, s.columns_here, p.whole_data);
          }
        }
        device::forget_memory();
        if (p.transposed) {
          const unsigned word = word_at(s.group * N, s.lane);
          float factor[4];
          of_row.load(factor, 2, quad);
          if constexpr (kExact) {
            float reciprocal[N];
            of_column.load(reciprocal, 1, s.group * N);
            Piece<T> held[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) held[i] = s.piece(quad + i);
#pragma unroll
            for (int k = 0; k < N; ++k) {
              float four[4];
#pragma unroll
              for (int i = 0; i < 4; ++i) four[i] = element<T>(held[i], k);
              if (p.row_factor) {
#pragma unroll
                for (int i = 0; i < 4; ++i) four[i] *= factor[i];
              }
              Vector<uint32_t, 1> bytes;
              odd |= cast<F, true>(four, {1.0f, reciprocal[k]}, bytes);
              words[word + k * kTurnLine] = bytes.at[0];
            }
          } else {
#pragma unroll 1
            for (int k = 0; k < N; ++k) {  // reads elements: there are no registers to hold four rows in
              const unsigned c = s.group * N + k;
              float four[4];
#pragma unroll
              for (int i = 0; i < 4; ++i) four[i] = s.value(quad + i, c) * factor[i];
              Vector<uint32_t, 1> bytes;
              odd |= cast<F, false>(four, {of_column.value(c), of_column.reciprocal(c)}, bytes);
              words[word + k * kTurnLine] = bytes.at[0];
            }
          }
          __syncthreads();
          store_turned<kThreads>(p.transposed, words, s.first_row + turn * kTurnRows, p.rows, s.first_column, p.columns,
                                 p.whole_transposed);
          __syncthreads();
        }
      }
    };
    if (inexact)
      casts.template operator()<false>();
    else
      casts.template operator()<true>();

    Counts counts;
    // Once more, each value alone, behind the stores of all threads. One loop without branches: with nested ones the
    // call of the division's rare cases takes a stack. An element counts once.
    __syncthreads();
    if (__any_sync(0xffffffffu, odd)) {
#pragma unroll 1
      for (unsigned e = 0; e < s.turns() * 4 * N; ++e) {
        const unsigned row = s.row_of(e), c = s.column_of(e);
        const bool exists = s.exists(e);
        const float x = exists ? s.value(row, c) : 0.0f;
        Counts in_row, in_column;
        const uint8_t of_data = repair<F>(x * of_column.factor(c), of_row.value(row), in_row);
        const uint8_t turned = repair<F>(x * of_row.factor(row), of_column.value(c), in_column);
        const int64_t to_row = s.first_row + row, to_column = s.first_column + c;
        if (exists && p.data) device::store(p.data + to_row * p.columns + to_column, of_data);
        if (exists && p.transposed) device::store(p.transposed + to_column * p.rows + to_row, turned);
        counts.add(p.data ? in_row : in_column);
      }
    }
    add_counts(counts, p.counts);
  }
}

}  // namespace warpsmith::quantize
