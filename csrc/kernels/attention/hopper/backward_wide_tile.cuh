#pragma once
#include <cmath>

#include "device/convert.h"
#include "device/fence.h"
#include "device/math.h"
#include "device/swizzle.h"
#include "device/tensor_copy.h"
#include "device/vector.h"
#include "device/wgmma.h"
#include "kernels/attention/backward_order.cuh"
#include "kernels/attention/store_accumulators.cuh"

// What both kernels of the Hopper backward for head dimensions to 256 share (backward_wide.cuh): params, the tile of a
// block of threads, operands.
namespace warpsmith::attention {

using device::Mbarrier;
using device::Swizzle;

constexpr int kWideDim = 256;   // head dimension of the kernels, to which tensors are padded with zeros
constexpr int kWideKeys = 64;   // keys of a tile of the first kernel, and of a step of the second
constexpr int kWideStep = 64;   // queries of a step of the first kernel, and of a block of statistics
constexpr int kWideRows = 128;  // query rows of a tile of the second kernel
constexpr int kWideThreads = 3 * 128;
// Per thread. One producer and two consumer warpgroups together may have 3 * 168, which the launch bounds leave.
constexpr int kWideProducerRegisters = 24, kWideConsumerRegisters = 240;

constexpr int kWidePanels = kWideDim / 64;      // panels of 64 16-bit columns, the span of the swizzle
constexpr int kWideRowBytes = 128;              // bytes of a panel's row
constexpr int kWideBytes = 64 * kWideDim * 2;   // bytes of 64 rows
constexpr int kWideStatistics = 2 * kWideStep;  // floats of a block of queries that each step reads: lse and delta
constexpr int kWideStride = statistics_stride(kWideStep, false);

struct WideParams {
  Schedule schedule;  // of tiles of keys and key heads, or of tiles of query rows and query heads
  Window window;
  const int32_t *cu_seqlens_q, *cu_seqlens_k;  // null: not packed
  int batch, heads, heads_per_key_head;
  int queries, keys, total_q, total_k;
  int head_dim, head_dim_v;
  const float* statistics;  // [blocks of 64 queries, heads, kWideStride], as statistics_place() orders them
  void *dq, *dk, *dv;
  AttentionStrides dq_strides, dk_strides, dv_strides;
  float scale, to_scores, scale_log2;  // to_scores: 1 / scale
};

struct WideMaps {
  TensorMap q, k, v, dout;  // boxes of 64 rows and 64 columns
};

// The tile of a block of threads, in shared memory.
struct alignas(16) WideTile {
  int batch;             // packed: 0; -1: the block of threads has no tile
  int head;              // of keys, or of queries
  int first;             // the first key or query row
  int begin, end;        // blocks to visit: of 64 queries, or of 64 keys
  int queries, keys;     // of the sequence
  int shift;             // as in AttentionProblem
  int q_token, k_token;  // the sequence's first tokens; not packed: 0
  int first_block;       // of the sequence's statistics
  MapPlace q, k;         // of the sequence
};

// Fills in all but `begin` and `end`. Returns the tile's place in the schedule; batch < 0: there is no tile.
__device__ __forceinline__ TileIndex describe_wide_tile(const WideParams& p, int tile_rows, WideTile* t) {
  const TileIndex at = tile_at(p.schedule, static_cast<int>(blockIdx.x));
  if (at.batch < 0) {
    device::store(&t->batch, -1);
    return at;
  }
  const bool packed = p.cu_seqlens_q != nullptr;
  // Sequence number p.batch holds the tokens after the last sequence, which see nothing and are seen by nothing.
  Sequence q{0, p.queries}, k{0, p.keys};
  MapPlace q_place{0, at.batch}, k_place{0, at.batch};
  if (packed) {
    q = sequence_at(p.cu_seqlens_q, at.batch, p.batch, p.total_q, p.queries);
    k = sequence_at(p.cu_seqlens_k, at.batch, p.batch, p.total_k, p.keys);
    q_place = map_place(q);
    k_place = map_place(k);
  }
  device::store(&t->q, q_place);
  device::store(&t->k, k_place);
  device::store(&t->batch, packed ? 0 : at.batch);
  device::store(&t->head, at.head);
  device::store(&t->first, at.row_tile * tile_rows);
  device::store(&t->queries, q.length);
  device::store(&t->keys, k.length);
  device::store(&t->shift, p.window.shift(q.length, k.length));
  device::store(&t->q_token, q.start);
  device::store(&t->k_token, k.start);
  device::store(&t->first_block, static_cast<int>(first_block(p.cu_seqlens_q, at.batch, q.start, q.length, kWideStep)));
  return at;
}

// Loads 64 rows of a head as panels of 64 columns. Rows and columns beyond the tensor arrive as zero.
__device__ __forceinline__ void load_wide_rows(unsigned char* to, const TensorMap* map, Mbarrier* full, bool packed,
                                               int row, int head, int batch) {
#pragma unroll
  for (int panel = 0; panel < kWidePanels; ++panel)
    load_box(to + panel * 64 * kWideRowBytes, map, full, packed, panel * 64, row, head, batch);
}

// Starts out = a b^T for 64 rows of each, over all columns. Asynchronous.
template <class T>
__device__ __forceinline__ void multiply_wide_rows(float (&out)[32], const unsigned char* a, const unsigned char* b) {
  const uint64_t left = device::wgmma_descriptor(Swizzle::bytes128, a, 16, 1024);
  const uint64_t right = device::wgmma_descriptor(Swizzle::bytes128, b, 16, 1024);
  device::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kWideDim / 16; ++i) {  // four instructions a panel
    const uint32_t at = i / 4 * 64 * kWideRowBytes + i % 4 * 32;
    if (i == 0)
      device::wgmma_overwrite<T, 64>(out, device::advance(left, at), device::advance(right, at));
    else
      device::wgmma<T, 64>(out, device::advance(left, at), device::advance(right, at), true);
  }
  device::wgmma_commit();
}

// Starts sum += weights * rows for 64 rows. Asynchronous. `weights`: 64 x 64, the A operands of four instructions.
template <class T> __device__ __forceinline__ void accumulate_wide_rows(float (&sum)[kWideDim / 2],
                                                                        const uint32_t (&weights)[4][4],
                                                                        const unsigned char* rows) {
  const uint64_t b = device::wgmma_descriptor(Swizzle::bytes128, rows, 64 * kWideRowBytes, 1024);
  device::wgmma_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i)
    device::wgmma<T, kWideDim, device::Major::mn>(sum, weights[i], device::advance(b, i * 16 * kWideRowBytes), true);
  device::wgmma_commit();
}

__device__ __forceinline__ void hold_weights(uint32_t (&weights)[4][4]) {
#pragma unroll
  for (auto& four : weights) device::hold(four);
}

// Arrives once for the whole warp. Its lanes must have synchronised before.
__device__ __forceinline__ void arrive_as_warp(Mbarrier* barrier) {
  if (threadIdx.x % 32 == 0) device::mbarrier_arrive(barrier);
}

// The thread's first row among the 64 rows of its warpgroup. Its second row is 8 further.
__device__ __forceinline__ int wide_row() { return static_cast<int>(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4); }

}  // namespace warpsmith::attention
