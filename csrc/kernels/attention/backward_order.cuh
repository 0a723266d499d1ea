#pragma once
#include "kernels/attention/backward_plan.h"
#include "kernels/attention/mask.cuh"
#include "kernels/attention/scheduler.cuh"

// Which query blocks a tile of keys visits in the backward, and in which order the tiles of a head add to a query
// block.
//
// Tiles are claimed in the order of their numbers, with ascending keys, and each visits its blocks from the last to the
// first. The tiles of a head add to a block in the order of their numbers. No circle of waiting is possible: the
// unfinished tile with the lowest number waits for nobody, and since claims are in order, a block that waits holds a
// tile with a higher number than the running one it waits for. Neither a cooperative launch nor a certain number of
// resident blocks is needed.
//
// Neighbouring tiles reach a block at least one step apart, because a tile that starts with its predecessor falls one
// step behind and stays there. Neighbouring numbers are different heads, so that tiles of one head start apart.
namespace warpsmith::attention {

// The query blocks [first, end) that see keys of a tile.
struct VisitedBlocks {
  int first, end;
};

__host__ __device__ __forceinline__ VisitedBlocks visited_blocks(const Window& w, int tile, int queries, int keys,
                                                                 int block_queries) {
  const int shift = w.shift(queries, keys), first_key = tile * kTileKeys;
  const int last_key = first_key + kTileKeys < keys ? first_key + kTileKeys - 1 : keys - 1;
  if (queries <= 0 || last_key < first_key) return {0, 0};
  // Query i sees keys from i + shift - left to i + shift + right.
  int first_query = w.right == Window::kUnbounded ? 0 : first_key - shift - w.right;
  int last_query = w.left == Window::kUnbounded ? queries - 1 : last_key - shift + w.left;
  first_query = first_query > 0 ? first_query : 0;
  last_query = last_query < queries - 1 ? last_query : queries - 1;
  if (last_query < first_query) return {0, 0};
  return {first_query / block_queries, last_query / block_queries + 1};
}

// The tiles [first, end) that visit a query block, in the order of their adds.
struct VisitingTiles {
  int first, end;
};

__host__ __device__ __forceinline__ VisitingTiles visiting_tiles(const Window& w, int block, int queries, int keys,
                                                                 int block_queries) {
  const int shift = w.shift(queries, keys), first_query = block * block_queries;
  const int last_query = first_query + block_queries < queries ? first_query + block_queries - 1 : queries - 1;
  if (keys <= 0 || last_query < first_query) return {0, 0};
  int first_key = w.left == Window::kUnbounded ? 0 : first_query + shift - w.left;
  int last_key = w.right == Window::kUnbounded ? keys - 1 : last_query + shift + w.right;
  first_key = first_key > 0 ? first_key : 0;
  last_key = last_key < keys - 1 ? last_key : keys - 1;
  if (last_key < first_key) return {0, 0};
  return {first_key / kTileKeys, last_key / kTileKeys + 1};
}

// Query blocks are numbered over the sequences: of equally long ones one after the other, of packed ones so that each
// begins at cu_seqlens_q / 64 + its number. Numbers between sequences may stay unused.
__host__ __device__ __forceinline__ int64_t first_block(const int32_t* cu_seqlens_q, int64_t sequence, int64_t start,
                                                        int64_t queries, int block_queries) {
  return cu_seqlens_q != nullptr ? start / block_queries + sequence
                                 : sequence * ((queries + block_queries - 1) / block_queries);
}
// Tiles of keys are numbered likewise.
__host__ __device__ __forceinline__ int64_t first_tile(const int32_t* cu_seqlens_k, int64_t sequence, int64_t start,
                                                       int64_t keys) {
  return cu_seqlens_k != nullptr ? start / kTileKeys + sequence : sequence * ((keys + kTileKeys - 1) / kTileKeys);
}
inline int64_t total_blocks(const AttentionProblem& p, int block_queries) {
  return p.cu_seqlens_q != nullptr ? p.total_q / block_queries + p.batch + 1
                                   : p.batch * ((p.seqlen_q + block_queries - 1) / block_queries);
}
inline int64_t total_tiles(const AttentionProblem& p) {
  return p.cu_seqlens_k != nullptr ? p.total_k / kTileKeys + p.batch + 1
                                   : p.batch * ((p.seqlen_k + kTileKeys - 1) / kTileKeys);
}

// Where the statistics of a block's query i lie: a thread's sixteen columns become four 16-byte loads without bank
// conflicts.
__host__ __device__ __forceinline__ int statistics_place(int i) {
  return i / 16 * 16 + i / 2 % 4 * 4 + i / 8 % 2 * 2 + i % 2;
}

}  // namespace warpsmith::attention
