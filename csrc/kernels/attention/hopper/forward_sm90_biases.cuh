#pragma once
#include "device/matrix_access.h"
#include "device/tensor_copy.h"
#include "kernels/attention/hopper/forward_sm90_pipeline.cuh"

// The way of a bias tensor through shared memory in the Hopper forward (forward_sm90.cuh): a thread of warpgroup 0
// fetches a tile of 64 queries x block_keys for each consumer warpgroup and visit, and the consumers read matrices.
// Loaded by the consumers as their accumulators lie, 4 bytes a thread touched 8 rows.
//
// A tile is panels of 64 keys with rows of 128 bytes, swizzled, as those of the queries. A bias that is broadcast over
// queries has one row. Keys that the bias lacks are 0.
namespace warpsmith::attention {

// One thread.
template <ForwardTile tile> __device__ __forceinline__ void load_biases(const ForwardParams& p, const TensorMap* map,
                                                                        const ForwardShared<tile>& shared) {
  const BiasParams& biases = p.biases;
  device::prefetch_tensor_map(map);
  Ring<kTileSlots> slots;
  unsigned parity = 0;  // of the visit
  for (;;) {
    device::mbarrier_wait(shared.slot_full + slots.stage, slots.parity);
    const Tile& t = shared.slots[slots.stage];
    const int visits = device::load(&t.visits);
    if (visits < 0) break;
    for (int visit = 0; visit < visits; ++visit, parity ^= 1) {
      const int first_key = t.block(visit) * tile.block_keys;
#pragma unroll
      for (int group = 0; group < tile.groups; ++group) {
        const int first_query = t.first_query + group * kGroupRows;
        Mbarrier* full = shared.bias_full + group;
        device::mbarrier_wait(shared.bias_empty + group, parity ^ 1);
        device::mbarrier_arrive_expect(full, biases.rows * tile.block_keys * 2);
#pragma unroll
        for (int panel = 0; panel < tile.block_keys / kPanelColumns; ++panel)
          device::tensor_load(
              shared.biases(group) + panel * kGroupRows * kPanelRowBytes, map, full,
              {first_key + panel * kPanelColumns, biases.rows != 1 ? first_query : 0,
               biases.bias_strides.head != 0 ? t.head : 0, biases.bias_strides.batch != 0 ? t.sequence : 0});
      }
    }
    device::mbarrier_arrive(shared.slot_empty + slots.stage);
    slots.next();
  }
}

// A consumer's side. A thread has the keys and rows of its accumulators (bias_sm90.cuh).
template <class T, ForwardTile tile> struct StagedBiases {
  static constexpr int kColumns = tile.block_keys / 16;
  using Query = QueryBiases<T, tile.block_keys, tile.biases>;
  using Packed = uint32_t[kColumns][4];  // ordered as OnlineSoftmax's

  const BiasParams& p;
  const ForwardShared<tile>& shared;
  unsigned& parity;  // of the visit
  int group, warp, lane;

  // Four matrices: keys 16 c to 16 c + 15 of the warp's 16 rows.
  __device__ __forceinline__ void read(uint32_t (&pairs)[4], int c) const {
    const int row = p.rows == 1 ? 0 : warp * 16 + lane % 16;
    const auto first = static_cast<uint32_t>(row * kPanelRowBytes + lane / 16 * 16);
    const uint32_t panel = c / 4 * kGroupRows * kPanelRowBytes, column_bytes = c % 4 * 32;
    device::load_matrix(pairs,
                        shared.biases(group) + panel + (device::swizzled(Swizzle::bytes128, first) ^ column_bytes));
  }
  __device__ __forceinline__ void wait() const { device::mbarrier_wait(shared.bias_full + group, parity); }
  __device__ __forceinline__ void release() const {
    __syncwarp(0xffffffffu);
    if (lane == 0) device::mbarrier_arrive(shared.bias_empty + group);
    parity ^= 1;
  }
  __device__ __forceinline__ void load(Packed& to) const {
    wait();
#pragma unroll
    for (int c = 0; c < kColumns; ++c) read(to[c], c);
    release();
  }
  // Without registers for all biases.
  __device__ __forceinline__ void load_and_add(float (&s)[tile.block_keys / 2], float scale) const {
    wait();
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      uint32_t pairs[4];
      read(pairs, c);
#pragma unroll
      for (int i = 0; i < 4; ++i) Query::add_pair(s, 8 * c + 2 * i, pairs[i], scale);
    }
    release();
  }
};

}  // namespace warpsmith::attention
