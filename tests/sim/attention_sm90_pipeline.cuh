#pragma once
#include "device/named_barrier.h"
#include "device/swizzle.h"
#include "device/tensor_copy.h"
#include "device/vector.h"

// The first warpgroup of the attention fixture (attention_sm90_fixture.cuh): tiles, the loader, the storing warps; and
// what all warpgroups share.
namespace warpsmith::attention_sm90 {

using device::Mbarrier;
using device::Ring;
using device::Swizzle;

constexpr int kHeadDim = 128;
constexpr int kGroupRows = 64, kTileRows = 2 * kGroupRows;
constexpr int kBlockKeys = 128;
constexpr int kThreads = 384;
constexpr int kQueryStages = 2, kBlockStages = 5, kTileSlots = 2;
constexpr int kPanelColumns = 64;  // of bf16: the 128 bytes that a swizzled row has
constexpr int kQueryBytes = kGroupRows * kHeadDim * 2, kBlockBytes = kBlockKeys * kHeadDim * 2;
constexpr int kSharedBytes = kQueryStages * 2 * kQueryBytes + kBlockStages * kBlockBytes;
constexpr int kLoaderRegisters = 40, kConsumerRegisters = 232;  // 128 * 40 + 256 * 232 = 384 * 168
constexpr int kConsumerWarps = 8, kStoringWarps = 2;
constexpr int kStoreThreads = 128 + 32;  // at the barrier between a consumer warpgroup and its storing warp

struct Params {
  float* lse;
  int* workspace;  // tile counter and finished blocks: 0 before the first launch and after each
  int* cycles;     // null, or the longest life of a consumer warpgroup, as a maximum
  int batch, queries, keys, heads, key_heads;
  int row_tiles, tiles, heads_together;
  float scale_log2;
  uint32_t zero;  // 0, which the compiler does not know
};

// Bugs to plant: what is left out, weakened or wrong.
enum class Bug {
  none,
  scores_not_waited_for,
  output_wait_too_weak,
  no_wgmma_fence,
  not_committed,
  wrong_parity,
  half_the_bytes,
  no_empty_arrival,
  released_early,
  slot_reused_early,
  values_before_keys,
  wrong_swizzle,
  probabilities_overwritten,
  no_named_barrier,
  one_warp_not_at_barrier,
  one_barrier_for_two_stages,
  no_proxy_fence,
  store_not_waited_for,
  no_mask,
  not_rescaled,
  registers_kept,
};

// A barrier for each stage: with one for both, consumers that run a tile ahead would arrive twice in a phase.
template <Bug bug> __device__ __forceinline__ int store_barrier(int stage, int group) {
  return 1 + (bug == Bug::one_barrier_for_two_stages ? 0 : stage * 2) + group;
}

// A tile as the loader publishes it. blocks < 0: there are no more.
struct alignas(16) Tile {
  int blocks, row_tile, head, batch;
};

struct Shared {
  unsigned char *queries, *ring;
  Mbarrier *query_full, *query_empty, *block_full, *block_empty, *slot_full, *slot_empty;
  Tile* slots;
  float* scratch;

  __device__ __forceinline__ unsigned char* query(int stage, int group) const {
    return queries + (stage * 2 + group) * kQueryBytes;
  }
  __device__ __forceinline__ unsigned char* block(int stage) const { return ring + stage * kBlockBytes; }
};

// The n-th tile. heads_together heads share the L2 cache; among them causal tiles go from the longest to the shortest.
template <bool causal> __device__ __forceinline__ Tile tile_at(const Params& p, int n) {
  const int per_section = p.heads_together * p.row_tiles, section = n / per_section;
  const int within = n - section * per_section;
  const int first_head = section * p.heads_together;
  const int heads = min(p.heads_together, p.batch * p.heads - first_head);
  const int row_tile = causal ? p.row_tiles - 1 - within / heads : within % p.row_tiles;
  const int head = first_head + (causal ? within % heads : within / p.row_tiles);
  int keys = p.keys;
  if (causal) keys = min(keys, min((row_tile + 1) * kTileRows, p.queries) + p.keys - p.queries);
  // Rows that see no key take one block, which is masked throughout.
  const int blocks = keys <= 0 ? 1 : (keys + kBlockKeys - 1) / kBlockKeys;
  return {blocks, row_tile, head % p.heads, head / p.heads};
}

template <bool causal, Bug bug> __device__ __forceinline__ void load_tiles(const Params& p, const TensorMap* q,
                                                                           const TensorMap* k, const TensorMap* v,
                                                                           const Shared& shared) {
  Ring<kQueryStages> queries;
  Ring<kBlockStages> ring;
  Ring<kTileSlots> slots;
  device::prefetch_tensor_map(q);
  device::prefetch_tensor_map(k);
  device::prefetch_tensor_map(v);
  const auto load_block = [&](const TensorMap* map, int block, int head, int batch) {
    Mbarrier* full = shared.block_full + ring.stage;
    device::mbarrier_wait(shared.block_empty + ring.stage, ring.parity ^ 1);
    device::mbarrier_arrive_expect(full, bug == Bug::half_the_bytes ? kBlockBytes / 2 : kBlockBytes);
    device::tensor_load(shared.block(ring.stage), map, full, {0, block * kBlockKeys, 0, head, batch});
    ring.next();
  };
  const int heads_per_key_head = p.heads / p.key_heads;
  int last_head = -1, last_batch = 0;  // whose first block of values is still to be loaded
  for (int n = blockIdx.x;;) {
    Tile tile{-1, 0, 0, 0};
    int next = 0;
    if (n < p.tiles) {
      next = atomicAdd(p.workspace, 1) + static_cast<int>(gridDim.x);  // arrives during the loads
      tile = tile_at<causal>(p, n);
    }
    if (bug != Bug::slot_reused_early) device::mbarrier_wait(shared.slot_empty + slots.stage, slots.parity ^ 1);
    device::store(shared.slots + slots.stage, tile);
    device::mbarrier_arrive(shared.slot_full + slots.stage);
    slots.next();
    if (tile.blocks < 0) break;
    const int head = tile.head / heads_per_key_head;
    for (int group = 0; group < 2; ++group) {
      const int at = queries.stage * 2 + group;
      device::mbarrier_wait(shared.query_empty + at, queries.parity ^ 1);
      device::mbarrier_arrive_expect(shared.query_full + at, kQueryBytes);
      device::tensor_load(shared.query(queries.stage, group), q, shared.query_full + at,
                          {0, tile.row_tile * kTileRows + group * kGroupRows, 0, tile.head, tile.batch});
      if (group == 0) load_block(k, tile.blocks - 1, head, tile.batch);
    }
    queries.next();
    // In the order of use: keys are one step ahead of values, from tile to tile as well.
    if (last_head >= 0) load_block(v, 0, last_head, last_batch);
    for (int block = tile.blocks - 2; block >= 0; --block) {
      if (bug == Bug::values_before_keys) load_block(v, block + 1, head, tile.batch);
      load_block(k, block, head, tile.batch);
      if (bug != Bug::values_before_keys) load_block(v, block + 1, head, tile.batch);
    }
    last_head = head;
    last_batch = tile.batch;
    n = next;
  }
  if (last_head >= 0) load_block(v, 0, last_head, last_batch);
  // The last block resets the counters. The fences order it behind the other blocks' use of them.
  __threadfence();
  if (atomicAdd(p.workspace + 1, 1) == static_cast<int>(gridDim.x) - 1) {
    __threadfence();
    atomicExch(p.workspace, 0);
    atomicExch(p.workspace + 1, 0);
  }
}

// One warp for each consumer warpgroup: copies its finished rows to o, then gives their buffer back to the loader.
template <Bug bug> __device__ __forceinline__ void store_tiles(const TensorMap* o, const Shared& shared, int group) {
  Ring<kQueryStages> queries;
  Ring<kTileSlots> slots;
  const bool leader = threadIdx.x % 32 == 0;
  for (;;) {
    device::mbarrier_wait(shared.slot_full + slots.stage, slots.parity);
    const Tile tile = device::load(shared.slots + slots.stage);
    __syncwarp(0xffffffffu);  // all lanes have read before one of them releases the slot
    if (leader) device::mbarrier_arrive(shared.slot_empty + slots.stage);
    slots.next();
    if (tile.blocks < 0) break;
    if (bug != Bug::no_named_barrier)
      device::named_barrier_wait(store_barrier<bug>(queries.stage, group), kStoreThreads);
    if (leader) {
      device::tensor_store(o, shared.query(queries.stage, group),
                           {0, tile.row_tile * kTileRows + group * kGroupRows, 0, tile.head, tile.batch});
      device::bulk_commit();
      if (bug != Bug::store_not_waited_for) device::bulk_wait_read<0>();
      device::mbarrier_arrive(shared.query_empty + queries.stage * 2 + group);
    }
    __syncwarp(0xffffffffu);
    queries.next();
  }
  if (leader) device::bulk_wait_read<0>();
}

}  // namespace warpsmith::attention_sm90
