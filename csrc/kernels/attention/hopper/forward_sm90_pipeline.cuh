#pragma once
#include "device/fence.h"
#include "device/named_barrier.h"
#include "device/swizzle.h"
#include "device/tensor_copy.h"
#include "device/vector.h"
#include "kernels/attention/attention_config.h"
#include "kernels/attention/hopper/bias_sm90.cuh"
#include "kernels/attention/hopper/dropout_sm90.cuh"
#include "kernels/attention/mask.cuh"
#include "kernels/attention/scheduler.cuh"

// The first warpgroup of the Hopper forward (forward_sm90.cuh), with the loader and the storing warps, and the shared
// memory and barriers of all warpgroups.
namespace warpsmith::attention {

using device::Mbarrier;
using device::Ring;
using device::Swizzle;

constexpr int kGroupRows = 64;     // query rows of a consumer warpgroup: the M of wgmma
constexpr int kPanelColumns = 64;  // 16-bit columns of a swizzled row of 128 bytes
constexpr int kPanelRowBytes = 128;
constexpr int kMostQueryStages = 2;
constexpr int kTileSlots = 4;  // the loader is at most so many tiles ahead of the stores

struct ForwardParams {
  Schedule schedule;
  Window window;
  const int32_t *cu_seqlens_q, *cu_seqlens_k;  // null: not packed
  int batch, heads, heads_per_key_head;
  int queries, keys;     // of a sequence; packed: the maxima
  int total_q, total_k;  // packed: tokens
  int head_dim_v;
  float *lse, *lse_rest;      // null: not wanted
  const void* sink;           // null: none
  bool sink_is_float;         // else of the dtype of q
  float to_logits;            // factor of the scores, with softcap and biases, that makes logits
  float scale_log2;           // log2(e) * to_logits
  float softcap, to_softcap;  // softcap 0: none. Else s becomes softcap * tanh(s * to_softcap)
  DropoutParams dropout;
  BiasParams biases;
  uint32_t zero;  // always 0, but unknown to the compiler
};

// A tile of query rows as the loader publishes it. Stays in shared memory until its rows are stored, so that it takes
// no registers of the consumers.
struct alignas(16) Tile {
  int visits;       // blocks of keys; -1: there are no more tiles
  unsigned number;  // counts the tiles of this thread block, from 0
  int first_query, queries, keys;
  int shift, head, key_head;
  MapPlace q, k;                                        // of the sequence
  int masked, right, right_end, left_begin, whole_end;  // as in BlockPlan
  uint32_t dropout_row;                                 // counter word 1 of the first 16 queries
  int sequence;                                         // packed or not; set where the kernel adds biases
  int sinks;                                            // 0: tokens of no sequence, which have no sink
  int64_t lse;                                          // offset of the sequence's first row

  __device__ __forceinline__ int block(int visit) const {
    return BlockPlan{visits, masked, right_end, left_begin, right, whole_end}.block(visit);
  }
};

// One variable, so that one register holds the address of everything in it.
template <ForwardTile tile> struct ForwardState {
  Mbarrier query_full[tile.groups * tile.query_stages], query_empty[tile.groups * tile.query_stages];
  Mbarrier block_full[tile.block_stages], block_empty[tile.block_stages];
  Mbarrier slot_full[kTileSlots], slot_empty[kTileSlots];
  Mbarrier bias_full[tile.groups], bias_empty[tile.groups];
  Tile slots[kTileSlots];
  float scratch[4];
};

template <ForwardTile tile> struct ForwardShared {
  static constexpr int kPanels = tile.head_dim / kPanelColumns;
  unsigned char* memory;
  Mbarrier *query_full, *query_empty, *block_full, *block_empty, *slot_full, *slot_empty, *bias_full, *bias_empty;
  Tile* slots;
  float* scratch;

  __device__ __forceinline__ ForwardShared(unsigned char* dynamic, ForwardState<tile>* s)
      : memory(dynamic),
        query_full(s->query_full),
        query_empty(s->query_empty),
        block_full(s->block_full),
        block_empty(s->block_empty),
        slot_full(s->slot_full),
        slot_empty(s->slot_empty),
        bias_full(s->bias_full),
        bias_empty(s->bias_empty),
        slots(s->slots),
        scratch(s->scratch) {}

  __device__ __forceinline__ unsigned char* query(int stage, int group) const {
    return memory + (stage * tile.groups + group) * tile.query_bytes();
  }
  __device__ __forceinline__ unsigned char* block(int stage) const {
    return memory + tile.query_stages * tile.groups * tile.query_bytes() + stage * tile.block_bytes();
  }
  __device__ __forceinline__ unsigned char* biases(int group) const {
    return block(tile.block_stages) + group * tile.bias_bytes();
  }
};

// The named barrier at which a consumer warpgroup meets its storing warp. Each query stage has its own barrier: with
// one for both stages, a consumer that runs a tile ahead would arrive twice in one phase.
constexpr int kStoreThreads = 128 + 32;
__device__ __forceinline__ int store_barrier(int stage, int group) { return 1 + stage + group * kMostQueryStages; }

template <ForwardTile tile>
__device__ __forceinline__ void describe_tile(const ForwardParams& p, const TileIndex& at, Tile* t) {
  int queries = p.queries, keys = p.keys;
  MapPlace q_place{0, at.batch}, k_place{0, at.batch};
  int64_t lse = (static_cast<int64_t>(at.batch) * p.heads + at.head) * p.queries;
  if (p.cu_seqlens_q != nullptr) {
    const Sequence q = sequence_at(p.cu_seqlens_q, at.batch, p.batch, p.total_q, p.queries);
    queries = q.length;
    q_place = map_place(q);
    Sequence k{0, 0};
    if (at.batch < p.batch) k = sequence_at(p.cu_seqlens_k, at.batch, p.batch, p.total_k, p.keys);
    keys = k.length;
    k_place = map_place(k);
    lse = static_cast<int64_t>(at.head) * p.total_q + q.start;
  }
  const int first_query = at.row_tile * tile.tile_rows();
  const BlockPlan plan =
      plan_blocks<tile.block_keys>(p.window, first_query, first_query + tile.tile_rows() - 1, queries, keys);
  device::store(&t->first_query, first_query);
  device::store(&t->queries, queries);
  device::store(&t->keys, keys);
  device::store(&t->shift, p.window.shift(queries, keys));
  device::store(&t->head, at.head);
  device::store(&t->key_head, at.head / p.heads_per_key_head);
  device::store(&t->q, q_place);
  device::store(&t->k, k_place);
  device::store(&t->masked, plan.masked);
  device::store(&t->right, plan.right);
  device::store(&t->right_end, plan.right_end);
  device::store(&t->left_begin, plan.left_begin);
  device::store(&t->whole_end, plan.whole_end);
  if constexpr (tile.dropout) {
    const AttentionDropoutCounters& counters = p.dropout.counters;
    const int64_t row_block = attention_row_block(counters, p.cu_seqlens_q, at.batch);
    device::store(&t->dropout_row,
                  attention_dropout_row(counters, row_block, first_query / kAttentionDropoutQueries, at.head));
  }
  if constexpr (tile.biased())
    device::store(&t->sequence, min(at.batch, p.batch - 1));  // tokens of no sequence have no slope
  device::store(&t->sinks, at.batch < p.batch ? 1 : 0);
  device::store(&t->lse, lse);
  device::store(&t->visits, plan.blocks);
}

// Loads `rows` rows of a head as panels of 64 columns. Columns beyond the head dimension arrive as zeros.
template <int kPanels> __device__ __forceinline__ void load_rows(unsigned char* to, const TensorMap* map,
                                                                 Mbarrier* full, bool packed, int rows, int row,
                                                                 int head, int batch) {
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel)
    load_box(to + panel * rows * kPanelRowBytes, map, full, packed, panel * kPanelColumns, row, head, batch);
}

// The loader, one thread.
template <ForwardTile tile> __device__ __forceinline__ void load_tiles(const ForwardParams& p, const TensorMap* q,
                                                                       const TensorMap* k, const TensorMap* v,
                                                                       const ForwardShared<tile>& shared) {
  constexpr int kPanels = ForwardShared<tile>::kPanels;
  device::prefetch_tensor_map(q);
  device::prefetch_tensor_map(k);
  device::prefetch_tensor_map(v);
  const bool packed = p.cu_seqlens_q != nullptr;
  unsigned tiles = 0, blocks = 0;  // counts so far: the positions in the rings, in fewer registers than Ring takes
  const auto load_block = [&](const TensorMap* map, const Tile* t, int visit) {
    const unsigned stage = blocks % tile.block_stages, parity = blocks / tile.block_stages & 1;
    ++blocks;
    Mbarrier* full = shared.block_full + stage;
    device::mbarrier_wait(shared.block_empty + stage, parity ^ 1);
    device::mbarrier_arrive_expect(full, tile.block_bytes());
    load_rows<kPanels>(shared.block(stage), map, full, packed, tile.block_keys,
                       t->k.row + t->block(visit) * tile.block_keys, t->key_head, t->k.batch);
  };
  // Loads the last block of values of the previous tile. Values are loaded one step after keys, also across tiles
  // (unless tiles are serial). Until then nobody releases the tile's slot.
  const auto load_last_values = [&] {
    const Tile* t = shared.slots + (tiles - 1) % kTileSlots;
    load_block(v, t, t->visits - 1);
  };
  for (int n = static_cast<int>(blockIdx.x), next = 0;; n = next) {
    Tile* t = shared.slots + tiles % kTileSlots;
    device::mbarrier_wait(shared.slot_empty + tiles % kTileSlots, (tiles / kTileSlots & 1) ^ 1);
    const TileIndex at = tile_at<true>(p.schedule, n);
    if (at.batch >= 0) {
      next = next_tile(p.schedule, n);  // its latency overlaps with the loads
      describe_tile<tile>(p, at, t);
      device::store(&t->number, tiles);
    } else {
      device::store(&t->visits, -1);
    }
    device::mbarrier_arrive(shared.slot_full + tiles % kTileSlots);
    if (at.batch < 0) break;
    if (tile.serial()) load_block(k, t, 0);
    for (int group = 0; group < tile.groups; ++group) {
      const int stage = tiles % tile.query_stages, i = stage * tile.groups + group;
      device::mbarrier_wait(shared.query_empty + i, (tiles / tile.query_stages & 1) ^ 1);
      device::mbarrier_arrive_expect(shared.query_full + i, tile.query_bytes());
      load_rows<kPanels>(shared.query(stage, group), q, shared.query_full + i, packed, kGroupRows,
                         t->q.row + t->first_query + group * kGroupRows, t->head, t->q.batch);
      if (group == 0 && !tile.serial()) load_block(k, t, 0);
    }
    if (tiles > 0 && !tile.serial()) load_last_values();
    for (int visit = 1; visit < t->visits; ++visit) {
      load_block(k, t, visit);
      load_block(v, t, visit - 1);
    }
    ++tiles;
    if (tile.serial()) load_last_values();
  }
  if (tiles > 0 && !tile.serial()) load_last_values();
}

// One warp per consumer warpgroup. Copies finished rows to `out`, then returns their buffer to the loader.
template <ForwardTile tile> __device__ __forceinline__ void store_tiles(const ForwardParams& p, const TensorMap* out,
                                                                        const ForwardShared<tile>& shared, int group) {
  constexpr int kPanels = ForwardShared<tile>::kPanels;
  Ring<tile.query_stages> queries;
  Ring<kTileSlots> slots;
  const bool leader = threadIdx.x % 32 == 0;
  for (;;) {
    device::mbarrier_wait(shared.slot_full + slots.stage, slots.parity);
    const Tile& t = shared.slots[slots.stage];
    if (device::load(&t.visits) < 0) break;
    device::named_barrier_wait(store_barrier(queries.stage, group), kStoreThreads);
    const int first_query = device::load(&t.first_query) + group * kGroupRows;
    const unsigned char* from = shared.query(queries.stage, group);
    if (leader) {
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        if (panel * kPanelColumns >= p.head_dim_v) break;
        const unsigned char* rows = from + panel * kGroupRows * kPanelRowBytes;
        const int column = panel * kPanelColumns, row = t.q.row + first_query;
        if (p.cu_seqlens_q != nullptr)
          device::tensor_store(out, rows, {column, row, t.head, t.q.batch, kMapRows});
        else
          device::tensor_store(out, rows, {column, row, t.head, t.q.batch});
      }
      device::bulk_commit();
      device::bulk_wait_read<0>();
    }
    __syncwarp(0xffffffffu);
    if (leader) {
      device::mbarrier_arrive(shared.query_empty + queries.stage * tile.groups + group);
      device::mbarrier_arrive(shared.slot_empty + slots.stage);
    }
    queries.next();
    slots.next();
  }
}

}  // namespace warpsmith::attention
