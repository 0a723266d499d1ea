#pragma once
#include "device/async_copy.h"
#include "device/matrix_access.h"
#include "device/tensor_copy.h"
#include "kernels/attention/forward_sm90_pipeline.cuh"

// The way of a bias tensor through shared memory in the Hopper forward (forward_sm90.cuh): one warp of warpgroup 0
// fetches a tile of 64 queries x block_keys for each consumer warpgroup and visit, and the consumers read matrices.
// Loaded by the consumers as their accumulators lie, 4 bytes a thread touched 8 rows.
//
// A tile is panels of 64 keys with rows of 128 bytes, swizzled, as those of the queries. A bias that is broadcast over
// queries has one row. Keys that the bias lacks are 0.
namespace warpsmith::attention {

// Pairs of keys, for biases that TMA cannot read. Called by the whole warp.
template <ForwardTile tile> __device__ __forceinline__ void copy_biases(unsigned char* to, const BiasParams& p,
                                                                        const Tile& t, int first_query, int first_key) {
  constexpr int kPerRow = tile.block_keys / 2;
  const unsigned char* from = static_cast<const unsigned char*>(p.bias) +
                              2 * (t.sequence * p.bias_strides.batch + t.head * p.bias_strides.head + first_key);
  const int64_t row_bytes = 2 * p.bias_strides.q;
  const int last_query = t.queries - 1, keys = t.keys - first_key;
#pragma unroll 8
  for (int i = static_cast<int>(threadIdx.x % 32); i < kGroupRows * kPerRow; i += 32) {
    const int row = i / kPerRow, column = i % kPerRow * 2;
    const uint32_t at =
        static_cast<uint32_t>(column / kPanelColumns * kGroupRows * kPanelRowBytes) +
        device::swizzled(Swizzle::bytes128, static_cast<uint32_t>(row * kPanelRowBytes + column % kPanelColumns * 2));
    device::copy_async<4>(to + at, from + min(first_query + row, last_query) * row_bytes + 2 * column, column < keys);
  }
  device::copy_async_commit();
}

// One thread with TMA. Else one warp, and a warpgroup's tile is announced after the copies of the other one have been
// issued, so that each has about half a step to arrive.
template <ForwardTile tile> __device__ __forceinline__ void load_biases(const ForwardParams& p, const TensorMap* map,
                                                                        const ForwardShared<tile>& shared) {
  static_assert(tile.groups == 2);
  const BiasParams& biases = p.biases;
  const bool leader = threadIdx.x % 32 == 0;
  if (biases.tensor_map && !leader) return;
  const auto announce = [&](int stage, int group) {
    __syncwarp(0xffffffffu);
    if (leader) device::mbarrier_arrive(shared.bias_full + stage * tile.groups + group);
  };
  Ring<kTileSlots> slots;
  Ring<tile.bias_stages> ring;
  int before = 0;  // the stage of the visit before
  for (;;) {
    device::mbarrier_wait(shared.slot_full + slots.stage, slots.parity);
    const Tile& t = shared.slots[slots.stage];
    const int visits = device::load(&t.visits);
    if (visits < 0) break;
    for (int visit = 0; visit < visits; ++visit) {
      const int first_key = t.block(visit) * tile.block_keys;
#pragma unroll
      for (int group = 0; group < tile.groups; ++group) {
        const int first_query = t.first_query + group * kGroupRows;
        unsigned char* to = shared.biases(ring.stage, group);
        Mbarrier* full = shared.bias_full + ring.stage * tile.groups + group;
        device::mbarrier_wait(shared.bias_empty + ring.stage * tile.groups + group, ring.parity ^ 1);
        if (!biases.tensor_map) {
          copy_biases<tile>(to, biases, t, first_query, first_key);
          device::copy_async_wait<1>();
          if (group > 0)
            announce(ring.stage, 0);
          else if (visit > 0)
            announce(before, 1);
        } else {
          device::mbarrier_arrive_expect(full, biases.rows * tile.block_keys * 2);
#pragma unroll
          for (int panel = 0; panel < tile.block_keys / kPanelColumns; ++panel)
            device::tensor_load(
                to + panel * kGroupRows * kPanelRowBytes, map, full,
                {first_key + panel * kPanelColumns, biases.rows != 1 ? first_query : 0,
                 biases.bias_strides.head != 0 ? t.head : 0, biases.bias_strides.batch != 0 ? t.sequence : 0});
        }
      }
      before = ring.stage;
      ring.next();
    }
    if (!biases.tensor_map) {
      device::copy_async_wait<0>();
      announce(before, 1);  // after which no lane reads the slot
    }
    if (leader) device::mbarrier_arrive(shared.slot_empty + slots.stage);
    slots.next();
  }
}

// A consumer's side. A thread has the keys and rows of its accumulators (bias_sm90.cuh).
template <class T, ForwardTile tile> struct StagedBiases {
  static constexpr int kColumns = tile.block_keys / 16;
  using Packed = uint32_t[kColumns][4];  // ordered as OnlineSoftmax's

  const ForwardShared<tile>& shared;
  Ring<tile.bias_stages>& ring;
  int group, row, lane;  // row: of this lane's address in the first matrices

  // Four matrices: keys 16 c to 16 c + 15 of the warp's 16 rows.
  __device__ __forceinline__ void read(uint32_t (&pairs)[4], int c) const {
    const auto first = static_cast<uint32_t>(row * kPanelRowBytes + lane / 16 * 16);
    const uint32_t panel = c / 4 * kGroupRows * kPanelRowBytes, column_bytes = c % 4 * 32;
    device::load_matrix(
        pairs, shared.biases(ring.stage, group) + panel + (device::swizzled(Swizzle::bytes128, first) ^ column_bytes));
  }
  __device__ __forceinline__ void wait() const {
    device::mbarrier_wait(shared.bias_full + ring.stage * tile.groups + group, ring.parity);
  }
  __device__ __forceinline__ void release() const {
    __syncwarp(0xffffffffu);
    if (lane == 0) device::mbarrier_arrive(shared.bias_empty + ring.stage * tile.groups + group);
    ring.next();
  }
  __device__ __forceinline__ void load(Packed& to) const {
    wait();
#pragma unroll
    for (int c = 0; c < kColumns; ++c) read(to[c], c);
    release();
  }
  static __device__ __forceinline__ void add(float* s, const uint32_t (&pairs)[4], float to_scores) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[2 * i] = fmaf(device::low_half<T>(pairs[i]), to_scores, s[2 * i]);
      s[2 * i + 1] = fmaf(device::high_half<T>(pairs[i]), to_scores, s[2 * i + 1]);
    }
  }
  static __device__ __forceinline__ void add(float (&s)[tile.block_keys / 2], const Packed& pairs, float to_scores) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) add(s + 8 * c, pairs[c], to_scores);
  }
  // Without registers for all biases.
  __device__ __forceinline__ void load_and_add(float (&s)[tile.block_keys / 2], float to_scores) const {
    wait();
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      uint32_t pairs[4];
      read(pairs, c);
      add(s + 8 * c, pairs, to_scores);
    }
    release();
  }
};

}  // namespace warpsmith::attention
