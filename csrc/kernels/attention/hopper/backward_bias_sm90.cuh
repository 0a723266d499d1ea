#pragma once
#include <cmath>

#include "device/async_copy.h"
#include "device/convert.h"
#include "device/math.h"
#include "device/register_budget.h"
#include "device/wgmma.h"
#include "kernels/attention/hopper/backward_sm90_pipeline.cuh"
#include "kernels/attention/store_accumulators.cuh"

// dbias on Hopper, after backward_sm90 and from its statistics: the same bits on every run.
//
// A tile is 128 x 128 of dbias. A block of threads takes one tile after the other from a counter; it loops over the
// sequences and heads to which the bias is broadcast, in ascending order, and adds dS = p (dp - delta) in registers, in
// float. Each step reads 128 rows of q, dout, k and v:
//   s = q k^T | p = exp(s + bias - lse) | dp = dout v^T | dbias += p (dp - delta)
// The bias itself is read once: every step has the same one, in shared memory. p and dS are not rounded. Masked rows
// and keys are multiplied by 0, so a non-finite element in their blocks makes the sums NaN. The loads run ahead of the
// sums across tiles: a tile has as few steps as there are sequences.
//
// One thread of warpgroup 0 loads. Warpgroups 1 and 2 have 64 rows each.
namespace warpsmith::attention {

constexpr int kBiasTile = 128, kBiasThreads = 3 * 128;

struct BiasGradientParams {
  Window window;
  const int32_t *cu_seqlens_q, *cu_seqlens_k;  // null: not packed
  int batch, heads, heads_per_key_head;
  int queries, keys, total_q, total_k;
  const float* statistics;  // [blocks of queries, heads, statistics_stride()], of backward_sm90's blocks
  BiasParams biases;
  float scale_log2;
  int query_tiles, key_tiles, tiles;  // tiles: of all heads and sequences of dbias
  int* counter;                       // the next tile, less gridDim.x; 0 at the start
  int bias_batch, bias_heads;         // sizes of dbias; 1: broadcast
  void* dbias;
  AttentionBiasStrides strides;
};

template <int kDim> struct BiasGradientShared {
  static constexpr int kRing = 3;  // each with 128 rows of q and k, or of dout and v
  static constexpr int kOperandBytes = kBiasTile * kDim * 2;
  static constexpr int kBias = kRing * 2 * kOperandBytes;
  static constexpr int kBarriers = kBias + kBiasTile * kBiasTile * 2;
  static constexpr int kSlots = 4;  // the loads are at most so many tiles ahead
  static constexpr int kNumbers = kBarriers + 2 * (kRing + kSlots) * static_cast<int>(sizeof(Mbarrier));
  static constexpr int kBytes = kNumbers + kSlots * static_cast<int>(sizeof(int));

  unsigned char* memory;

  __device__ __forceinline__ unsigned char* rows(unsigned i) const { return memory + i * 2 * kOperandBytes; }
  __device__ __forceinline__ unsigned char* keys(unsigned i) const { return rows(i) + kOperandBytes; }
  __device__ __forceinline__ Mbarrier* full(unsigned i) const {
    return reinterpret_cast<Mbarrier*>(memory + kBarriers) + i;
  }
  __device__ __forceinline__ Mbarrier* empty(unsigned i) const { return full(kRing + i); }
  // A slot holds the number of a tile. The numbers of a block end with one that no tile has.
  __device__ __forceinline__ Mbarrier* slot_full(unsigned i) const { return full(2 * kRing + i); }
  __device__ __forceinline__ Mbarrier* slot_empty(unsigned i) const { return slot_full(kSlots + i); }
  __device__ __forceinline__ int* number(unsigned i) const { return reinterpret_cast<int*>(memory + kNumbers) + i; }
  // Called by one thread.
  __device__ __forceinline__ void initialise() const {
    for (unsigned i = 0; i < kSlots; ++i) {
      device::mbarrier_init(slot_full(i), 1);
      device::mbarrier_init(slot_empty(i), kBackwardConsumerWarps);
    }
    for (unsigned i = 0; i < kRing; ++i) {
      device::mbarrier_init(full(i), 1);
      device::mbarrier_init(empty(i), kBackwardConsumerWarps);
    }
    device::mbarrier_init_fence();
  }
};

// The place of a tile in dbias. sequence, head: 0 where dbias is broadcast.
struct BiasGradientTile {
  int query_tile, key_tile, head, sequence;

  __device__ __forceinline__ BiasGradientTile(const BiasGradientParams& p, int number) {
    key_tile = number % p.key_tiles;
    number /= p.key_tiles;
    query_tile = number % p.query_tiles;
    number /= p.query_tiles;
    head = number % p.bias_heads;
    sequence = number / p.bias_heads;
  }
};

// One sequence and head that adds to a tile.
struct BiasGradientStep {
  Sequence q, k;
  int sequence, head, shift;
};

// Calls visit(step) for every sequence and head that adds to the tile.
template <class Visit> __device__ __forceinline__ void visit_bias_gradient(const BiasGradientParams& p,
                                                                           const BiasGradientTile& tile,
                                                                           Visit&& visit) {
  const bool all_sequences = p.bias_batch == 1, all_heads = p.bias_heads == 1;
  const int last_sequence = all_sequences ? p.batch : tile.sequence + 1,
            last_head = all_heads ? p.heads : tile.head + 1;
#pragma unroll 1
  for (int b = all_sequences ? 0 : tile.sequence; b < last_sequence; ++b) {
    BiasGradientStep step{{0, p.queries}, {0, p.keys}, b, 0, 0};
    if (p.cu_seqlens_q != nullptr) {
      step.q = sequence_at(p.cu_seqlens_q, b, p.batch, p.total_q, p.queries);
      step.k = sequence_at(p.cu_seqlens_k, b, p.batch, p.total_k, p.keys);
    }
    step.shift = p.window.shift(step.q.length, step.k.length);
    const VisitingTiles seen = visiting_tiles(p.window, tile.query_tile, step.q.length, step.k.length, kBiasTile);
    if (tile.key_tile < seen.first || tile.key_tile >= seen.end) continue;
#pragma unroll 1
    for (int h = all_heads ? 0 : tile.head; h < last_head; ++h) {
      step.head = h;
      visit(step);
    }
  }
}

// Called by one thread. kBoxRows: rows of a box of q and dout.
template <int kDim, int kBoxRows>
__device__ __forceinline__ void load_bias_gradient(const BiasGradientParams& p, const BackwardMaps& maps,
                                                   const BiasGradientShared<kDim>& shared) {
  using Shared = BiasGradientShared<kDim>;
  const bool packed = p.cu_seqlens_q != nullptr;
  unsigned n = 0;
  const auto load = [&](const BiasGradientTile& tile, const BiasGradientStep& step) {
    MapPlace q{0, step.sequence}, k{0, step.sequence};
    if (packed) q = map_place(step.q), k = map_place(step.k);
    const int row = q.row + tile.query_tile * kBiasTile, key = k.row + tile.key_tile * kBiasTile;
#pragma unroll 1
    for (int gradient = 0; gradient < 2; ++gradient, ++n) {
      const unsigned stage = n % Shared::kRing;
      Mbarrier* full = shared.full(stage);
      device::mbarrier_wait(shared.empty(stage), (n / Shared::kRing & 1) ^ 1);
      device::mbarrier_arrive_expect(full, 2 * Shared::kOperandBytes);
#pragma unroll
      for (int panel = 0; panel < kDim / 64; ++panel) {
        const int at = panel * kBiasTile * kRowBytes;
#pragma unroll
        for (int box = 0; box < kBiasTile; box += kBoxRows)
          load_box(shared.rows(stage) + at + box * kRowBytes, gradient == 0 ? &maps.q : &maps.dout, full, packed,
                   panel * 64, row + box, step.head, q.batch);
        load_box(shared.keys(stage) + at, gradient == 0 ? &maps.k : &maps.v, full, packed, panel * 64, key,
                 step.head / p.heads_per_key_head, k.batch);
      }
    }
  };
  device::Ring<Shared::kSlots> slots;
  for (int number = static_cast<int>(blockIdx.x), next = 0;; number = next) {
    device::mbarrier_wait(shared.slot_empty(slots.stage), slots.parity ^ 1);
    device::store(shared.number(slots.stage), number);
    device::mbarrier_arrive(shared.slot_full(slots.stage));
    if (number >= p.tiles) return;
    slots.next();
    next = atomicAdd(p.counter, 1) + static_cast<int>(gridDim.x);  // its latency overlaps with the loads
    const BiasGradientTile tile(p, number);
    visit_bias_gradient(p, tile, [&](const BiasGradientStep& step) { load(tile, step); });
  }
}

// A warpgroup owns 64 rows of the tile. A thread has two of them: `row` and row + 8.
template <class T, int kDim, int kBlock> struct BiasGradient {
  using Shared = BiasGradientShared<kDim>;
  using Four = device::Vector<uint32_t, 4>;

  const BiasGradientParams& p;
  const Shared& shared;
  const int group, lane, row;  // row: within a tile
  float s[kBiasTile / 2], dp[kBiasTile / 2], sum[kBiasTile / 2];

  __device__ __forceinline__ BiasGradient(const BiasGradientParams& params, const Shared& memory, int warpgroup)
      : p(params),
        shared(memory),
        group(warpgroup),
        lane(threadIdx.x % 32),
        row(warpgroup * 64 + static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane / 4) {}

  // Each thread reads only what it has written itself.
  __device__ __forceinline__ Four* own_biases() const {
    return reinterpret_cast<Four*>(shared.memory + Shared::kBias) + group * 8 * 128 + threadIdx.x % 128;
  }
  __device__ __forceinline__ void load_biases(const BiasGradientTile& tile) const {
    const AttentionBiasStrides& of = p.biases.bias_strides;
    const int query = tile.query_tile * kBiasTile + row, key = tile.key_tile * kBiasTile + lane % 4 * 2;
    const T* from = static_cast<const T*>(p.biases.bias) + tile.sequence * of.batch + tile.head * of.head + key;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = min(query + j % 2 * 8, p.queries - 1), n = 2 * i + j / 2;
        const bool exists = key + 8 * n < p.keys;
        device::copy_async<4>((own_biases() + i * 128)->at + j, from + (exists ? at * of.q + 8 * n : 0), exists);
      }
    }
    device::copy_async_commit();
  }
  // out = own rows times keys^T. Asynchronous.
  __device__ __forceinline__ void multiply(float (&out)[kBiasTile / 2], unsigned stage) const {
    const uint64_t a =
        device::wgmma_descriptor(Swizzle::bytes128, shared.rows(stage) + group * 64 * kRowBytes, 16, 1024);
    const uint64_t b = device::wgmma_descriptor(Swizzle::bytes128, shared.keys(stage), 16, 1024);
    device::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      const uint32_t at = i / 4 * kBiasTile * kRowBytes + i % 4 * 32;
      if (i == 0)
        device::wgmma_overwrite<T, kBiasTile>(out, device::advance(a, at), device::advance(b, at));
      else
        device::wgmma<T, kBiasTile>(out, device::advance(a, at), device::advance(b, at), true);
    }
    device::wgmma_commit();
  }
  __device__ __forceinline__ void add_biases(const BiasGradientTile& tile, const BiasGradientStep& step) {
    const int key = tile.key_tile * kBiasTile + lane % 4 * 2;
    QueryBiases<T, kBiasTile, Biases::tensor>{
        p.biases,      step.sequence, step.head,     tile.query_tile * kBiasTile + row,
        step.q.length, key,           step.k.length, step.shift}
        .add_alibi(s);
    device::copy_async_wait<0>();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const Four four = device::load(own_biases() + i * 128);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float* two = s + 8 * i + 2 * j;
        two[0] = fmaf(two[0], p.biases.scale, device::low_half<T>(four.at[j]));
        two[1] = fmaf(two[1], p.biases.scale, device::high_half<T>(four.at[j]));
      }
    }
  }
  // Hides what the window hides, and rows that the sequence does not have.
  __device__ __forceinline__ void mask(const BiasGradientTile& tile, const BiasGradientStep& step) {
    const int first_row = tile.query_tile * kBiasTile + group * 64, first_key = tile.key_tile * kBiasTile;
    const int first = first_row + step.shift;
    if (first_row + 64 <= step.q.length && first_key >= first + 63 - p.window.left &&
        first_key + kBiasTile - 1 <= min(first + p.window.right, step.k.length - 1))
      return;
    const int query = tile.query_tile * kBiasTile + row;
    mask_scores(s, p.window, query, first_key, lane, step.shift, step.k.length);
#pragma unroll
    for (int i = 0; i < kBiasTile / 2; ++i)
      if (query + i / 2 % 2 * 8 >= step.q.length) s[i] = -INFINITY;
  }
  // The statistics of a query. `sequence`: that of the step.
  __device__ __forceinline__ const float* statistics(const BiasGradientStep& step, int sequence, int query) const {
    const int64_t first = first_block(p.cu_seqlens_q, sequence, step.q.start, p.queries, kBlock);
    return p.statistics + ((first + query / kBlock) * p.heads + step.head) * statistics_stride(kBlock, false) +
           statistics_place(query % kBlock);
  }
  // As BackwardConsumer::subtract_far(), for logits. Computes addresses again, to save registers.
  __device__ __forceinline__ void subtract_far(const BiasGradientTile& tile, const BiasGradientStep& step,
                                               const float (&lse)[2]) {
    uint32_t sequence[1] = {static_cast<uint32_t>(step.sequence)};
    device::hold(sequence);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!has_far_mark(lse[r])) continue;
      const int query = tile.query_tile * kBiasTile + row + 8 * r;
      const float* far = statistics(step, static_cast<int>(sequence[0]), query) + statistics_stride(kBlock, false) / 2;
      subtract_far_lse(s, r, device::load(far), device::load(far + kBlock), 1.0f, 1.0f);
    }
  }
  __device__ __forceinline__ void add(const BiasGradientTile& tile, const BiasGradientStep& step, unsigned n) {
    float lse[2], delta[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      lse[r] = INFINITY;
      delta[r] = 0.0f;
      const int query = tile.query_tile * kBiasTile + row + 8 * r;
      if (query >= step.q.length) continue;
      const float* at = statistics(step, step.sequence, query);
      lse[r] = device::load(at);
      delta[r] = device::load(at + kBlock);
    }
    const unsigned scores = n % Shared::kRing, gradients = (n + 1) % Shared::kRing;
    device::mbarrier_wait(shared.full(scores), n / Shared::kRing & 1);
    multiply(s, scores);
    device::mbarrier_wait(shared.full(gradients), (n + 1) / Shared::kRing & 1);
    multiply(dp, gradients);
    device::wgmma_wait<1>();
    device::hold(s);
    if (lane == 0) device::mbarrier_arrive(shared.empty(scores));
    add_biases(tile, step);
    mask(tile, step);
    if (has_far_mark(lse[0]) || has_far_mark(lse[1])) subtract_far(tile, step, lse);
#pragma unroll
    for (int i = 0; i < kBiasTile / 2; ++i) s[i] = device::exp2(s[i] * p.scale_log2 - lse[i / 2 % 2]);
    device::wgmma_wait<0>();
    device::hold(dp);
    if (lane == 0) device::mbarrier_arrive(shared.empty(gradients));
#pragma unroll
    for (int i = 0; i < kBiasTile / 2; ++i) sum[i] = fmaf(s[i], dp[i] - delta[i / 2 % 2], sum[i]);
  }
  // Adds up a tile and stores it. n: the number of loads before it.
  __device__ __forceinline__ void make(const BiasGradientTile& tile, unsigned& n) {
#pragma unroll
    for (float& x : sum) x = 0.0f;
    bool loaded = false;
    visit_bias_gradient(p, tile, [&](const BiasGradientStep& step) {
      if (!loaded) load_biases(tile);
      loaded = true;
      add(tile, step, n);
      n += 2;
    });
    const int first_row = tile.query_tile * kBiasTile + group * 64, first_key = tile.key_tile * kBiasTile;
    T* to = static_cast<T*>(p.dbias) + tile.sequence * p.strides.batch + tile.head * p.strides.head +
            first_row * p.strides.q + first_key;
    store_accumulators(to, p.strides.q, sum, 1.0f, row - group * 64, p.queries - first_row, p.keys - first_key, lane);
  }
  __device__ __forceinline__ void run() {
    unsigned n = 0;
    for (device::Ring<Shared::kSlots> slots;; slots.next()) {
      device::mbarrier_wait(shared.slot_full(slots.stage), slots.parity);
      const int number = __shfl_sync(0xffffffffu, device::load(shared.number(slots.stage)), 0);
      if (number >= p.tiles) return;
      __syncwarp(0xffffffffu);  // all lanes have read the slot before one of them releases it
      if (lane == 0) device::mbarrier_arrive(shared.slot_empty(slots.stage));
      make(BiasGradientTile(p, number), n);
    }
  }
};

template <class T, int kDim, int kBlock> __global__ void __launch_bounds__(kBiasThreads, 1)
    backward_sm90_bias(const __grid_constant__ BackwardMaps maps, const __grid_constant__ BiasGradientParams p) {
  WARPSMITH_DYNAMIC_SHARED(memory);
  const BiasGradientShared<kDim> shared{memory};
  if (threadIdx.x == 0) shared.initialise();
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);
  if (warpgroup == 0) {
    device::decrease_registers<40>();
    if (threadIdx.x == 0) load_bias_gradient<kDim, kBlock>(p, maps, shared);
  } else {
    device::increase_registers<232>();
    BiasGradient<T, kDim, kBlock>(p, shared, warpgroup - 1).run();
  }
}

}  // namespace warpsmith::attention
