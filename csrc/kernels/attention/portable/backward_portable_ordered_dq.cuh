#pragma once
#include "device/fence.h"
#include "kernels/attention/portable/backward_portable.cuh"

// dq, dk and dv of 16-bit elements in one kernel, for problems without softcap, biases, masks and dropout. It makes 5
// products, where a kernel for dq and another for dk and dv make 7.
//
// A block owns a tile of keys of one key head. It keeps its rows of k and v in shared memory and its dk and dv in
// registers, and loops over the blocks of 64 queries that see them, from the last to the first, for one query head of
// the group after the other. It adds its part of dq to float sums in the workspace.
//
// The tiles of a head add to the dq of a block of queries in the order of their numbers, so the sums have a fixed
// order. The first tile stores its part without reading; the last one writes dq. The accumulators of a tile begin with
// the sums of the tiles before it.
//
// One warp waits for the block's turn while the others make probabilities, and another hands the turn on while they
// make those of the next step. So neither the flag's way through the L2 cache nor the fence before it holds up all
// warps. The sums are read while dv and dk are multiplied.
//
// This cannot deadlock. Blocks claim tiles from a counter, with ascending keys. A tile waits only for tiles of lower
// numbers, whose blocks are running or have finished.
//
// Reads k, v once, q and dout once for each tile of keys that meets them. Writes dk, dv and dq once. Reads and writes
// the sums of dq once for each tile that meets them, except the first read and the last write.
namespace warpsmith::attention {

struct OrderedDqParams {
  AttentionBwdParams gradients;
  float* sums;       // [blocks of queries][heads][warps][accumulators / 4][lanes][4]: dq without softmax_scale
  int* tiles_added;  // [blocks of queries][heads]: the tile that adds next, counted from the first that adds
  int* counter;      // the next tile
};

// x += p^T b for kTiles * 16 columns of p, which has kRows rows of kStrideOfP elements in shared memory. b has kRows
// rows; it points to the first of kWidth columns.
template <class T, int kDepth, int kRows, int kStrideOfP, int kWidth, int kTiles>
__device__ __forceinline__ void add_transposed(Accumulators<kWidth> (&x)[kTiles], const T* p, const T* b, int lane) {
  constexpr int kStride = kSharedStride<T, kDepth>;
  const T* row_p = p + (lane % 8 + lane / 16 * 8) * kStrideOfP + lane / 8 % 2 * 8;
  const T* row_b = b + lane % 16 * kStride + lane / 16 * 8;
#pragma unroll
  for (int k = 0; k < kRows; k += 16) {
    uint32_t left[kTiles][4];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) device::load_matrix<true>(left[i], row_p + k * kStrideOfP + i * 16);
#pragma unroll
    for (int n = 0; n < kWidth / 16; ++n) {
      uint32_t right[4];
      device::load_matrix<true>(right, row_b + k * kStride + n * 16);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        device::mma_m16n8k16<T>(x[i][2 * n], left[i], {right[0], right[1]});
        device::mma_m16n8k16<T>(x[i][2 * n + 1], left[i], {right[2], right[3]});
      }
    }
  }
}

// A tile's position in the order in which tiles add to the dq of a block of queries.
struct DqOrder {
  int block;   // its number, times heads plus head: fits, as a grid has had it
  int number;  // 0: the first tile
  bool last;
};

template <int kRows> __device__ __forceinline__ DqOrder dq_order_of(const AttentionProblem& a, const SequenceOfTile& s,
                                                                    int tile, int head, int first) {
  const Columns seen = columns_of_rows<false>(a, s, first, min(first + kBlockQueries, s.queries) - 1);
  return {static_cast<int>(statistics_of(a, s, first, head) / kStatistics), tile - seen.begin / kRows,
          tile == (seen.end - 1) / kRows};
}

template <class T, int kTile> __global__ void __launch_bounds__(kPortableOrderedDq[kTile].threads(), 1)
    backward_portable_ordered_dq(const __grid_constant__ OrderedDqParams params) {
  const AttentionBwdParams& p = params.gradients;
  constexpr PortableOrderedDqTile tile = kPortableOrderedDq[kTile];
  constexpr int kDepth = tile.head_dim, kColumns = tile.columns, kStride = kSharedStride<T, kDepth>;
  constexpr int kThreads = tile.threads(), kTiles = tile.kRowTiles, kQueryTiles = tile.query_tiles;
  constexpr int kPart = tile.warp_columns(), kWidth = tile.warp_width(), kQueryWidth = tile.query_width();
  constexpr int kScoreStride = kColumns + 8;
  constexpr int kSumsOfThread = kQueryTiles * kQueryWidth / 8;  // pieces of four
  static_assert(kColumns == kBlockQueries && 2 * kColumns <= kThreads);
  WARPSMITH_SHARED(unsigned, claimed, 1);
  WARPSMITH_DYNAMIC_SHARED(memory);
  T* const rows = reinterpret_cast<T*>(memory);
  T* const scores = rows + 2 * tile.rows * kStride;  // p, then dS: a row per key
  constexpr int kScores = tile.rows * kScoreStride;
  const auto stage = [&](int step) {
    return memory + 2 * (tile.rows * tile.row_bytes() + tile.score_bytes()) + step % tile.stages * tile.stage_bytes();
  };
  using Four = device::Vector<float, 4>;
  const AttentionProblem& a = p.problem;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  unsigned block = blockIdx.x;
  // Sequences of one tile need no order, and without queries nothing has reset the counter.
  if (a.seqlen_k > tile.rows && a.seqlen_q > 0) {
    if (thread == 0) device::store(claimed, static_cast<unsigned>(atomicAdd(params.counter, 1)));
    __syncthreads();
    block = device::load(claimed);
  }
  const int ratio = static_cast<int>(a.heads_q / a.heads_k), heads = static_cast<int>(a.heads_k);
  const int head = static_cast<int>(block % static_cast<unsigned>(heads));
  const RowTile at = row_tile<true, tile.rows>(a, block / static_cast<unsigned>(heads));
  const SequenceOfTile s = sequence_of_tile<true>(a, at.sequence);
  const int count = min(tile.rows, s.keys - at.first);
  if (count <= 0) return;

  const Steps<kColumns> columns(columns_of_rows<true>(a, s, at.first, at.first + count - 1));
  struct Step {
    int head, first;  // of q; the first query
  } at_step{head * ratio, columns.begin + (columns.count - 1) * kColumns};
  const int end_head = (head + 1) * ratio;
  // All heads of one block of queries, then those of the block before. Head by head, tiles that meet fewer queries
  // would wait for the others once per head.
  const auto after = [&](const Step& x) -> Step {
    if (x.head + 1 < end_head) return {x.head + 1, x.first};
    return {head * ratio, x.first - kColumns};
  };
  const auto exists = [&](const Step& x) { return x.first >= columns.begin; };
  const int number = at.first / tile.rows;  // of the tile

  DqOrder order{};
  // After a barrier behind the stores of sums.
  const auto hand_on = [&] {
    if (thread == 0 && !order.last) device::store_release(params.tiles_added + order.block, order.number + 1);
  };

  constexpr int kRowWarps = tile.rows / (16 * kTiles), kQueryWarps = kColumns / (16 * kQueryTiles);
  // Of probabilities and dS, then of dk and dv, a warp has the rows from `local` on. Of dq it has the rows from
  // local_query on.
  const int local = warp % kRowWarps * 16 * kTiles, part = warp / kRowWarps * kPart;
  const int first_width = warp / kRowWarps * kWidth;
  const int local_query = warp % kQueryWarps * 16 * kQueryTiles, query_width = warp / kQueryWarps * kQueryWidth;
  const int first_row = at.first + local;
  const Columns of_all = columns_of_all<true>(a, s, first_row, first_row + 16 * kTiles - 1);
  const auto copy_step = [&](int step, const Step& next) {
    T* to = reinterpret_cast<T*>(stage(step));
    copy_pair<T, kDepth, kColumns, kThreads, (kDepth < 256)>(to, q_rows<T>(p, s, next.head),
                                                             dout_rows<T>(p, s, next.head), next.first, s.queries, a);
    if (thread < 2 * kColumns)
      device::copy_async<4>(
          to + 2 * kColumns * kStride + thread * 2,
          static_cast<const float*>(p.workspace) + statistics_of(a, s, next.first, next.head) + thread);
    device::copy_async_commit();
  };

  Accumulators<kWidth> dk[kTiles], dv[kTiles];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    fill<kWidth>(dk[i], 0.0f);
    fill<kWidth>(dv[i], 0.0f);
  }
  if (columns.count > 0) {
    copy_pair<T, kDepth, tile.rows, kThreads>(rows, k_rows<T>(p, s, head), v_rows<T>(p, s, head), at.first, s.keys, a);
    copy_step(0, at_step);
    Four* const of_warp = reinterpret_cast<Four*>(params.sums) + warp * (kSumsOfThread * 32) + lane;
    const T *own_k = rows + local * kStride, *own_v = own_k + tile.rows * kStride;
    for (int step = 0; exists(at_step); ++step) {
      const Step next = after(at_step);
      device::copy_async_wait<0>();
      // The columns have arrived. Every warp has read the previous stage and scores, and has stored its sums.
      __syncthreads();
      if (step > 0) hand_on();
      order = dq_order_of<tile.rows>(a, s, number, at_step.head, at_step.first);
      if (thread == 32 && order.number > 0)
        while (device::load_acquire(params.tiles_added + order.block) != order.number) {}
      __syncwarp(0xffffffffu);
      if (tile.stages > 1 && exists(next)) copy_step(step + 1, next);
      const T* q = reinterpret_cast<const T*>(stage(step));
      const T* dout = q + kColumns * kStride;
      {
        const float* statistics = reinterpret_cast<const float*>(dout + kColumns * kStride);
        Accumulators<kPart> probabilities[kTiles], ds[kTiles];
        make_gradients<T, kDepth, kPart, kTiles, true, false>(
            probabilities, ds, true, a, s, first_row, of_all, at_step.head, at_step.first + part, own_k, own_v,
            q + part * kStride, dout + part * kStride, statistics + part, kColumns, p.workspace, lane);
        T* to = scores + local * kScoreStride + part;
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          store_scores<T, kPart>(to + 16 * i * kScoreStride, kScoreStride, probabilities[i], lane);
          store_scores<T, kPart>(to + kScores + 16 * i * kScoreStride, kScoreStride, ds[i], lane);
        }
      }
      __syncthreads();  // probabilities and dS of all warps, and the order
      Four* const sums = of_warp + int64_t{order.block} * (tile.warps * kSumsOfThread * 32);
      Accumulators<kQueryWidth> dq[kQueryTiles];
#pragma unroll
      for (int i = 0; i < kSumsOfThread; ++i) {
        Four four{};
        if (order.number > 0) four = device::load(sums + i * 32);
#pragma unroll
        for (int e = 0; e < 4; ++e) dq[i / (kQueryWidth / 8)][i % (kQueryWidth / 8)][e] = four.at[e];
      }
      const T* from = scores + local * kScoreStride;
      add_shared_product<T, kDepth, kColumns, kWidth, kTiles>(dv, from, dout + first_width, lane);
      add_shared_product<T, kDepth, kColumns, kWidth, kTiles>(dk, from + kScores, q + first_width, lane);
      if (tile.stages == 1 && exists(next)) {
        __syncthreads();  // every warp has read the stage
        copy_step(step + 1, next);
      }
      add_transposed<T, kDepth, tile.rows, kScoreStride, kQueryWidth, kQueryTiles>(dq, scores + kScores + local_query,
                                                                                   rows + query_width, lane);
      if (order.last) {
        // With one stage, the address of the batch entry would be kept from step to step, and spilled.
        const int64_t batch = s.batch + (tile.stages == 1 ? computed_anew(0, at_step.first) : 0);
        const HeadRows<T> to(p.dq, p.dq_strides, batch, at_step.head, s.first_query);
        const int row = at_step.first + local_query;
        write_gradient<T, kQueryWidth, kQueryTiles>(const_cast<T*>(to.first) + row * to.stride + query_width, to.stride,
                                                    dq, static_cast<float>(a.softmax_scale), s.queries - row,
                                                    static_cast<int>(a.head_dim) - query_width, lane);
      } else {
#pragma unroll
        for (int i = 0; i < kSumsOfThread; ++i) {
          Four four;
#pragma unroll
          for (int e = 0; e < 4; ++e) four.at[e] = dq[i / (kQueryWidth / 8)][i % (kQueryWidth / 8)][e];
          device::store(sums + i * 32, four);
        }
      }
      at_step = next;
    }
    __syncthreads();
    hand_on();
  }

  const auto write = [&](void* base, const AttentionStrides& strides, Accumulators<kWidth>(&x)[kTiles],
                         int64_t head_dim, float factor) {
    const HeadRows<T> to(base, strides, s.batch, head, s.first_key);
    write_gradient<T, kWidth, kTiles>(const_cast<T*>(to.first) + first_row * to.stride + first_width, to.stride, x,
                                      factor, s.keys - first_row, static_cast<int>(head_dim) - first_width, lane);
  };
  write(p.dk, p.dk_strides, dk, a.head_dim, static_cast<float>(a.softmax_scale));
  write(p.dv, p.dv_strides, dv, a.head_dim_v, 1.0f);
}

}  // namespace warpsmith::attention
