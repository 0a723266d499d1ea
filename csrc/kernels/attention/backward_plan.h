#pragma once
#include <algorithm>

#include "kernels/attention/attention.h"

// How the Hopper backward divides a problem into work. All are functions of the problem alone.
namespace warpsmith::attention {

constexpr int kTileKeys = 128;
constexpr int kBlockQueries = 64;  // of the portable kernels. Hopper kernels: BackwardTile::block_queries

// An upper bound on the queries of one head that see keys of one tile.
inline int64_t most_visited(const AttentionProblem& p) {
  if (p.window_left < 0 || p.window_right < 0) return p.seqlen_q;
  return std::min(p.seqlen_q, std::min(p.window_left, p.seqlen_q) + std::min(p.window_right, p.seqlen_q) + kTileKeys);
}

// The number of parts into which the query heads of one key head are divided. Each part of a tile of keys is scheduled
// on its own; backward_dkv then sums the dk and dv of the parts. Undivided, few tiles with many heads keep some
// multiprocessors busy long after the others are done. The answer depends only on the shape of one sequence, so that
// the bits of a sequence do not depend on the batch.
inline int backward_parts(const AttentionProblem& p) {
  constexpr int64_t kMostQueries = 16384;  // over all heads of a part
  const int64_t heads = p.heads_q / p.heads_k, visited = most_visited(p);
  int64_t parts = 1;
  while (parts < heads && (heads % parts != 0 || visited * (heads / parts) > kMostQueries)) ++parts;
  return static_cast<int>(parts);
}

// The order in which a tile visits: all blocks of one query head and then the next head (true), or all heads of one
// block and then the next block (false).
//
// In a narrow window most tiles visit equally many blocks. A tile's first blocks are the last blocks of the tile before
// it, one or two blocks later. One head at a time, the tile finds them still in the L2 cache. Without a window, tiles
// visit different numbers of blocks, and tiles with fewer blocks would wait for the others once for each head.
inline bool visits_blocks_first(const AttentionProblem& p) { return 4 * most_visited(p) <= p.seqlen_q; }

}  // namespace warpsmith::attention
