#pragma once
#include "device/async_copy.h"
#include "device/matrix_access.h"
#include "kernels/attention/forward_sm90_pipeline.cuh"

// The way of a bias tensor through shared memory in the Hopper forward (forward_sm90.cuh): one warp of warpgroup 0
// copies, a tile of 64 queries x block_keys for each consumer warpgroup and visit, and the consumers read matrices.
// Loaded by the consumers as their accumulators lie, 4 bytes a thread touched 8 rows.
//
// A tile is panels of 64 keys with rows of 128 bytes, swizzled, as those of the queries. Keys that the sequence lacks
// are 0, and rows beyond its last query repeat that one.
namespace warpsmith::attention {

// Copies of kBytes each. Called by the whole warp.
template <int kBytes, ForwardTile tile> __device__ __forceinline__ void copy_biases(unsigned char* to,
                                                                                    const BiasParams& p, const Tile& t,
                                                                                    int first_query, int first_key) {
  constexpr int kElements = kBytes / 2, kPerRow = tile.block_keys / kElements;
  const int64_t row_bytes = 2 * p.bias_strides.q;
  const unsigned char* from = static_cast<const unsigned char*>(p.bias) +
                              2 * (t.sequence * p.bias_strides.batch + t.head * p.bias_strides.head + first_key);
  const int last_query = t.queries - 1, keys = t.keys - first_key;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x % 32); i < kGroupRows * kPerRow; i += 32) {
    const int row = i / kPerRow, column = i % kPerRow * kElements;
    const uint32_t at =
        static_cast<uint32_t>(column / kPanelColumns * kGroupRows * kPanelRowBytes) +
        device::swizzled(Swizzle::bytes128, static_cast<uint32_t>(row * kPanelRowBytes + column % kPanelColumns * 2));
    device::copy_async<kBytes>(to + at, from + min(first_query + row, last_query) * row_bytes + 2 * column,
                               column < keys);
  }
  device::copy_async_commit();
}

// One warp. A warpgroup's tile is announced after the next copies, of the other warpgroup, have been issued: so each
// has about half a step to arrive.
template <ForwardTile tile>
__device__ __forceinline__ void load_biases(const ForwardParams& p, const ForwardShared<tile>& shared) {
  static_assert(tile.groups == 2);
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
        device::mbarrier_wait(shared.bias_empty + group, parity ^ 1);
        const int first_query = t.first_query + group * kGroupRows;
        if (p.biases.vectors)
          copy_biases<16, tile>(shared.biases(group), p.biases, t, first_query, first_key);
        else
          copy_biases<4, tile>(shared.biases(group), p.biases, t, first_query, first_key);
        device::copy_async_wait<1>();
        if (visit > 0 || group > 0) device::mbarrier_arrive(shared.bias_full + (1 - group));
      }
    }
    device::copy_async_wait<0>();
    device::mbarrier_arrive(shared.bias_full + 1);
    __syncwarp(0xffffffffu);
    if (threadIdx.x % 32 == 0) device::mbarrier_arrive(shared.slot_empty + slots.stage);
    slots.next();
  }
}

// A consumer's side. A thread has the keys and rows of its accumulators (bias_sm90.cuh).
template <class T, ForwardTile tile> struct StagedBiases {
  static constexpr int kColumns = tile.block_keys / 16;
  using Packed = uint32_t[kColumns][4];  // ordered as OnlineSoftmax's

  const ForwardShared<tile>& shared;
  int group, warp, lane;
  unsigned parity;

  // Four matrices: keys 16 c to 16 c + 15 of the warp's 16 rows.
  __device__ __forceinline__ void read(uint32_t (&pairs)[4], int c) const {
    const auto first = static_cast<uint32_t>((warp * 16 + lane % 16) * kPanelRowBytes + lane / 16 * 16);
    const uint32_t panel = c / 4 * kGroupRows * kPanelRowBytes, column_bytes = c % 4 * 32;
    device::load_matrix(pairs,
                        shared.biases(group) + panel + (device::swizzled(Swizzle::bytes128, first) ^ column_bytes));
  }
  __device__ __forceinline__ void wait() const { device::mbarrier_wait(shared.bias_full + group, parity); }
  __device__ __forceinline__ void release() const {
    __syncwarp(0xffffffffu);
    if (lane == 0) device::mbarrier_arrive(shared.bias_empty + group);
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
