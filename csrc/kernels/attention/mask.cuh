#pragma once
#include <cmath>

#include "device/platform.h"

// Which keys a query sees: the window of AttentionProblem, applied to tiles, to blocks of keys and to the accumulators
// of a product. Positions count within a sequence and fit in 30 bits.
namespace warpsmith::attention {

// Key j is in the window of query i if -left <= j - (i + shift) <= right.
struct Window {
  static constexpr int kUnbounded = 1 << 29;
  int left, right;
  bool bottom_right;  // true: shift is keys - queries of the sequence; false: 0

  __host__ __device__ __forceinline__ int shift(int queries, int keys) const {
    return bottom_right ? keys - queries : 0;
  }
};

// The blocks of keys that a tile of queries visits, in the order of the visit:
//   1. blocks at the right edge of the window, downwards;
//   2. blocks at its left edge, upwards;
//   3. blocks that every query of the tile sees whole, downwards.
// The first `masked` visits need a mask. There is always at least one, and it may lie outside the window: a tile
// without visible keys visits one fully masked block.
struct BlockPlan {
  int blocks, masked;
  int right_end;   // one past the block that is visited first
  int left_begin;  // the first block at the left edge
  int right;       // blocks at the right edge
  int whole_end;   // one past the highest whole block

  __host__ __device__ __forceinline__ int block(int visit) const {
    if (visit < right) return right_end - 1 - visit;
    if (visit < masked) return left_begin + visit - right;
    return whole_end - 1 - (visit - masked);
  }
};

template <int kBlockKeys> __host__ __device__ __forceinline__ BlockPlan plan_blocks(const Window& w, int first_query,
                                                                                    int last_query, int queries,
                                                                                    int keys) {
  const int shift = w.shift(queries, keys);
  last_query = last_query < queries ? last_query : queries - 1;
  const int end_key =
      w.right < keys ? (last_query + shift + w.right + 1 < keys ? last_query + shift + w.right + 1 : keys) : keys;
  const int begin_key = w.left < Window::kUnbounded ? first_query + shift - w.left : 0;
  BlockPlan plan{};
  if (end_key <= 0 || begin_key >= end_key) {
    plan.blocks = plan.masked = plan.right = plan.right_end = 1;
    return plan;
  }
  const int begin = begin_key > 0 ? begin_key / kBlockKeys : 0;
  const int end = (end_key + kBlockKeys - 1) / kBlockKeys;
  // Every query's window ends at `seen_by_all` (exclusive) or later, and begins at `not_left` or earlier.
  int seen_by_all = w.right < Window::kUnbounded ? first_query + shift + w.right + 1 : keys;
  seen_by_all = seen_by_all < keys ? seen_by_all : keys;
  const int not_left = w.left < Window::kUnbounded ? last_query + shift - w.left : 0;
  int whole_end = seen_by_all > 0 ? seen_by_all / kBlockKeys : 0;
  whole_end = whole_end < end - 1 ? whole_end : end - 1;  // the first visit is always masked
  whole_end = whole_end > begin ? whole_end : begin;
  int whole_begin = not_left > 0 ? (not_left + kBlockKeys - 1) / kBlockKeys : 0;
  whole_begin = whole_begin > begin ? whole_begin : begin;
  whole_begin = whole_begin < whole_end ? whole_begin : whole_end;
  plan.blocks = end - begin;
  plan.right = end - whole_end;
  plan.masked = plan.right + whole_begin - begin;
  plan.right_end = end;
  plan.left_begin = begin;
  plan.whole_end = whole_end;
  return plan;
}

// A thread's accumulators of one row are the columns 8 j and 8 j + 1. Returns bits 2 j and 2 j + 1 for the columns
// before `end`. One instruction moves seven of them into predicates, where a comparison makes one.
__device__ __forceinline__ uint32_t columns_before(int end) {
  const int bits = end > 0 ? end / 8 * 2 + min(end % 8, 2) : 0;
  return bits < 32 ? (1u << bits) - 1 : ~0u;
}

// Sets scores outside the window to -inf. `s` holds the accumulators of wgmma. Rows are queries (`query` is the
// thread's first); columns are keys, from `first_key` on.
template <int kRegisters> __device__ __forceinline__ void mask_scores(float (&s)[kRegisters], const Window& w,
                                                                      int query, int first_key, int lane, int shift,
                                                                      int keys) {
  static_assert(kRegisters <= 64, "a word has a bit for each column of a row");
  const int column = first_key + lane % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int diagonal = query + 8 * r + shift;
    uint32_t seen = columns_before(min(keys, diagonal + w.right + 1) - column);
    if (w.left != Window::kUnbounded) seen &= ~columns_before(diagonal - w.left - column);
#pragma unroll
    for (int i = 0; i < kRegisters; i += 4)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if ((seen >> (i / 2 + e) & 1) == 0) s[i + 2 * r + e] = -INFINITY;
  }
}

}  // namespace warpsmith::attention
