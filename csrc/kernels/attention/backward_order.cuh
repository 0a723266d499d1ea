#pragma once
#include <cmath>

#include "device/math.h"
#include "device/vector.h"
#include "kernels/attention/attention.h"
#include "kernels/attention/backward_plan.h"
#include "kernels/attention/mask.cuh"
#include "kernels/attention/scheduler.cuh"

// Which query blocks a tile of keys visits in the backward, and in which order the tiles of a head add to the dq of a
// query block.
//
// Blocks of threads claim tiles in the order of their numbers, with ascending keys. A tile visits its query blocks from
// the last to the first. The tiles of a head add to a query block in the order of their numbers, so the sums have a
// fixed order.
//
// This cannot deadlock. A tile waits only for tiles with lower numbers. Since tiles are claimed in order, those are
// already running or finished, and the unfinished tile with the lowest number waits for none. So neither a cooperative
// launch nor a certain number of resident blocks is needed.
//
// Neighbouring tiles of a head reach a query block at least one step apart: a tile that starts together with its
// predecessor falls one step behind and stays there. Neighbouring numbers are different heads, so that the tiles of one
// head start apart.
namespace warpsmith::attention {

// The query blocks [first, end) that see some key of a tile.
struct VisitedBlocks {
  int first, end;
};

__host__ __device__ __forceinline__ VisitedBlocks visited_blocks(const Window& w, int tile, int queries, int keys,
                                                                 int block_queries, int tile_keys = kTileKeys) {
  const int shift = w.shift(queries, keys), first_key = tile * tile_keys;
  const int last_key = first_key + tile_keys < keys ? first_key + tile_keys - 1 : keys - 1;
  if (queries <= 0 || last_key < first_key) return {0, 0};
  // Query i sees keys from i + shift - left to i + shift + right.
  int first_query = w.right == Window::kUnbounded ? 0 : first_key - shift - w.right;
  int last_query = w.left == Window::kUnbounded ? queries - 1 : last_key - shift + w.left;
  first_query = first_query > 0 ? first_query : 0;
  last_query = last_query < queries - 1 ? last_query : queries - 1;
  if (last_query < first_query) return {0, 0};
  return {first_query / block_queries, last_query / block_queries + 1};
}

// The tiles [first, end) that visit a query block. They add in this order.
struct VisitingTiles {
  int first, end;
};

__host__ __device__ __forceinline__ VisitingTiles visiting_tiles(const Window& w, int block, int queries, int keys,
                                                                 int block_queries, int tile_keys = kTileKeys) {
  const int shift = w.shift(queries, keys), first_query = block * block_queries;
  const int last_query = first_query + block_queries < queries ? first_query + block_queries - 1 : queries - 1;
  if (keys <= 0 || last_query < first_query) return {0, 0};
  int first_key = w.left == Window::kUnbounded ? 0 : first_query + shift - w.left;
  int last_key = w.right == Window::kUnbounded ? keys - 1 : last_query + shift + w.right;
  first_key = first_key > 0 ? first_key : 0;
  last_key = last_key < keys - 1 ? last_key : keys - 1;
  if (last_key < first_key) return {0, 0};
  return {first_key / tile_keys, last_key / tile_keys + 1};
}

// The number of a sequence's first query block. Sequences of equal length are numbered one after the other. A packed
// sequence begins at start / block_queries + its index, so that the host need not read cu_seqlens; some numbers between
// sequences stay unused.
__host__ __device__ __forceinline__ int64_t first_block(const int32_t* cu_seqlens_q, int64_t sequence, int64_t start,
                                                        int64_t queries, int block_queries) {
  return cu_seqlens_q != nullptr ? start / block_queries + sequence
                                 : sequence * ((queries + block_queries - 1) / block_queries);
}
// The number of a sequence's first tile of keys, by the same rule.
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

// Floats per query block in the statistics: first lse * log2(e) of each query, then delta. With dropout both carry its
// scale: 2^(-lse) is multiplied by it and delta is divided by it, so that probabilities and dS come out multiplied by
// it. Dropout adds counter word 1 of each 16 queries. The stride is a power of two, because the loader has no registers
// for other products.
//
// A block is far where |lse| of one of its queries reaches kFarLse. In the place of each lse * log2(e) it has kFarMark,
// a zero that no other lse is. Its lse and lse_rest, in natural units, are in the second half of the stride. A step
// that finds the mark subtracts both from its logits; the exponentials then subtract the zero. A step without it reads
// the first half alone.
//
// Hopper's steps look for the mark only where some block of the call is far. A word of the workspace says so: it is
// kSomeFar then, and anything else if not. backward_statistics writes it, and backward_dq clears it after its last
// reader. Memory that happens to hold kSomeFar costs time, and changes no bit.
__host__ __device__ __forceinline__ constexpr int statistics_stride(int block_queries, bool dropout) {
  return dropout ? 8 * block_queries : 4 * block_queries;
}
constexpr uint32_t kFarMark = 0x80000000u;  // -0
constexpr int kSomeFar = 0x66617231;
__device__ __forceinline__ bool has_far_mark(float lse) { return __float_as_uint(lse) == kFarMark; }

// The lse and lse_rest of a far block: a query without keys, or that does not exist, has probability 0. NaN: a logit is
// +inf.
template <class T> __device__ __forceinline__ bool is_far_lse(float lse) {
  return lse != -INFINITY && !(fabsf(lse) < kFarLse<T>);
}
__device__ __forceinline__ float far_lse(float lse) {
  return lse == -INFINITY ? INFINITY : lse == INFINITY ? NAN : lse;
}

// The place of query i in the statistics of its block. In this order, a thread loads the statistics of its sixteen
// columns by four 16-byte loads without bank conflicts.
__host__ __device__ __forceinline__ int statistics_place(int i) {
  return i / 16 * 16 + i / 2 % 4 * 4 + i / 8 % 2 * 2 + i % 2;
}

// Turns transposed scores of a far block into differences from lse, in units in which exponentials still multiply them
// by the scale of the scores. far: the thread's first lse, in the order of statistics_place(). Loads two lse at a time,
// for want of registers. kOneByOne: the address of the next two depends on these by a NaN that no arithmetic gives.
// With all loads in flight at once, ptxas would compute other addresses of a step anew in every step.
template <int kBlock, bool kOneByOne = false>
__device__ __forceinline__ void subtract_far_lse(float (&s)[kBlock / 2], const float* far, float to_logits,
                                                 float to_scores) {
#pragma unroll
  for (int i = 0; i < kBlock / 2; i += 4) {
    const float* of = far + i / 8 * 16 + i / 4 % 2 * 2;
    const auto lse = device::load_vector<2>(of), rest = device::load_vector<2>(of + kBlock);
#pragma unroll
    for (int e = 0; e < 4; ++e)
      s[i + e] = ((device::rounded_product(s[i + e], to_logits) - lse.at[e % 2]) - rest.at[e % 2]) * to_scores;
    if constexpr (kOneByOne) far += __float_as_uint(s[i]) == 0x7fedcba9u ? 1 : 0;
  }
}
// The same where rows are queries: row r of a thread's two, whose lse and lse_rest are given.
template <int kScores> __device__ __forceinline__ void subtract_far_lse(float (&s)[kScores], int r, float lse,
                                                                        float rest, float to_logits, float to_scores) {
#pragma unroll
  for (int i = 2 * r; i < kScores; i += 4)
#pragma unroll
    for (int e = 0; e < 2; ++e) s[i + e] = ((device::rounded_product(s[i + e], to_logits) - lse) - rest) * to_scores;
}

}  // namespace warpsmith::attention
