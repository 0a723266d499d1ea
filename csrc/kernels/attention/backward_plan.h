#pragma once
#include <algorithm>

#include "kernels/attention/attention.h"

// How the Hopper backward cuts a problem into work: functions of the problem alone.
namespace warpsmith::attention {

constexpr int kTileKeys = 128;
constexpr int kBlockQueries = 64;  // of the portable kernels; those for Hopper: BackwardTile::block_queries

// At most so many queries of a head see keys of one tile.
inline int64_t most_visited(const AttentionProblem& p) {
  if (p.window_left < 0 || p.window_right < 0) return p.seqlen_q;
  return std::min(p.seqlen_q, std::min(p.window_left, p.seqlen_q) + std::min(p.window_right, p.seqlen_q) + kTileKeys);
}

// Into how many parts the query heads of a key head go. Each part of a tile of keys is work of its own, and its dk and
// dv are summed afterwards. Undivided, a few tiles of many heads keep some multiprocessors busy long after the others.
// The answer depends on the shape of one sequence alone, so that its bits do not depend on the batch.
inline int backward_parts(const AttentionProblem& p) {
  constexpr int64_t kMostQueries = 16384;  // of all heads of a part
  const int64_t heads = p.heads_q / p.heads_k, visited = most_visited(p);
  int64_t parts = 1;
  while (parts < heads && (heads % parts != 0 || visited * (heads / parts) > kMostQueries)) ++parts;
  return static_cast<int>(parts);
}

// In which order a tile visits: all blocks for one query head, then for the next head; or all heads of a block, then of
// the next block. In a narrow window most tiles visit equally many blocks. A tile's first blocks are the last ones of
// the tile before it, one or two blocks later: for one head at a time that is soon enough to find them in the L2 cache.
// Without a window, tiles of fewer blocks would wait for tiles of more, head by head.
inline bool visits_blocks_first(const AttentionProblem& p) { return 4 * most_visited(p) <= p.seqlen_q; }

}  // namespace warpsmith::attention
