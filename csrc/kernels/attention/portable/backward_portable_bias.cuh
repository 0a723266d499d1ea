#pragma once
#include "kernels/attention/portable/backward_portable.cuh"

namespace warpsmith::attention {

// dbias. A block owns a tile of dbias and adds to it over everything that the tile is broadcast to: sequences, heads,
// tiles of queries and tiles of keys, in this order. Reads rows of q, dout, k and v once for each tile that it adds.
template <class T, class B, int kTile> __global__ void __launch_bounds__(kPortableBias[kTile].threads(), 1)
    backward_portable_bias(const __grid_constant__ AttentionBwdParams p) {
  constexpr PortableTile tile = kPortableBias[kTile];
  constexpr int kDepth = tile.head_dim, kColumns = tile.columns, kStride = kSharedStride<T, kDepth>;
  constexpr int kThreads = tile.threads(), kTiles = tile.warp_tiles;
  WARPSMITH_DYNAMIC_SHARED(memory);
  T* const rows = reinterpret_cast<T*>(memory);
  T* const columns = rows + 2 * tile.rows * kStride;
  const AttentionProblem& a = p.problem;
  const AttentionBiasStrides& strides = p.dbias_strides;
  const BiasTiles tiles(a, strides, tile.rows, kColumns);
  int64_t number = blockIdx.x;
  const int64_t key_tile = number % tiles.keys;
  number /= tiles.keys;
  const int64_t query_tile = number % tiles.queries;
  number /= tiles.queries;
  const int64_t own_head = number % tiles.heads, own_sequence = number / tiles.heads;
  const int ratio = static_cast<int>(a.heads_q / a.heads_k);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, local = thread / 32 * 16 * kTiles;

  Accumulators<kColumns> sum[kTiles];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) fill<kColumns>(sum[i], 0.0f);
  const auto add = [&](const SequenceOfTile& s, int head, int first_row, int first_column) {
    const int last = min(first_row + tile.rows, s.queries) - 1;
    const Columns some = columns_of_rows<false>(a, s, first_row, last);
    if (some.begin >= min(some.end, first_column + kColumns) || some.end <= first_column) return;
    const int first = first_row + local;  // of the warp
    const Columns of_all = columns_of_all<false>(a, s, first, first + 16 * kTiles - 1);
    const float* lse = statistics_of_rows(p, s, first + lane / 4, head);
    __syncthreads();  // every warp has read the rows before
    copy_pair<T, kDepth, tile.rows, kThreads>(rows, q_rows<T>(p, s, head), dout_rows<T>(p, s, head), first_row,
                                              s.queries, a);
    copy_pair<T, kDepth, kColumns, kThreads>(columns, k_rows<T>(p, s, head / ratio), v_rows<T>(p, s, head / ratio),
                                             first_column, s.keys, a);
    device::copy_async_commit();
    device::copy_async_wait<0>();
    __syncthreads();
    Accumulators<kColumns> probabilities[kTiles], ds[kTiles];
    const T *own_q = rows + local * kStride, *own_dout = own_q + tile.rows * kStride;
    make_gradients<T, kDepth, kColumns, kTiles, false, true>(
        probabilities, ds, false, a, s, first, of_all, head, first_column, own_q, own_dout, columns,
        columns + kColumns * kStride, lse, kBlockQueries, p.workspace, lane);
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[i][n][e] += ds[i][n][e];
  };
  const auto range = [](bool broadcast, int64_t own, int64_t all) {
    return AttentionKeys{broadcast ? 0 : own, broadcast ? all : own + 1};
  };
  const AttentionKeys sequences = range(strides.batch == 0, own_sequence, a.batch);
  const AttentionKeys heads = range(strides.head == 0, own_head, a.heads_q);
  const AttentionKeys of_queries = range(strides.q == 0, query_tile, tiles.all_queries);
  const AttentionKeys of_keys = range(strides.k == 0, key_tile, tiles.all_keys);
  for (int64_t b = sequences.begin; b < sequences.end; ++b) {
    const SequenceOfTile s = sequence_of_tile<false>(a, b);
    for (int64_t h = heads.begin; h < heads.end; ++h)
      for (int64_t i = of_queries.begin; i < of_queries.end && i * tile.rows < s.queries; ++i)
        for (int64_t j = of_keys.begin; j < of_keys.end && j * kColumns < s.keys; ++j)
          add(s, static_cast<int>(h), static_cast<int>(i * tile.rows), static_cast<int>(j * kColumns));
  }

  B* to = static_cast<B*>(p.dbias) + own_sequence * strides.batch + own_head * strides.head +
          query_tile * tile.rows * strides.q + key_tile * kColumns * strides.k;
  const auto rest = [](bool broadcast, int64_t all, int64_t first, int most) {
    return broadcast ? 1 : static_cast<int>(min(all - first, int64_t{most}));
  };
  const int own_rows = rest(strides.q == 0, a.seqlen_q, query_tile * tile.rows, tile.rows);
  const int own_columns = rest(strides.k == 0, a.seqlen_k, key_tile * kColumns, kColumns);
  // Nothing is broadcast within the tile and neighbouring keys are adjacent in memory: store from registers, two
  // elements at a time.
  if (strides.q != 0 && strides.k == 1 && strides.q % 2 == 0 &&
      reinterpret_cast<uintptr_t>(to) % (2 * sizeof(B)) == 0 && own_columns % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = local + 16 * i + 8 * r + lane / 4;
        if (row >= own_rows) continue;
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
          const int column = n * 8 + lane % 4 * 2;
          if (column < own_columns)
            device::store_vector(to + row * strides.q + column,
                                 device::Vector<B, 2>{{device::from_float<B>(sum[i][n][2 * r]),
                                                       device::from_float<B>(sum[i][n][2 * r + 1])}});
        }
      }
    return;
  }

  // Sums over broadcast columns, then over broadcast rows. One thread makes each sum. A single sum over both would
  // round as many times as the tile has elements, and dS of a row cancels.
  constexpr int kSumStride = kColumns + 1;
  float* const sums = reinterpret_cast<float*>(memory);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        sums[(local + 16 * i + lane / 4 + e / 2 * 8) * kSumStride + n * 8 + lane % 4 * 2 + e % 2] = sum[i][n][e];
  __syncthreads();
  if (strides.k == 0) {
    for (int row = thread; row < tile.rows; row += kThreads) {
      float total = 0.0f;
      for (int c = 0; c < kColumns; ++c) total += sums[row * kSumStride + c];
      sums[row * kSumStride] = total;
    }
    __syncthreads();
  }
  for (int i = thread; i < own_rows * own_columns; i += kThreads) {
    const int row = i / own_columns, column = i % own_columns;
    float total = 0.0f;
    for (int r = row; r < (strides.q == 0 ? tile.rows : row + 1); ++r) total += sums[r * kSumStride + column];
    device::store(to + row * strides.q + column * strides.k, device::from_float<B>(total));
  }
}

}  // namespace warpsmith::attention
