#pragma once
#include <algorithm>

#include "attention_sm90_consumer.cuh"
#include "device/launch.h"
#include "device/register_budget.h"
#include "device/tensor_map.h"

// A whole Hopper pipeline on the vocabulary, as a test of both: the forward of attention, bf16, head dimension 128.
// sim_attention_sm90.cpp proves it on the host, planted_attention.cpp plants bugs in it, tools/gpu/attention_fixture.py
// measures it on a card. It is not an op: nothing ships it.
//
//   o = softmax(scale * q k^T) v, lse = log(sum(exp(scale * q k^T)))
//   q, o: (batch, queries, heads, 128); k, v: (batch, keys, key_heads, 128), contiguous; heads % key_heads == 0, query
//   head h reads key head h / (heads / key_heads). lse: (batch, heads, queries). causal: query i sees the keys up to
//   i + keys - queries; a row that sees none gives o = 0, lse = -inf. Scores, sums and o accumulate in fp32,
//   probabilities are rounded to bf16. Reads q once; k and v once a query tile; writes o and lse once.
//
// One block a multiprocessor, three warpgroups, tiles of 128 query rows taken from a counter:
//   warpgroup 0: the loader (one thread) publishes tiles in a ring of slots, and copies q and blocks of 128 keys or
//                values into rings of buffers; two storing warps copy o to global memory;
//   warpgroups 1 and 2: 64 query rows each. A step multiplies q with a block of keys while the probabilities of the
//                block before are multiplied with its values; the exponentials of the first product are computed in the
//                shadow of the second. Blocks go from the last key to the first, so only the first ones need a mask.
//                The last product of a tile runs beside the first product of the next tile.
// Finished rows of o go through the shared memory of the tile's q.
namespace warpsmith::attention_sm90 {

template <bool causal, Bug bug = Bug::none> __global__ void __launch_bounds__(kThreads, 1)
    forward(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
            const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap o,
            const __grid_constant__ Params p) {
  WARPSMITH_DYNAMIC_SHARED(memory);
  WARPSMITH_SHARED(Mbarrier, query_full, 2 * kQueryStages);
  WARPSMITH_SHARED(Mbarrier, query_empty, 2 * kQueryStages);
  WARPSMITH_SHARED(Mbarrier, block_full, kBlockStages);
  WARPSMITH_SHARED(Mbarrier, block_empty, kBlockStages);
  WARPSMITH_SHARED(Mbarrier, slot_full, kTileSlots);
  WARPSMITH_SHARED(Mbarrier, slot_empty, kTileSlots);
  WARPSMITH_SHARED(Tile, slots, kTileSlots);
  WARPSMITH_SHARED(float, scratch, 1);
  const Shared shared{memory,     memory + kQueryStages * 2 * kQueryBytes,
                      query_full, query_empty,
                      block_full, block_empty,
                      slot_full,  slot_empty,
                      slots,      scratch};
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2 * kQueryStages; ++i) {
      device::mbarrier_init(query_full + i, 1);
      device::mbarrier_init(query_empty + i, 1);
    }
    for (int i = 0; i < kBlockStages; ++i) {
      device::mbarrier_init(block_full + i, 1);
      device::mbarrier_init(block_empty + i, kConsumerWarps);
    }
    for (int i = 0; i < kTileSlots; ++i) {
      device::mbarrier_init(slot_full + i, 1);
      device::mbarrier_init(slot_empty + i, kConsumerWarps + kStoringWarps);
    }
    device::mbarrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);
  if (warpgroup == 0) {
    if (bug != Bug::registers_kept) device::decrease_registers<kLoaderRegisters>();
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
    if (warp == 0) {
      if (threadIdx.x == 0) load_tiles<causal, bug>(p, &q, &k, &v, shared);
    } else if (warp <= kStoringWarps) {
      store_tiles<bug>(&o, shared, warp - 1);
    }
  } else {
    device::increase_registers<kConsumerRegisters>();
    const long long start = clock64();
    Consumer<causal, bug>(p, shared, warpgroup - 1).run();
    if (p.cycles && threadIdx.x % 128 == 0) atomicMax(p.cycles, static_cast<int>(clock64() - start));
  }
}

struct Problem {
  const bfloat16 *q, *k, *v;
  bfloat16* o;
  float* lse;
  int *workspace, *cycles;
  int batch, queries, keys, heads, key_heads;
  float scale;
};

// (batch, length, heads, 128) as (64, length, 2, heads, batch): one copy brings `rows` rows as two panels of 64
// columns.
inline Status head_map(TensorMap& map, const bfloat16* base, int batch, int length, int heads, int rows) {
  const int64_t row_bytes = int64_t{heads} * kHeadDim * 2;
  return make_tensor_map(map, {.base = base,
                               .dtype = Dtype::bfloat16,
                               .rank = 5,
                               .sizes = {kPanelColumns, length, 2, heads, batch},
                               .strides_bytes = {0, row_bytes, kPanelColumns * 2, kHeadDim * 2, row_bytes * length},
                               .box = {kPanelColumns, rows, 2, 1, 1},
                               .swizzle = Swizzle::bytes128});
}

template <bool causal, Bug bug = Bug::none> Status run(const Problem& x, void* stream) {
  TensorMap q, k, v, o;
  WARPSMITH_RETURN_IF_FAILED(head_map(q, x.q, x.batch, x.queries, x.heads, kGroupRows));
  WARPSMITH_RETURN_IF_FAILED(head_map(k, x.k, x.batch, x.keys, x.key_heads, kBlockKeys));
  WARPSMITH_RETURN_IF_FAILED(head_map(v, x.v, x.batch, x.keys, x.key_heads, kBlockKeys));
  WARPSMITH_RETURN_IF_FAILED(head_map(o, x.o, x.batch, x.queries, x.heads, kGroupRows));
  DeviceProperties device;
  WARPSMITH_RETURN_IF_FAILED(device_properties(device));
  Params p{};
  p.lse = x.lse;
  p.workspace = x.workspace;
  p.cycles = x.cycles;
  p.batch = x.batch;
  p.queries = x.queries;
  p.keys = x.keys;
  p.heads = x.heads;
  p.key_heads = x.key_heads;
  p.row_tiles = (x.queries + kTileRows - 1) / kTileRows;
  p.tiles = p.row_tiles * x.batch * x.heads;
  p.scale_log2 = x.scale * 1.44269504088896341f;
  // Key heads whose keys and values fit into 32 MiB of the L2 cache, a power of two, in query heads.
  constexpr int64_t kCacheBytes = 32 << 20;
  const int heads_per_key_head = x.heads / x.key_heads;
  const int64_t fit = kCacheBytes / (int64_t{x.keys} * kHeadDim * 4);
  int key_heads = 1;
  while (2 * key_heads <= fit && 2 * key_heads * heads_per_key_head <= x.batch * x.heads) key_heads *= 2;
  p.heads_together = key_heads * heads_per_key_head;
  const LaunchConfig config{.grid = static_cast<unsigned>(std::min(device.multiprocessors, p.tiles)),
                            .block = kThreads,
                            .dynamic_shared_bytes = kSharedBytes};
  return launch(forward<causal, bug>, config, stream, q, k, v, o, p);
}

}  // namespace warpsmith::attention_sm90
