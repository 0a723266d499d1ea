#pragma once
#include "device/fence.h"
#include "device/named_barrier.h"
#include "device/swizzle.h"
#include "device/tensor_copy.h"
#include "kernels/attention/attention_config.h"
#include "kernels/attention/backward_order.cuh"
#include "kernels/attention/hopper/bias_sm90.cuh"
#include "kernels/attention/hopper/dropout_sm90.cuh"

// The first warpgroup of the Hopper backward (backward_sm90.cuh), with the loader and the threads that add dq to global
// memory, and the shared memory and barriers of all warpgroups.
namespace warpsmith::attention {

using device::Mbarrier;
using device::Swizzle;

constexpr int kRowBytes = 128;  // a swizzled row of 64 16-bit columns
constexpr int kStages = 2;      // buffers of dS
constexpr int kKeySlots = 4;    // the loader is at most so many tiles ahead of the slowest reader
constexpr int kBackwardConsumerWarps = 8;
constexpr int kAdders = 3;  // threads that add dq to global memory, in warps 1 to 3; the loader is in warp 0

struct BackwardParams {
  Schedule schedule;  // of tiles of keys; `heads` counts parts of key heads
  Window window;
  const int32_t *cu_seqlens_q, *cu_seqlens_k;  // null: not packed
  int batch, heads;
  int parts;           // per key head; each part visits a share of its query heads
  int heads_per_part;  // query heads per part
  bool blocks_first;   // true: all blocks of a query head, then the next head; false: all heads of a block first
  int queries, keys, total_q, total_k;
  int head_dim, head_dim_v;
  const float* statistics;  // [blocks, heads, statistics_stride()]
  float* dq_sums;           // [blocks, heads, block * head dim of the kernel], as accumulators lie in registers
  int* tiles_added;         // [blocks, heads, 2]: tiles that have added to a half so far
  int* some_far;            // as in RowParams
  void *dk, *dv;            // packed: with their strides, addressed by the places in the maps of k and v
  float* key_sums;  // [key_tiles, heads of the schedule, 2 (dv, dk), 128 * head dim of the kernel], as accumulators lie
                    // in registers; null: one part, whose dk and dv are stored at once
  AttentionStrides dk_strides, dv_strides;
  float scale, to_logits, to_scores, scale_log2;  // as in ForwardParams; scale: softmax_scale
  DropoutParams dropout;
  BiasParams biases;
};

// The index of (query block, head). Unsigned, because sign handling would take the loader's last registers.
__device__ __forceinline__ int64_t block_of_head(const BackwardParams& p, int block, int head) {
  return static_cast<int64_t>(uint64_t{static_cast<unsigned>(block)} * static_cast<unsigned>(p.heads) +
                              static_cast<unsigned>(head));
}

// One step of a tile: a query block of one head. `step` counts from the first step of the tile.
struct VisitedStep {
  int down;  // blocks below the tile's last block
  int head;  // within the part
};
__device__ __forceinline__ VisitedStep visited_step(const BackwardParams& p, int step, int blocks) {
  if (p.blocks_first) {
    const int head = step / blocks;
    return {step - head * blocks, head};
  }
  const int down = step / p.heads_per_part;
  return {down, step - down * p.heads_per_part};
}

// A tile of keys as the loader publishes it. Stays in shared memory until all readers have finished with it.
struct alignas(16) KeyTile {
  int blocks;  // query blocks to visit, from `last_block` downwards, per query head; -1: no more tiles
  int last_block, first_key;
  int queries, keys, shift, part;  // part: counted over all key heads
  int first_block;                 // index of the sequence's first query block
  MapPlace q, k;                   // of the sequence
  int first_tile;                  // index of its first tile of keys
  int first_step;                  // steps of all earlier tiles of this thread block
  int some_far;                    // 0: no block of queries of the call is far
  int sequence;                    // packed or not; set where the kernel adds biases

  __device__ __forceinline__ int tile() const { return static_cast<int>(static_cast<unsigned>(first_key) / kTileKeys); }
};
static_assert(sizeof(KeyTile) == 64);  // a shift finds a slot; at 80 bytes a float16 bias spilled (nvcc 13.0)

template <BackwardTile tile> struct BackwardShared {
  static constexpr int kPanels = tile.head_dim / 64, kBlock = tile.block_queries;
  static constexpr int kKeyBytes = kTileKeys * tile.head_dim * 2, kQueryBytes = kBlock * tile.head_dim * 2;
  static constexpr int kScoreBytes = kTileKeys * kBlock * 2;     // dS
  static constexpr int kHalfBytes = kBlock * tile.head_dim * 2;  // half of dq, fp32
  static constexpr int kV = 0, kK = tile.value_stages * kKeyBytes, kQ = kK + tile.key_stages * kKeyBytes;
  static constexpr int kDs = kQ + tile.query_stages * 2 * kQueryBytes;
  static constexpr int kDq = kDs + kStages * kScoreBytes, kStatistics = kDq + 2 * kHalfBytes;
  static constexpr int kSlots = kStatistics + tile.query_stages * tile.statistics_bytes();
  static constexpr int kBarriers = kSlots + kKeySlots * static_cast<int>(sizeof(KeyTile));
  static constexpr int kOtherBarriers = 2 * (tile.query_stages + tile.value_stages + tile.key_stages);
  static constexpr int kBytes = kBarriers + (kOtherBarriers + 12 + 2 * kKeySlots) * static_cast<int>(sizeof(Mbarrier));

  unsigned char* memory;

  __device__ __forceinline__ unsigned char* v(unsigned i) const { return memory + kV + i * kKeyBytes; }
  __device__ __forceinline__ unsigned char* k(unsigned i) const { return memory + kK + i * kKeyBytes; }
  __device__ __forceinline__ unsigned char* q(unsigned i) const { return memory + kQ + i * 2 * kQueryBytes; }
  __device__ __forceinline__ unsigned char* dout(unsigned i) const { return q(i) + kQueryBytes; }
  __device__ __forceinline__ unsigned char* ds(unsigned i) const { return memory + kDs + i * kScoreBytes; }
  __device__ __forceinline__ unsigned char* dq(unsigned half) const { return memory + kDq + half * kHalfBytes; }
  __device__ __forceinline__ float* statistics(unsigned i) const {
    return reinterpret_cast<float*>(memory + kStatistics + i * tile.statistics_bytes());
  }
  __device__ __forceinline__ KeyTile* slot(unsigned i) const {
    return reinterpret_cast<KeyTile*>(memory + kSlots) + i % kKeySlots;
  }
  __device__ __forceinline__ Mbarrier* barrier(unsigned i) const {
    return reinterpret_cast<Mbarrier*>(memory + kBarriers) + i;
  }
  // Barriers:
  //   full, empty:         q, dout and statistics
  //   ds_full, ds_empty:   dS
  //   dq_full:             half of the dq of a step, by the number of the half modulo 6, so that each barrier has one
  //                        reader, which sees every phase
  //   dq_empty:            the staging buffer of that half
  __device__ __forceinline__ Mbarrier* full(unsigned i) const { return barrier(i); }
  __device__ __forceinline__ Mbarrier* empty(unsigned i) const { return barrier(tile.query_stages + i); }
  __device__ __forceinline__ Mbarrier* v_full(unsigned i) const { return barrier(2 * tile.query_stages + i); }
  __device__ __forceinline__ Mbarrier* v_empty(unsigned i) const {
    return barrier(2 * tile.query_stages + tile.value_stages + i);
  }
  __device__ __forceinline__ Mbarrier* k_full(unsigned i) const {
    return barrier(2 * (tile.query_stages + tile.value_stages) + i);
  }
  __device__ __forceinline__ Mbarrier* k_empty(unsigned i) const { return k_full(tile.key_stages + i); }
  __device__ __forceinline__ Mbarrier* ds_full(unsigned i) const { return barrier(kOtherBarriers + i); }
  __device__ __forceinline__ Mbarrier* ds_empty(unsigned i) const { return barrier(kOtherBarriers + 2 + i); }
  __device__ __forceinline__ Mbarrier* dq_empty(unsigned half) const { return barrier(kOtherBarriers + 4 + half); }
  __device__ __forceinline__ Mbarrier* dq_full(unsigned i) const { return barrier(kOtherBarriers + 6 + i); }
  __device__ __forceinline__ Mbarrier* slot_full(unsigned i) const {
    return barrier(kOtherBarriers + 12 + i % kKeySlots);
  }
  __device__ __forceinline__ Mbarrier* slot_empty(unsigned i) const {
    return barrier(kOtherBarriers + 12 + kKeySlots + i % kKeySlots);
  }

  __device__ __forceinline__ void initialise() const {
    for (unsigned i = 0; i < tile.query_stages; ++i) {
      device::mbarrier_init(full(i), 1);
      device::mbarrier_init(empty(i), kBackwardConsumerWarps);
    }
    for (unsigned i = 0; i < tile.value_stages; ++i) {
      device::mbarrier_init(v_full(i), 1);
      device::mbarrier_init(v_empty(i), kBackwardConsumerWarps);
    }
    for (unsigned i = 0; i < tile.key_stages; ++i) {
      device::mbarrier_init(k_full(i), 1);
      device::mbarrier_init(k_empty(i), kBackwardConsumerWarps);
    }
    for (unsigned i = 0; i < kStages; ++i) {
      device::mbarrier_init(ds_full(i), kBackwardConsumerWarps);
      device::mbarrier_init(ds_empty(i), kBackwardConsumerWarps);
      device::mbarrier_init(dq_empty(i), 1);
    }
    for (unsigned i = 0; i < 6; ++i) device::mbarrier_init(dq_full(i), 4);
    for (unsigned i = 0; i < kKeySlots; ++i) {
      device::mbarrier_init(slot_full(i), 1);
      device::mbarrier_init(slot_empty(i), kBackwardConsumerWarps + kAdders);
    }
    device::mbarrier_init_fence();
  }
  // The first step multiplies the dS of a step that does not exist, and drops the result. Clears that dS.
  __device__ __forceinline__ void clear_step_before_first() const {
    using Four = device::Vector<float, 4>;
    for (int i = static_cast<int>(threadIdx.x) * 16; i < kScoreBytes; i += tile.threads() * 16)
      device::store(reinterpret_cast<Four*>(ds(1) + i), Four{});
    device::fence_async_shared();
  }
};

template <int kBlock, bool kBiased>
__device__ __forceinline__ void describe_key_tile(const BackwardParams& p, const TileIndex& at, KeyTile* t) {
  if constexpr (kBiased) device::store(&t->sequence, at.batch);
  device::store(&t->first_key, at.row_tile * kTileKeys);
  device::store(&t->part, at.head);
  int queries = p.queries, keys = p.keys;
  if (p.cu_seqlens_q == nullptr) {
    device::store(&t->q, {0, at.batch});
    device::store(&t->k, {0, at.batch});
    device::store(&t->first_block, static_cast<int>(first_block(nullptr, at.batch, 0, queries, kBlock)));
    device::store(&t->first_tile, static_cast<int>(first_tile(nullptr, at.batch, 0, keys)));
  } else {
    const Sequence k = sequence_at(p.cu_seqlens_k, at.batch, p.batch, p.total_k, p.keys);
    device::store(&t->k, map_place(k));
    device::store(&t->first_tile, static_cast<int>(first_tile(p.cu_seqlens_k, at.batch, k.start, 0)));
    keys = k.length;
    const Sequence q = sequence_at(p.cu_seqlens_q, at.batch, p.batch, p.total_q, p.queries);
    device::store(&t->q, map_place(q));
    device::store(&t->first_block, static_cast<int>(first_block(p.cu_seqlens_q, at.batch, q.start, 0, kBlock)));
    queries = at.batch < p.batch ? q.length : 0;
  }
  device::store(&t->queries, queries);
  device::store(&t->keys, keys);
  device::store(&t->shift, p.window.shift(queries, keys));
  const VisitedBlocks visited = visited_blocks(p.window, at.row_tile, queries, keys, kBlock);
  device::store(&t->last_block, visited.end - 1);
  device::store(&t->blocks, visited.end - visited.first);
}

struct BackwardMaps {
  TensorMap q, k, v, dout;
};

template <int kPanels> __device__ __forceinline__ void load_panels(unsigned char* to, const TensorMap* map,
                                                                   Mbarrier* full, bool packed, int rows, int row,
                                                                   int head, int batch) {
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel)
    load_box(to + panel * rows * kRowBytes, map, full, packed, panel * 64, row, head, batch);
}

// Stage and parity in a ring (by default that of dS). `it`: the number of steps or tiles so far.
template <int kRing = kStages> __device__ __forceinline__ unsigned stage_of(unsigned it) { return it % kRing; }
template <int kRing = kStages> __device__ __forceinline__ unsigned parity_of(unsigned it) { return it / kRing & 1; }

// The loader, one thread.
template <BackwardTile tile> __device__ __forceinline__ void load_steps(const BackwardParams& p,
                                                                        const BackwardMaps& maps,
                                                                        const BackwardShared<tile>& shared) {
  using Shared = BackwardShared<tile>;
  constexpr int kPanels = Shared::kPanels;
  device::prefetch_tensor_map(&maps.q);
  device::prefetch_tensor_map(&maps.k);
  device::prefetch_tensor_map(&maps.v);
  device::prefetch_tensor_map(&maps.dout);
  const bool packed = p.cu_seqlens_q != nullptr;
  // The loader has few registers, so rarely used values stay in the tile's slot in shared memory.
  for (unsigned tiles = 0;; ++tiles) {
    KeyTile* t = shared.slot(tiles);
    device::mbarrier_wait(shared.slot_empty(tiles), (tiles / kKeySlots & 1) ^ 1);
    // Claim a tile only now: a tile claimed long before it starts delays the tiles after it. Tiles that no query sees
    // are not published, because dq of a step is staged in the next step, and any number of such tiles may lie between.
    do {
      const TileIndex at = tile_at(p.schedule, atomicAdd(p.schedule.counter, 1));
      if (at.batch >= 0)
        describe_key_tile<Shared::kBlock, tile.biased()>(p, at, t);
      else
        device::store(&t->blocks, -1);
    } while (t->blocks == 0);
    const KeyTile* last = shared.slot(tiles - 1);
    device::store(&t->first_step, tiles == 0 ? 0 : last->first_step + last->blocks * p.heads_per_part);
    device::store(&t->some_far, tiles == 0 ? static_cast<int>(device::load(p.some_far) == kSomeFar) : last->some_far);
    device::mbarrier_arrive(shared.slot_full(tiles));
    if (t->blocks < 0) break;
    const auto load_keys = [&](const TensorMap& map, unsigned char* to, Mbarrier* full) {
      device::mbarrier_arrive_expect(full, Shared::kKeyBytes);
      load_panels<kPanels>(to, &map, full, packed, kTileKeys, t->k.row + t->first_key, t->part / p.parts, t->k.batch);
    };
    const unsigned k_stage = stage_of<tile.key_stages>(tiles);
    device::mbarrier_wait(shared.k_empty(k_stage), parity_of<tile.key_stages>(tiles) ^ 1);
    load_keys(maps.k, shared.k(k_stage), shared.k_full(k_stage));
#pragma unroll 1
    for (int i = 0; i < t->blocks * p.heads_per_part; ++i) {
      const auto it = static_cast<unsigned>(t->first_step + i);
      const VisitedStep visited = visited_step(p, i, t->blocks);
      const int block = t->last_block - visited.down, head = t->part * p.heads_per_part + visited.head;
      const int row = t->q.row + block * Shared::kBlock;
      const unsigned stage = stage_of<tile.query_stages>(it);
      Mbarrier* full = shared.full(stage);
      device::mbarrier_wait(shared.empty(stage), parity_of<tile.query_stages>(it) ^ 1);
      device::mbarrier_arrive_expect(full, 2 * Shared::kQueryBytes + tile.statistics_bytes());
      load_panels<kPanels>(shared.q(stage), &maps.q, full, packed, Shared::kBlock, row, head, t->q.batch);
      device::bulk_load(shared.statistics(stage),
                        p.statistics + block_of_head(p, t->first_block + block, head) *
                                           statistics_stride(Shared::kBlock, tile.dropout),
                        tile.statistics_bytes(), full);
      load_panels<kPanels>(shared.dout(stage), &maps.dout, full, packed, Shared::kBlock, row, head, t->q.batch);
      if (i == 0) {
        const unsigned v_stage = stage_of<tile.value_stages>(tiles);
        device::mbarrier_wait(shared.v_empty(v_stage), parity_of<tile.value_stages>(tiles) ^ 1);
        load_keys(maps.v, shared.v(v_stage), shared.v_full(v_stage));
      }
    }
  }
}

// One of three threads. Adds every third half of dq to global memory when its turn has come. The latencies of one add
// (turn, copy, completion, release) sum to about 3,000 cycles, so one thread could not keep up.
//
// Halves are numbered over all tiles. The consumers hand over each step's dq one step late, so halves 0 and 1 belong to
// no step.
template <BackwardTile tile>
__device__ __forceinline__ void add_dq(const BackwardParams& p, const BackwardShared<tile>& shared, int adder) {
  using Shared = BackwardShared<tile>;
  unsigned x = static_cast<unsigned>(adder), first = 2;  // the next half, and the first one of the tile
  for (unsigned slot = 0;; ++slot) {
    device::mbarrier_wait(shared.slot_full(slot), slot / kKeySlots & 1);
    const KeyTile* t = shared.slot(slot);
    if (t->blocks < 0) break;
    if (x < 2) {
      device::mbarrier_wait(shared.dq_full(x), 0);
      device::mbarrier_arrive(shared.dq_empty(x));
      x += kAdders;
    }
    const unsigned end = first + 2 * static_cast<unsigned>(t->blocks * p.heads_per_part);
#pragma unroll 1
    for (; x < end; x += kAdders) {
      const unsigned half = x & 1;
      const VisitedStep visited = visited_step(p, static_cast<int>(x - first) / 2, t->blocks);
      const int block = t->last_block - visited.down, head = t->part * p.heads_per_part + visited.head;
      const int64_t at = block_of_head(p, t->first_block + block, head) * 2 + half;
      const VisitingTiles visiting = visiting_tiles(p.window, block, t->queries, t->keys, Shared::kBlock);
      const int tiles_before = t->tile() - visiting.first;
      if (tiles_before > 0)
        while (device::load_acquire(p.tiles_added + at) != tiles_before) {}
      device::mbarrier_wait(shared.dq_full(x % 6), x / 6 & 1);
      float* sums = p.dq_sums + at * (Shared::kHalfBytes / 4);
      if (tiles_before == 0)  // the first tile stores, so the sums need no clearing
        device::bulk_store(sums, shared.dq(half), Shared::kHalfBytes);
      else
        device::bulk_add(sums, reinterpret_cast<const float*>(shared.dq(half)), Shared::kHalfBytes);
      device::bulk_commit();
      device::bulk_wait_read<0>();
      device::mbarrier_arrive(shared.dq_empty(half));
      if (t->tile() + 1 < visiting.end) {
        // Without the fence or the release, adds overtake each other and results differ from run to run (measured).
        device::bulk_wait<0>();
        device::fence_async();
        device::store_release(p.tiles_added + at, tiles_before + 1);
      }
    }
    first = end;
    device::mbarrier_arrive(shared.slot_empty(slot));
  }
  device::bulk_wait<0>();
}

}  // namespace warpsmith::attention
