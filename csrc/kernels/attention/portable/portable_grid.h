#pragma once
#include <algorithm>

#include "kernels/attention/attention.h"
#include "kernels/attention/portable/portable_config.h"

// The tiles and grid sizes of the portable kernels, for their launchers and for the check that a grid can hold them.
namespace warpsmith::attention {

inline bool is_extended(const AttentionProblem& p) {
  return p.softcap > 0 || p.alibi_slopes != nullptr || p.bias != nullptr || p.mask != nullptr ||
         p.dropout.seed != nullptr;
}

// The index of the problem's tile in kPortableForward and its like.
inline int tile_of(const AttentionProblem& p) {
  return portable_tile(std::min(size_bytes(p.dtype), 4), is_extended(p), std::max(p.head_dim, p.head_dim_v));
}

// The number of tiles of `rows` queries or keys over all sequences. Sequences of equal length are numbered one after
// the other. A packed sequence begins at its first token / rows + its index, so that the host need not read cu_seqlens;
// some numbers between sequences stay unused.
inline int64_t row_tiles(const AttentionProblem& p, bool of_keys, int rows) {
  if (p.cu_seqlens_q != nullptr) return (of_keys ? p.total_k : p.total_q) / rows + p.batch + 1;
  return p.batch * (((of_keys ? p.seqlen_k : p.seqlen_q) + rows - 1) / rows);
}

// The statistics of every query, in the workspace: float [block][head][4][64] as in backward_order.cuh, in the order of
// the queries.
constexpr int kStatisticsQueries = 64, kStatistics = 4 * kStatisticsQueries;

// Whether the portable backward makes dq, dk and dv in one kernel, on a GPU whose blocks can have so much dynamic
// shared memory. Then it takes delta from the rounded out.
inline bool orders_dq(const AttentionProblem& p, int shared_bytes) {
  return size_bytes(p.dtype) == 2 && !is_extended(p) &&
         portable_ordered_dq_tile(std::max(p.head_dim, p.head_dim_v), shared_bytes) < kPortableOrderedDqTiles;
}

// The workspace of backward_portable_ordered_dq: offsets in bytes. Statistics come first. The sums of dq have the
// padded head dimension.
struct PortableOrderedDqWorkspace {
  int64_t sums, tiles_added, counter, bytes;

  explicit PortableOrderedDqWorkspace(const AttentionProblem& p) {
    const int64_t blocks = row_tiles(p, false, kStatisticsQueries) * p.heads_q;
    const int64_t head_dim = p.head_dim > 128 || p.head_dim_v > 128 ? 256
                             : p.head_dim > 64 || p.head_dim_v > 64 ? 128
                                                                    : 64;
    sums = blocks * kStatistics * 4;
    tiles_added = sums + blocks * kStatisticsQueries * head_dim * 4;
    counter = tiles_added + blocks * 4;
    bytes = counter + 4;
  }
};

// The tiles of dbias. A dimension of [batch, heads, queries, keys] along which dbias is broadcast has one tile.
struct BiasTiles {
  int64_t all_queries, all_keys;  // tiles of a problem's queries and keys
  int64_t batch, heads, queries, keys;
  int64_t count;

  WARPSMITH_HOST_DEVICE BiasTiles(const AttentionProblem& p, const AttentionBiasStrides& strides, int rows, int columns)
      : all_queries((p.seqlen_q + rows - 1) / rows),
        all_keys((p.seqlen_k + columns - 1) / columns),
        batch(strides.batch == 0 ? 1 : p.batch),
        heads(strides.head == 0 ? 1 : p.heads_q),
        queries(strides.q == 0 ? 1 : all_queries),
        keys(strides.k == 0 ? 1 : all_keys),
        count(batch * heads * queries * keys) {}
};

}  // namespace warpsmith::attention
