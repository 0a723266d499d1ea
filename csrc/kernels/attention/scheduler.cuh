#pragma once
#include "device/platform.h"
#include "device/programmatic_launch.h"
#include "device/reduce.h"
#include "device/tensor_copy.h"
#include "device/vector.h"
#include "kernels/attention/attention.h"
#include "kernels/attention/sections.h"

// Which tile a block works on next.
//
// Tiles are numbered. If all tiles are equally long, a block takes every gridDim.x-th tile. Otherwise blocks take the
// next number from a counter, with the longest tiles first, so that no block waits for a block with longer tiles.
//
// Sequences of equal length are numbered by sections of heads (sections.h). Packed sequences are numbered one after the
// other; `first_tiles` has the first number of each. One more sequence, after the last, holds the tokens after
// cu_seqlens_q[batch], which see no key.
namespace warpsmith::attention {

struct Schedule {
  int* counter;            // the next number, less gridDim.x; null: every gridDim.x-th tile
  const int* first_tiles;  // packed: [batch + 2], in row tiles, without heads
  int batch, heads, row_tiles;
  int tiles;           // of sequences of equal length
  int heads_together;  // as in Sections, like the next three
  int joined_heads;
  bool heads_first, descending;
  bool batch_first;  // neighbouring heads are those of different sequences
};

struct TileIndex {
  int batch, head, row_tile;  // batch < 0: no tile has this number
};

// kForward: with joined heads and batch_first. The loader of the backward has no registers for them.
template <bool kForward = false> __device__ __forceinline__ TileIndex tile_at(const Schedule& p, int n) {
  if (p.first_tiles != nullptr) {
    const int row = n / p.heads;
    int low = 0, high = p.batch + 1;  // first_tiles[low] <= row < first_tiles[high]
    if (row >= device::load(p.first_tiles + high)) return {-1, 0, 0};
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (device::load(p.first_tiles + middle) <= row ? low : high) = middle;
    }
    const int first = device::load(p.first_tiles + low), tiles = device::load(p.first_tiles + low + 1) - first;
    const int within = n - first * p.heads;
    if (!p.heads_first) return {low, within / tiles, within % tiles};
    return {low, within % p.heads, p.descending ? tiles - 1 - within / p.heads : within / p.heads};
  }
  if (n >= p.tiles) return {-1, 0, 0};
  if constexpr (!kForward) {
    const int per_section = p.heads_together * p.row_tiles, section = n / per_section;
    const int within = n - section * per_section, first_head = section * p.heads_together;
    const int heads = min(p.heads_together, p.batch * p.heads - first_head);
    int row_tile = within % p.row_tiles, head = within / p.row_tiles;
    if (p.heads_first) {
      head = within % heads;
      row_tile = p.descending ? p.row_tiles - 1 - within / heads : within / heads;
    }
    head += first_head;
    return {head / p.heads, head % p.heads, row_tile};
  }
  const SectionTile at =
      section_tile({p.batch * p.heads, p.row_tiles, p.heads_together, p.joined_heads, p.heads_first, p.descending}, n);
  if (p.batch_first) return {at.head % p.batch, at.head / p.batch, at.row_tile};
  return {at.head / p.heads, at.head % p.heads, at.row_tile};
}

// The number of the tile after n. Called by one thread, early enough to hide the latency of the counter.
__device__ __forceinline__ int next_tile(const Schedule& p, int n) {
  const int blocks = static_cast<int>(gridDim.x);
  return p.counter == nullptr ? n + blocks : atomicAdd(p.counter, 1) + blocks;
}

// As attention_sequence(), in 32 bits. Sequence number `batch` is the tokens after the last sequence.
struct Sequence {
  int start, length;
};

__device__ __forceinline__ Sequence sequence_at(const int32_t* cu_seqlens, int sequence, int batch, int total,
                                                int max_seqlen) {
  const int start = min(max(device::load(cu_seqlens + sequence), 0), total);
  if (sequence == batch) return {start, total - start};
  const int end = min(max(device::load(cu_seqlens + sequence + 1), start), total);
  return {start, min(end - start, max_seqlen)};
}

// Where a sequence is in a tensor map (head_map()): coordinates of its first row along length and batch.
struct alignas(8) MapPlace {
  int row, batch;
};
constexpr int kMapRows = 1 << 30;  // of the map of a packed tensor
// The place of a packed sequence. Rows after its last are outside the map, so they arrive as zeros and are not written.
__device__ __forceinline__ MapPlace map_place(const Sequence& s) { return {kMapRows - s.length, s.start + s.length}; }

// A box of 64 columns of a tensor of heads, whose map has a fifth dimension if it is packed. Of five coordinates for
// all tensors dense forwards took 1.02 of the time (H200, 2026-11-29).
__device__ __forceinline__ void load_box(void* to, const TensorMap* map, device::Mbarrier* full, bool packed,
                                         int column, int row, int head, int batch) {
  if (packed)
    device::tensor_load(to, map, full, {column, row, head, batch, kMapRows});
  else
    device::tensor_load(to, map, full, {column, row, head, batch});
}

constexpr int kPrepareThreads = 256;

struct PrepareParams {
  int* counter;
  int* first_tiles;  // null: not packed
  const int32_t* cu_seqlens_q;
  int batch, total_q, seqlen_q;
  int tile_rows;
};

// One block. Resets the counter and, for packed sequences, writes the number of tiles before each sequence.
template <int kThreads> __global__ void __launch_bounds__(kThreads) prepare_schedule(const PrepareParams p) {
  WARPSMITH_SHARED(int, sums, kThreads / 32);
  device::wait_for_previous_kernel();
  device::launch_dependents();
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) device::store(p.counter, 0);
  if (p.first_tiles == nullptr) return;
  const int sequences = p.batch + 1, share = (sequences + kThreads - 1) / kThreads;
  const int begin = min(thread * share, sequences), end = min(begin + share, sequences);
  const auto tiles_of = [&](int i) {
    const int length = sequence_at(p.cu_seqlens_q, i, p.batch, p.total_q, p.seqlen_q).length;
    return (length + p.tile_rows - 1) / p.tile_rows;
  };
  int own = 0;
  for (int i = begin; i < end; ++i) own += tiles_of(i);
  int before = own;  // tiles up to and including this thread's
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, before, distance);
    if (thread % 32 >= distance) before += other;
  }
  if (thread % 32 == 31) sums[thread / 32] = before;
  __syncthreads();
  for (int warp = 0; warp < thread / 32; ++warp) before += sums[warp];
  before -= own;
  for (int i = begin; i < end; ++i) {
    device::store(p.first_tiles + i, before);
    before += tiles_of(i);
  }
  if (thread == kThreads - 1) device::store(p.first_tiles + sequences, before);
}

}  // namespace warpsmith::attention
