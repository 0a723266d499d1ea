#pragma once
#include <cmath>

#include "attention_sm90_pipeline.cuh"
#include "device/convert.h"
#include "device/fence.h"
#include "device/math.h"
#include "device/matrix_access.h"
#include "device/reduce.h"
#include "device/wgmma.h"

// The consumer warpgroups of the attention fixture (attention_sm90_fixture.cuh): both products and the softmax.
namespace warpsmith::attention_sm90 {

// A consumer warpgroup. p = 2^(scale_log2 * score - base), by row; a thread has two rows, lane / 4 and eight below, and
// the four lanes of a quad share them.
template <bool causal, Bug bug> struct Consumer {
  // Lazy rescaling: the base of a row is its maximum so far plus 7, so that p is at most 2^-7 at first. As long as the
  // maximum grows by less than 8, p stays below 2, nothing overflows, and the base need not change: neither maximum nor
  // rescaling stand before the exponentials. p >= 2, infinite or NaN shows in the highest exponent bit of its bf16.
  static constexpr float kHeadroom = 7.0f;
  static constexpr uint32_t kHighestExponentBits = 0x40004000u;
  using Probabilities = uint32_t[kBlockKeys / 16][4];  // A operands of one instruction each

  const Params& p;
  const Shared& shared;
  const int group, lane, warp;
  Ring<kQueryStages> queries;
  Ring<kBlockStages> ring;
  Ring<kTileSlots> slots;
  Tile tile;
  int row;                           // the first of the thread's rows
  uint64_t q;                        // descriptor
  float s[kBlockKeys / 2];           // scores, then in some steps p
  float o[kHeadDim / 2];             // sum of p * v
  float base[2], sum[2], factor[2];  // of a row; `sum` is this thread's share

  __device__ __forceinline__ Consumer(const Params& params, const Shared& memory, int warpgroup)
      : p(params), shared(memory), group(warpgroup), lane(threadIdx.x % 32), warp(threadIdx.x / 32 % 4) {}

  __device__ __forceinline__ int take_block() {
    const int stage = ring.stage;
    device::mbarrier_wait(shared.block_full + stage, ring.parity ^ (bug == Bug::wrong_parity));
    ring.next();
    return stage;
  }
  // The warp's reads of the block are complete.
  __device__ __forceinline__ void release_block(int stage) {
    if (lane == 0 && !(bug == Bug::no_empty_arrival && warp == 3)) device::mbarrier_arrive(shared.block_empty + stage);
  }

  // s = q k^T, asynchronously.
  __device__ __forceinline__ void multiply_keys(int stage) {
    constexpr Swizzle kSwizzle = bug == Bug::wrong_swizzle ? Swizzle::bytes64 : Swizzle::bytes128;
    const uint64_t k = device::wgmma_descriptor(kSwizzle, shared.block(stage), 16, 1024);
    if (bug != Bug::no_wgmma_fence) device::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i) {  // two panels of 64 columns, four instructions each
      const uint32_t panel = i / 4, column_bytes = i % 4 * 32;
      device::wgmma<bfloat16, kBlockKeys>(s, device::advance(q, panel * kGroupRows * 128 + column_bytes),
                                          device::advance(k, panel * kBlockKeys * 128 + column_bytes), i > 0);
    }
    device::wgmma_commit();
  }
  // o += probabilities * v, asynchronously.
  __device__ __forceinline__ void multiply_values(int stage, const Probabilities& probabilities) {
    const uint64_t v = device::wgmma_descriptor(Swizzle::bytes128, shared.block(stage), kBlockKeys * 128, 1024);
    device::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBlockKeys / 16; ++i)
      device::wgmma<bfloat16, kHeadDim, device::Major::mn>(o, probabilities[i], device::advance(v, i * 16 * 128), true);
    if (bug != Bug::not_committed) device::wgmma_commit();
  }
  // Starts both products of a step and returns when s is there; the second product is then in flight.
  __device__ __forceinline__ int start_step(const Probabilities& probabilities) {
    const int keys = take_block();
    multiply_keys(keys);
    const int values = take_block();
    if (bug == Bug::released_early) release_block(values);
    multiply_values(values, probabilities);
    if (bug != Bug::scores_not_waited_for) device::wgmma_wait<1>();
    device::hold(s);
    release_block(keys);
    return values;
  }
  __device__ __forceinline__ void finish_step(int values) {
    device::keep_before_wait(sum[0] + sum[1], shared.scratch);
    device::wgmma_wait<bug == Bug::output_wait_too_weak ? 1 : 0>();
    device::hold(o);
    if (bug != Bug::released_early) release_block(values);
  }

  // -inf for keys that a row does not see.
  __device__ __forceinline__ void mask(int block) {
    if (bug == Bug::no_mask) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int last = p.keys - 1;
      if (causal) last = min(last, row + 8 * r + p.keys - p.queries);
      last -= block * kBlockKeys + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < kBlockKeys / 2; i += 4)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (2 * i + e > last) s[i + 2 * r + e] = -INFINITY;
    }
  }
  __device__ __forceinline__ void raise_base() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = s[2 * r];
#pragma unroll
      for (int i = 0; i < kBlockKeys / 2; i += 4) largest = fmaxf(largest, fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      const float raised = fmaxf(base[r], largest * p.scale_log2 + kHeadroom);
      factor[r] = raised == -INFINITY ? 1.0f : device::exp2(base[r] - raised);
      base[r] = raised;
      sum[r] *= factor[r];
    }
  }
  __device__ __forceinline__ void rescale() {
    if (bug == Bug::not_rescaled) return;
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) o[i] *= factor[i >> 1 & 1];
  }
  __device__ __forceinline__ void exponentials_in_place() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float b = base[r] == -INFINITY ? 0.0f : base[r];  // -inf - -inf would be NaN
      float sums[2] = {0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < kBlockKeys / 2; i += 4)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[i + 2 * r + e];
          x = device::exp2(x * p.scale_log2 - b);
          sums[e] += x;
        }
      sum[r] += sums[0] + sums[1];
    }
  }
  __device__ __forceinline__ void pack(Probabilities& out) {
#pragma unroll
    for (int i = 0; i < kBlockKeys / 4; ++i) out[i / 4][i % 4] = device::pack<bfloat16>(s[2 * i], s[2 * i + 1]);
  }
  // From s to packed p without a change of s. Returns the bits of all of them together.
  __device__ __forceinline__ uint32_t exponentials(Probabilities& out, float (&sums)[2]) {
    float partial[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    uint32_t together = 0;
#pragma unroll
    for (int i = 0; i < kBlockKeys / 2; i += 4) {
      float x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[e] = device::exp2(s[i + e] * p.scale_log2 - base[e / 2]);
        partial[e] += x[e];
      }
      const uint32_t above = device::pack<bfloat16>(x[0], x[1]), below = device::pack<bfloat16>(x[2], x[3]);
      together |= above | below;
      out[i / 8][i / 2 % 4] = above;
      out[i / 8][i / 2 % 4 + 1] = below;
    }
    sums[0] = partial[0] + partial[1];
    sums[1] = partial[2] + partial[3];
    return together;
  }

  // A step with masks: the maximum comes first, and probabilities are packed after the product that reads the old ones.
  __device__ __forceinline__ void masked_step(int block, Probabilities& probabilities) {
    const int values = start_step(probabilities);
    mask(block);
    raise_base();
    exponentials_in_place();
    finish_step(values);
    rescale();
    pack(probabilities);
  }
  // A step without. The scores are kept, so that exponentials which outgrow the base can be taken again.
  __device__ __forceinline__ void lazy_step(const Probabilities& old, Probabilities& probabilities) {
    const int values = start_step(old);
    float sums[2];
    const bool outgrown = __any_sync(0xffffffffu, (exponentials(probabilities, sums) & kHighestExponentBits) != 0);
    if (outgrown) {
      raise_base();
      exponentials(probabilities, sums);
    }
    sum[0] += sums[0];
    sum[1] += sums[1];
    finish_step(values);
    if (outgrown) rescale();
  }

  // The next tile; false after the last.
  __device__ __forceinline__ bool take_tile() {
    device::mbarrier_wait(shared.slot_full + slots.stage, slots.parity);
    const Tile t = device::load(shared.slots + slots.stage);
    // The same in every lane, and known to be: descriptors and loop counts belong into uniform registers.
    tile.blocks = __shfl_sync(0xffffffffu, t.blocks, 0);
    tile.row_tile = __shfl_sync(0xffffffffu, t.row_tile, 0);
    tile.head = t.head;
    tile.batch = t.batch;
    __syncwarp(0xffffffffu);
    if (lane == 0) device::mbarrier_arrive(shared.slot_empty + slots.stage);
    slots.next();
    row = tile.row_tile * kTileRows + group * kGroupRows + warp * 16 + lane / 4;
    base[0] = base[1] = -INFINITY;
    sum[0] = sum[1] = 0.0f;
    if (tile.blocks < 0) return false;
    device::mbarrier_wait(shared.query_full + queries.stage * 2 + group, queries.parity);
    q = device::wgmma_descriptor(Swizzle::bytes128, shared.query(queries.stage, group), 16, 1024);
    return true;
  }
  // What a tile still needs while the next one has begun.
  struct Finished {
    Tile tile;
    int row, stage;
    float base[2], sum[2];
  };
  __device__ __forceinline__ Finished finish_tile() {
    Finished f{tile, row, queries.stage, {base[0], base[1]}, {sum[0], sum[1]}};
#pragma unroll
    for (int r = 0; r < 2; ++r) f.sum[r] = device::group_sum<4>(f.sum[r]);
    queries.next();
    return f;
  }
  // o / sum to the tile's buffer of q, whose reads are complete, and on to the storing warp.
  __device__ __forceinline__ void hand_over(const Finished& f) {
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool seen = f.sum[r] != 0.0f;
      inverse[r] = seen ? device::reciprocal(f.sum[r]) : 0.0f;
      constexpr float kLn2 = 0.693147180559945309f;
      if (lane % 4 == 0 && f.row + 8 * r < p.queries)
        device::store(p.lse + (static_cast<int64_t>(f.tile.batch) * p.heads + f.tile.head) * p.queries + f.row + 8 * r,
                      seen ? (f.base[r] + device::log2(f.sum[r])) * kLn2 : -INFINITY);
    }
    // Four 8 x 8 matrices at once: rows 0-7 and 8-15 of the warp's columns c..c+7, then of c+8..c+15.
    unsigned char* buffer = shared.query(f.stage, group);
    const auto first = static_cast<uint32_t>((warp * 16 + lane % 16) * 128 + lane / 16 * 16);
#pragma unroll
    for (int c = 0; c < kHeadDim / 16; ++c) {
      uint32_t rows[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        rows[i] = device::pack<bfloat16>(o[8 * c + 2 * i] * inverse[i % 2], o[8 * c + 2 * i + 1] * inverse[i % 2]);
      const uint32_t panel = c / 4 * kGroupRows * 128, column_bytes = c % 4 * 32;
      device::store_matrix(buffer + panel + (device::swizzled(Swizzle::bytes128, first) ^ column_bytes), rows);
    }
    if (bug != Bug::no_proxy_fence) device::fence_async_shared();
    if (bug == Bug::one_warp_not_at_barrier && warp == 1) return;
    device::named_barrier_arrive(store_barrier<bug>(f.stage, group), kStoreThreads);
  }
  __device__ __forceinline__ void clear_output() {
#pragma unroll
    for (float& x : o) x = 0.0f;
  }

  __device__ __forceinline__ void run() {
    if (!take_tile()) return;
    // Two arrays: the next probabilities are written while the tensor cores still read the last ones.
    Probabilities p0, p1;
    clear_output();
    const int first = take_block();
    multiply_keys(first);
    device::wgmma_wait<0>();
    device::hold(s);
    release_block(first);
    mask(tile.blocks - 1);
    raise_base();
    exponentials_in_place();
    pack(p0);
    for (;;) {
      int block = tile.blocks - 2;
      if (causal) {
        const int unmasked = max(0, tile.row_tile * kTileRows + p.keys - p.queries + 1) / kBlockKeys;
        for (; block >= unmasked; --block) masked_step(block, p0);
      }
      for (; block >= 1; block -= 2) {
        lazy_step(p0, bug == Bug::probabilities_overwritten ? p0 : p1);
        lazy_step(bug == Bug::probabilities_overwritten ? p0 : p1, p0);
      }
      if (block == 0) {
        lazy_step(p0, p1);
        // A plain copy would be merged by ptxas with registers that the product in flight still reads.
#pragma unroll
        for (int i = 0; i < kBlockKeys / 4; ++i) p0[i / 4][i % 4] = p1[i / 4][i % 4] ^ p.zero;
      }
      const Finished finished = finish_tile();
      if (!take_tile()) {
        const int values = take_block();
        multiply_values(values, p0);
        device::wgmma_wait<0>();
        device::hold(o);
        hand_over(finished);
        break;
      }
      const int values = start_step(p0);
      mask(tile.blocks - 1);
      raise_base();
      exponentials_in_place();
      finish_step(values);
      hand_over(finished);
      clear_output();
      pack(p0);
    }
  }
};

}  // namespace warpsmith::attention_sm90
