#pragma once
#include "kernels/attention/portable/backward_portable.cuh"

namespace warpsmith::attention {

// dk and dv of 16-bit elements. A block owns a tile of keys of one key head, keeps its rows of k and v in shared
// memory, and loops over the queries that see them, one query head of the group after the other. Reads its own rows
// once, and the other rows once for each tile of keys that meets them. Writes its gradients once.
//
// A step has two halves, and the four warps divide the work differently in each. In the first half, each warp makes a
// part of the probabilities and of dS, and rounds them to T into shared memory. In the second half, each warp
// multiplies all queries of the step for 32 keys and some of the columns of dk and dv. So no product is made twice, and
// one load of a matrix from shared memory serves 32 rows or columns. Before, these loads and not the tensor cores
// limited the kernel.
template <class T, int kTile> __global__ void __launch_bounds__(kPortableKeys[kTile].threads(), 1)
    backward_portable_keys(const __grid_constant__ BackwardPortableParams params) {
  const AttentionBwdParams& p = params.gradients;
  constexpr PortableKeyTile tile = kPortableKeys[kTile];
  constexpr int kDepth = tile.head_dim, kColumns = tile.columns, kStride = kSharedStride<T, kDepth>;
  constexpr int kThreads = tile.threads(), kTiles = tile.warp_tiles, kGradientTiles = tile.kGradientTiles;
  constexpr int kPart = tile.warp_columns(), kWidth = tile.warp_width();
  constexpr int kScoreStride = kColumns + 8;
  WARPSMITH_DYNAMIC_SHARED(memory);
  T* const rows = reinterpret_cast<T*>(memory);
  T* const scores = rows + 2 * tile.rows * kStride;  // p, then dS
  constexpr int kScores = tile.rows * kScoreStride;
  const auto stage = [&](int step) {
    return memory + 2 * (tile.rows * tile.row_bytes() + tile.score_bytes()) + step % tile.stages * tile.stage_bytes();
  };
  const AttentionProblem& a = p.problem;
  const int ratio = static_cast<int>(a.heads_q / a.heads_k), heads = static_cast<int>(a.heads_k);
  const unsigned block = block_number<true>(a);
  const int head = static_cast<int>(block % static_cast<unsigned>(heads));
  const RowTile at = row_tile<true, tile.rows>(a, block / static_cast<unsigned>(heads));
  const SequenceOfTile s = sequence_of_tile<true>(a, at.sequence);
  const int count = min(tile.rows, s.keys - at.first);
  if (count <= 0) return;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;

  constexpr int kRowWarps = tile.rows / (16 * kTiles), kGradientWarps = tile.rows / (16 * kGradientTiles);
  const int local = warp % kRowWarps * 16 * kTiles, part = warp / kRowWarps * kPart;
  const int gradient_row = warp % kGradientWarps * 16 * kGradientTiles, first_width = warp / kGradientWarps * kWidth;
  const int first_row = at.first + local;
  const Columns of_all = columns_of_all<true>(a, s, first_row, first_row + 16 * kTiles - 1);
  const Steps<kColumns> columns(columns_of_rows<true>(a, s, at.first, at.first + count - 1));
  const int end_head = columns.count > 0 ? (head + 1) * ratio : 0;
  struct Step {
    int head, first;  // of q; the first query
  } at_step{head * ratio, columns.begin};
  const auto after = [&](const Step& x) -> Step {
    if (x.first + kColumns < columns.begin + columns.count * kColumns) return {x.head, x.first + kColumns};
    return {x.head + 1, columns.begin};
  };
  const auto copy_step = [&](int step, const Step& next) {
    T* to = reinterpret_cast<T*>(stage(step));
    copy_pair<T, kDepth, kColumns, kThreads>(to, q_rows<T>(p, s, next.head), dout_rows<T>(p, s, next.head), next.first,
                                             s.queries, a);
    if (thread < 2 * kColumns) {
      const float* from = static_cast<const float*>(p.workspace) + statistics_of(a, s, next.first, next.head);
      device::copy_async<4>(to + 2 * kColumns * kStride + thread * 2,
                            from + thread / kColumns * kBlockQueries + thread % kColumns);
    }
    device::copy_async_commit();
  };
  static_assert(2 * kColumns <= kThreads && kBlockQueries % kColumns == 0);

  Accumulators<kWidth> dk[kGradientTiles], dv[kGradientTiles];
#pragma unroll
  for (int i = 0; i < kGradientTiles; ++i) {
    fill<kWidth>(dk[i], 0.0f);
    fill<kWidth>(dv[i], 0.0f);
  }
  if (end_head > 0) {
    copy_pair<T, kDepth, tile.rows, kThreads>(rows, k_rows<T>(p, s, head), v_rows<T>(p, s, head), at.first, s.keys, a);
    copy_step(0, at_step);
    const T *own_k = rows + local * kStride, *own_v = own_k + tile.rows * kStride;
    for (int step = 0; at_step.head < end_head; ++step) {
      device::copy_async_wait<0>();
      __syncthreads();  // the columns have arrived, and every warp has read the previous stage and scores
      if (tile.stages > 1 && after(at_step).head < end_head) copy_step(step + 1, after(at_step));
      const T* q = reinterpret_cast<const T*>(stage(step));
      const T* dout = q + kColumns * kStride;
      const float* statistics = reinterpret_cast<const float*>(dout + kColumns * kStride);
      {
        Accumulators<kPart> probabilities[kTiles], ds[kTiles];
        make_gradients<T, kDepth, kPart, kTiles, true, tile.extended>(
            probabilities, ds, true, a, s, first_row, of_all, at_step.head, at_step.first + part, own_k, own_v,
            q + part * kStride, dout + part * kStride, statistics + part, kColumns, p.workspace, lane);
        T* to = scores + local * kScoreStride + part;
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          store_scores<T, kPart>(to + 16 * i * kScoreStride, kScoreStride, probabilities[i], lane);
          store_scores<T, kPart>(to + kScores + 16 * i * kScoreStride, kScoreStride, ds[i], lane);
        }
      }
      __syncthreads();
      const T* from = scores + gradient_row * kScoreStride;
      add_shared_product<T, kDepth, kColumns, kWidth, kGradientTiles>(dv, from, dout + first_width, lane);
      add_shared_product<T, kDepth, kColumns, kWidth, kGradientTiles>(dk, from + kScores, q + first_width, lane);
      at_step = after(at_step);
      if (tile.stages == 1 && at_step.head < end_head) {
        __syncthreads();  // every warp has read the stage
        copy_step(step + 1, at_step);
      }
    }
  }

  const auto write = [&](void* base, const AttentionStrides& strides, Accumulators<kWidth>(&x)[kGradientTiles],
                         int64_t head_dim, float factor) {
    const int first = at.first + gradient_row;
    const HeadRows<T> to(base, strides, s.batch, head, s.first_key);
    write_gradient<T, kWidth, kGradientTiles>(const_cast<T*>(to.first) + first * to.stride + first_width, to.stride, x,
                                              factor, s.keys - first, static_cast<int>(head_dim) - first_width, lane);
  };
  write(p.dk, p.dk_strides, dk, a.head_dim, static_cast<float>(a.softmax_scale));
  write(p.dv, p.dv_strides, dv, a.head_dim_v, 1.0f);
}

}  // namespace warpsmith::attention
