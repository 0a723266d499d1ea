#pragma once
#include <cmath>

#include "device/convert.h"
#include "device/math.h"
#include "device/matrix_access.h"
#include "device/wgmma.h"
#include "kernels/attention/hopper/backward_sm90_pipeline.cuh"
#include "kernels/attention/store_accumulators.cuh"

// The work of a consumer warpgroup of the Hopper backward (backward_sm90.cuh) in one step: five products and the
// arithmetic between them. backward_sm90_pingpong.cuh has their order.
namespace warpsmith::attention {

// A warpgroup owns 64 keys of each tile. In the transposed scores, a thread has two rows (keys): `row` and row + 8.
template <class T, BackwardTile tile> struct BackwardConsumer {
  using Shared = BackwardShared<tile>;
  static constexpr int kPanels = Shared::kPanels, kBlock = tile.block_queries;
  // A warpgroup makes 64 x 64 of dq: half of the columns of 64 queries, or all 64 columns of half of 128 queries.
  static constexpr bool kHalfColumns = kBlock == 64;
  static_assert(kBlock * tile.head_dim == 2 * 64 * 64);
  // With 128 queries a step there are no registers for all masks, so each is made right before the exponentials that
  // need it.
  static constexpr bool kMasksOneByOne = tile.dropout && kBlock == 128;

  const BackwardParams& p;
  const Shared& shared;
  const int group, lane, warp;
  unsigned it = 0, tiles = 0;  // steps and tiles so far
  unsigned step3 = 0;          // halves of dq that this warpgroup has handed over, modulo 3
  const KeyTile* t;            // in shared memory
  // Query blocks that begin between these two queries see all of the warpgroup's keys, and none is far.
  int whole_first, whole_last;
  float dk[tile.head_dim / 2], dv[tile.head_dim / 2];
  float s[kBlock / 2], dp[kBlock / 2];  // transposed: 64 keys x a block of queries
  float dq[32];
  uint32_t pr[kBlock / 16][4], ds[kBlock / 16][4];  // packed probabilities and dS: A operands
  uint32_t all[kBlock / 16][4];                     // dropout: all probabilities; pr has the kept ones

  __device__ __forceinline__ BackwardConsumer(const BackwardParams& params, const Shared& memory, int warpgroup)
      : p(params), shared(memory), group(warpgroup), lane(threadIdx.x % 32), warp(threadIdx.x / 32 % 4) {}

  __device__ __forceinline__ void arrive(Mbarrier* barrier) {
    if (lane == 0) device::mbarrier_arrive(barrier);
  }
  static __device__ __forceinline__ uint64_t k_major(const unsigned char* start) {
    return device::wgmma_descriptor(Swizzle::bytes128, start, 16, 1024);
  }
  static __device__ __forceinline__ uint64_t mn_major(const unsigned char* start, int rows) {
    return device::wgmma_descriptor(Swizzle::bytes128, start, rows * kRowBytes, 1024);
  }

  // out = own rows of `keys` times queries^T. Asynchronous.
  __device__ __forceinline__ void multiply_rows(float (&out)[kBlock / 2], const unsigned char* keys,
                                                const unsigned char* queries) {
    const uint64_t a = k_major(keys + group * 64 * kRowBytes), b = k_major(queries);
    device::wgmma_fence();
#pragma unroll
    for (int i = 0; i < tile.head_dim / 16; ++i) {
      const uint64_t x = device::advance(a, i / 4 * kTileKeys * kRowBytes + i % 4 * 32);
      const uint64_t y = device::advance(b, i / 4 * kBlock * kRowBytes + i % 4 * 32);
      if (i == 0)
        device::wgmma_overwrite<T, kBlock>(out, x, y);
      else
        device::wgmma<T, kBlock>(out, x, y, true);
    }
    device::wgmma_commit();
  }
  // This warpgroup's half of dq = dS k of step i. Waits until the other warpgroup's dS has arrived too. Asynchronous.
  __device__ __forceinline__ void multiply_dq(unsigned i, unsigned key_stage) {
    device::mbarrier_wait(shared.ds_full(stage_of(i)), parity_of(i));
    // The half is a panel of 64 columns: of k (half of the columns), or of dS (half of the queries).
    const int panel = group * kTileKeys * kRowBytes;
    const uint64_t a = mn_major(shared.ds(stage_of(i)) + (kHalfColumns ? 0 : panel), kTileKeys);
    const uint64_t b = mn_major(shared.k(key_stage) + (kHalfColumns ? panel : 0), kTileKeys);
    device::wgmma_fence();
#pragma unroll
    for (int j = 0; j < kTileKeys / 16; ++j) {
      const uint64_t x = device::advance(a, j * 16 * kRowBytes), y = device::advance(b, j * 16 * kRowBytes);
      if (j == 0)
        device::wgmma_overwrite<T, 64, device::Major::mn, device::Major::mn>(dq, x, y);
      else
        device::wgmma<T, 64, device::Major::mn, device::Major::mn>(dq, x, y, true);
    }
    device::wgmma_commit();
  }
  // dv += p dout. Asynchronous.
  __device__ __forceinline__ void multiply_dv(unsigned stage) {
    const uint64_t dout = mn_major(shared.dout(stage), kBlock);
    device::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBlock / 16; ++i)
      device::wgmma<T, tile.head_dim, device::Major::mn>(dv, pr[i], device::advance(dout, i * 16 * kRowBytes), true);
    device::wgmma_commit();
  }
  // Writes dq of step i to its staging buffer, in register order. Step -1 is staged as well, although it holds nothing:
  // with a branch around a product, ptxas would serialise all products.
  __device__ __forceinline__ void stage_dq(unsigned i) {
    arrive(shared.ds_empty(stage_of(i)));
    device::mbarrier_wait(shared.dq_empty(group), i & 1);
    using Four = device::Vector<float, 4>;
    Four* to = reinterpret_cast<Four*>(shared.dq(group)) + threadIdx.x % 128;
#pragma unroll
    for (int j = 0; j < 8; ++j)
      device::store(to + j * 128, Four{{dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]}});
    device::fence_async_shared();
    __syncwarp(0xffffffffu);
    arrive(shared.dq_full(2 * step3 + group));
    step3 = step3 == 2 ? 0 : step3 + 1;
  }

  __device__ __forceinline__ void set_whole() {
    const int first_key = t->first_key + group * 64, shift = t->shift;
    const int first = first_key + 63 - shift - p.window.right, last = first_key - (kBlock - 1) - shift + p.window.left;
    // The same in every lane, and known to be.
    const bool some = first_key + 63 < t->keys && t->some_far == 0;
    whole_first = __shfl_sync(0xffffffffu, some ? first : 1 << 30, 0);
    whole_last = __shfl_sync(0xffffffffu, last, 0);
  }
  // Advances `first_query` to the next step of the tile. `inner` counts the steps of the inner loop.
  __device__ __forceinline__ void next_query(int& first_query, int& inner, int blocks) {
    const bool wraps = ++inner == (!tile.biased() && p.blocks_first ? blocks : p.heads_per_part);
    if (wraps) inner = 0;
    if constexpr (tile.biased()) {
      if (wraps) first_query -= kBlock;
      return;
    }
    if (wraps != p.blocks_first)
      first_query -= kBlock;
    else if (wraps)
      first_query += (blocks - 1) * kBlock;
  }
  using Statistics = device::Vector<float, 4>;
  // Sets the scores of hidden pairs of query and key to -inf, and subtracts lse from the scores of a far block. `lse`:
  // the thread's statistics in shared memory.
  __device__ __forceinline__ void mask(int first_query, const Statistics* lse) {
    if (first_query >= whole_first && first_query <= whole_last) return;
    const int shift = t->shift, keys = t->keys;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = t->first_key + group * 64 + warp * 16 + lane / 4 + 8 * r, column = first_query + lane % 4 * 2;
      // The columns (queries) from `low` to `high` see the key.
      const int low = key >= keys ? kBlock : key - shift - p.window.right - column;
      const int high = key - shift + p.window.left - column;
#pragma unroll
      for (int i = 0; i < kBlock / 2; i += 4)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (2 * i + e < low || 2 * i + e > high) s[i + 2 * r + e] = -INFINITY;
    }
    subtract_far(lse);
  }
  // Biases of a step for query head `head` of the tile's part.
  __device__ __forceinline__ KeyBiases<T, kBlock, tile.biases> key_biases(int first_query, int head) const {
    return {p.biases,    t->sequence, t->part * p.heads_per_part + head,
            first_query, t->queries,  t->first_key + group * 64 + warp * 16,
            t->keys};
  }
  // Subtracts lse and lse_rest from the scores of a far block of queries, whose statistics are read from global memory.
  __device__ __forceinline__ void subtract_far(const Statistics* lse) {
    if (!has_far_mark(device::load(lse).at[0])) return;
    const VisitedStep step = visited_step(p, static_cast<int>(it) - t->first_step, t->blocks);
    const int64_t block =
        block_of_head(p, t->first_block + t->last_block - step.down, t->part * p.heads_per_part + step.head);
    constexpr int kStride = statistics_stride(kBlock, tile.dropout);
    const float* far = p.statistics + block * kStride + kStride / 2 + lane % 4 * 4;
    constexpr bool kLogits = tile.biases == Biases::tensor;
    constexpr bool kOneByOne = kBlock == 128 && !tile.dropout && !tile.biased();  // the others have spills or no gain
    subtract_far_lse<kBlock, kOneByOne>(s, far, kLogits ? 1.0f : p.to_logits, kLogits ? 1.0f : p.to_scores);
  }
  // Writes the dropout masks of packed pairs of 16 queries to pr, where their probabilities will be. The masks depend
  // on no product.
  __device__ __forceinline__ void dropout_masks(const KeyDropout& dropout, const float* statistics, int i) {
    uint32_t row = __float_as_uint(device::load(statistics + 2 * kBlock + i));
    // Orders this Philox call after the previous one by a fake dependence: interleaved, the calls spill registers. The
    // bit is always 0, because probabilities have no sign, and neither has the NaN of exp2.
    if constexpr (kMasksOneByOne && std::is_same_v<T, float16>)
      if (i >= 1) row ^= all[i - 1][3] & 0x80000000u;
    dropout.pair_masks(row, p.dropout.bytes, pr[i]);
  }
  __device__ __forceinline__ KeyDropout key_dropout() const {
    return KeyDropout(p.dropout, t->first_key + group * 64 + warp * 16, lane);
  }
  // Makes all masks of a step while the first products run. For tiles with enough registers.
  __device__ __forceinline__ void dropout_masks(const float* statistics) {
    const KeyDropout dropout = key_dropout();
#pragma unroll
    for (int i = 0; i < kBlock / 16; ++i) dropout_masks(dropout, statistics, i);
    keep_masks_before_wait();
  }
  __device__ __forceinline__ void keep_masks_before_wait() {
    uint32_t x = 0;
#pragma unroll
    for (const auto& four : pr) x ^= four[0] ^ four[1];
    device::keep_before_wait(__uint_as_float(x & 0x7fffffffu), shared.statistics(0));
  }
  // p = 2^(scale_log2 * s - lse), packed. With dropout, pr holds the masks and receives the kept probabilities.
  __device__ __forceinline__ void exponentials(const Statistics* lse, [[maybe_unused]] const float* statistics) {
    [[maybe_unused]] KeyDropout dropout;
    if constexpr (kMasksOneByOne) dropout = key_dropout();
#pragma unroll
    for (int i = 0; i < kBlock / 2; i += 8) {
      if constexpr (kMasksOneByOne) dropout_masks(dropout, statistics, i / 8);
      const Statistics l = device::load(lse + i / 2);
      const auto both = [&](int at, int of) {
        return device::pack<T>(device::exp2(s[i + at] * p.scale_log2 - l.at[of]),
                               device::exp2(s[i + at + 1] * p.scale_log2 - l.at[of + 1]));
      };
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const uint32_t two = both(2 * e, e / 2 * 2);
        if constexpr (tile.dropout) {
          all[i / 8][e] = two;
          pr[i / 8][e] &= two;
        } else {
          pr[i / 8][e] = two;
        }
      }
    }
  }
  // dS = p (dp - delta), packed. Uses the rounded p, which saves the registers of the unrounded one. With dropout, dp
  // counts only where p is kept, and delta counts everywhere.
  __device__ __forceinline__ void score_gradients(const Statistics* delta) {
#pragma unroll
    for (int i = 0; i < kBlock / 2; i += 8) {
      const Statistics d = device::load(delta + i / 2);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const uint32_t two = pr[i / 8][e];
        const int of = e / 2 * 2;
        if constexpr (tile.dropout) {
          const uint32_t both = all[i / 8][e];
          ds[i / 8][e] = device::pack<T>(
              device::low_half<T>(two) * dp[i + 2 * e] - device::low_half<T>(both) * d.at[of],
              device::high_half<T>(two) * dp[i + 2 * e + 1] - device::high_half<T>(both) * d.at[of + 1]);
          continue;
        }
        ds[i / 8][e] = device::pack<T>(device::low_half<T>(two) * (dp[i + 2 * e] - d.at[of]),
                                       device::high_half<T>(two) * (dp[i + 2 * e + 1] - d.at[of + 1]));
      }
    }
  }
  // Stores dS to shared memory; its rows are keys.
  __device__ __forceinline__ void store_score_gradients(unsigned char* to) {
    uint32_t thread[1] = {threadIdx.x % 128};
    if constexpr (tile.dropout || tile.biased())
      device::hold(thread);  // recompute addresses in each step, to save registers
    const int row = group * 64 + static_cast<int>(thread[0] / 32 * 16 + thread[0] % 16);
    const int first = static_cast<int>(thread[0] / 16 % 2);
    unsigned char* at = to + row * kRowBytes;
#pragma unroll
    for (int i = 0; i < kBlock / 16; ++i)
      device::store_matrix(at + i / 4 * kTileKeys * kRowBytes + (((2 * (i % 4) + first) ^ (row & 7)) << 4), ds[i]);
  }

  // dk += dS q. Asynchronous. Reads this warpgroup's dS from shared memory, which frees registers.
  __device__ __forceinline__ void multiply_dk(unsigned stage, unsigned ds_stage) {
    const uint64_t own = k_major(shared.ds(ds_stage) + group * 64 * kRowBytes);
    const uint64_t q = mn_major(shared.q(stage), kBlock);
    device::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBlock / 16; ++i)
      device::wgmma<T, tile.head_dim, device::Major::k, device::Major::mn>(
          dk, device::advance(own, i / 4 * kTileKeys * kRowBytes + i % 4 * 32), device::advance(q, i * 16 * kRowBytes),
          true);
    device::wgmma_commit();
  }

  __device__ __forceinline__ void hold_probabilities() {
#pragma unroll
    for (auto& four : pr) device::hold(four);
  }

  template <int kRegisters> __device__ __forceinline__ void store_gradient(void* to, const AttentionStrides& strides,
                                                                           const float (&x)[kRegisters], float factor,
                                                                           int columns) {
    const int first_key = t->first_key + group * 64;
    T* at = static_cast<T*>(to) + t->k.batch * strides.batch + t->part * strides.head +
            (int64_t{t->k.row} + first_key) * strides.seq;
    store_accumulators(at, strides.seq, x, factor, warp * 16 + lane / 4, t->keys - first_key, columns, lane);
  }
  __device__ __forceinline__ void clear_gradients() {
#pragma unroll
    for (int i = 0; i < tile.head_dim / 2; ++i) dk[i] = dv[i] = 0.0f;
  }
  // Stores dv (tensor 0) or dk (tensor 1) of a part, for backward_dkv.
  template <int kRegisters> __device__ __forceinline__ void store_sums(int tensor, const float (&x)[kRegisters]) {
    using Four = device::Vector<float, 4>;
    const int64_t at = (static_cast<int64_t>(t->first_tile + t->tile()) * p.schedule.heads + t->part) * 2 + tensor;
    Four* to = reinterpret_cast<Four*>(p.key_sums + at * kTileKeys * tile.head_dim) + group * 16 * tile.head_dim +
               threadIdx.x % 128;
#pragma unroll
    for (int j = 0; j < kRegisters / 4; ++j)
      device::store(to + j * 128, Four{{x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]}});
  }
  __device__ __forceinline__ void store_gradients() {
    if (p.key_sums != nullptr) {
      store_sums(0, dv);
      store_sums(1, dk);
      return;
    }
    store_gradient(p.dv, p.dv_strides, dv, 1.0f, p.head_dim_v);
    store_gradient(p.dk, p.dk_strides, dk, p.scale, p.head_dim);
  }
};

}  // namespace warpsmith::attention
