#pragma once
#include "kernels/attention/portable/portable_config.h"
#include "kernels/attention/portable/portable_logits.cuh"

// The forward of attention for sm_80 and newer, with every option.
//
// A block owns a tile of queries of one head. Reads q once. Reads the keys and values that some query of the tile sees
// once for each tile and query head. Writes out, lse and lse_rest once. The values of a step are copied while its
// scores are computed, and the keys of the next step while the probabilities meet the values.
//
// Scores, sums and out are float; probabilities are rounded to T before they are multiplied by the values. A hidden key
// multiplies its value by 0, so a non-finite value spoils the rows of its tile even if it is hidden.
namespace warpsmith::attention {

// The running maximum and sum of a thread's two rows. The rows are lane / 4 and lane / 4 + 8 of the warp's 16.
template <class T> struct RunningSoftmax {
  // largest: in units of log2; a logit where `far` (online_softmax.cuh). sum: this thread's share until end().
  float largest[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
  bool far = false;  // the same in all lanes

  // Turns s into probabilities in place, and rescales `out`, the sum so far. s times `scale` > 0 are logits in units of
  // log2. Most steps raise no row's maximum: then the factors are 1 and the warp multiplies nothing.
  //   to_logits: what turns s into logits; null: s are logits. Read by far warps alone, so that it takes no register.
  template <int kColumns, int kWidth> __device__ __forceinline__ void add(Accumulators<kColumns>& s,
                                                                          Accumulators<kWidth>& out, float scale,
                                                                          const double* to_logits) {
    float maxima[2], most[2], base[2], factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float found = fmaxf(s[0][2 * r], s[0][2 * r + 1]);
#pragma unroll
      for (int n = 1; n < kColumns / 8; ++n) found = fmaxf(found, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
      found = fmaxf(found, __shfl_xor_sync(0xffffffffu, found, 1));
      maxima[r] = fmaxf(found, __shfl_xor_sync(0xffffffffu, found, 2));
      most[r] = fmaxf(largest[r], maxima[r] * scale);
      base[r] = most[r] == -INFINITY ? 0.0f : most[r];  // -inf - -inf would be NaN
      factor[r] = device::exp2(largest[r] - base[r]);
    }
    // A row becomes far only where its maximum is raised.
    if (far || __any_sync(0xffffffffu, factor[0] != 1.0f || factor[1] != 1.0f)) {
      if (far || __any_sync(0xffffffffu, is_far<T>(most[0], maxima[0]) || is_far<T>(most[1], maxima[1])))
        raise_far<kColumns>(s, to_logits == nullptr ? 1.0f : static_cast<float>(*to_logits), maxima, most, base,
                            factor);
      if (far) scale = kLog2e;
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[n][e] *= factor[e / 2];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest[r] = most[r];
      float partial = 0.0f;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          s[n][e] = device::exp2(s[n][e] * scale - base[r]);
          partial += s[n][e];
        }
      sum[r] = sum[r] * factor[r] + partial;
    }
  }
  // The cases in which the warp is or becomes far. Sets the next `largest`, and what the exponentials subtract.
  template <int kColumns> __device__ __forceinline__ void raise_far(Accumulators<kColumns>& s, float to_logits,
                                                                    const float (&maxima)[2], float (&most)[2],
                                                                    float (&base)[2], float (&factor)[2]) {
    const FarBase bases{to_logits, 0.0f, far};
    far = bases.template remains_far<T>(largest, maxima);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float logit = bases.raised(largest[r], maxima[r]);
      factor[r] = bases.factor(largest[r], logit);
      most[r] = far ? logit : bases.log2_base(logit);
      base[r] = far || logit == -INFINITY ? 0.0f : most[r];
      if (!far) continue;
      const float subtract = logit == -INFINITY ? 0.0f : logit;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) s[n][e] = device::rounded_product(s[n][e], to_logits) - subtract;
    }
  }

  // The end of row r, in every lane of the quad. `sink`: one more logit; -inf: none.
  __device__ __forceinline__ RowEnd end(int r, float sink) const {
    const float own = device::group_sum<4>(sum[r]);
    if (far) return far_end(largest[r], own, 0.0f, sink);
    if (is_far<T>(sink * kLog2e, sink)) return far_end(largest[r] * kLn2, own, 0.0f, sink);
    const float most = fmaxf(largest[r], sink * kLog2e), base = most == -INFINITY ? 0.0f : most;
    const float factor = device::exp2(largest[r] - base);
    const float whole = own * factor + device::exp2(sink * kLog2e - base);
    if (whole == 0.0f) return {0.0f, -INFINITY, 0.0f};
    return {factor / whole, (most + device::log2(whole)) * kLn2, 0.0f};
  }
};

template <class T, int kTile> __global__ void __launch_bounds__(kPortableForward[kTile].threads(), 1)
    forward_portable(const __grid_constant__ AttentionFwdParams p) {
  constexpr PortableTile tile = kPortableForward[kTile];
  constexpr int kDepth = tile.head_dim, kColumns = tile.columns, kStride = kSharedStride<T, kDepth>;
  constexpr int kThreads = tile.threads(), kTiles = tile.warp_tiles;
  WARPSMITH_DYNAMIC_SHARED(memory);
  T* const q_rows = reinterpret_cast<T*>(memory);
  T* const k_rows = q_rows + tile.rows * kStride;
  T* const v_rows = k_rows + kColumns * kStride;
  const AttentionProblem& a = p.problem;
  const unsigned block = block_number<false>(a);
  const int heads = static_cast<int>(a.heads_q), head = static_cast<int>(block % static_cast<unsigned>(heads));
  const RowTile at = row_tile<false, tile.rows>(a, block / static_cast<unsigned>(heads));
  const SequenceOfTile s = sequence_of_tile<false>(a, at.sequence);
  const int rows = min(tile.rows, s.queries - at.first);
  if (rows <= 0) return;
  const int head_dim = static_cast<int>(a.head_dim), head_dim_v = static_cast<int>(a.head_dim_v);
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int key_head = head / static_cast<int>(a.heads_q / a.heads_k);

  const Steps<kColumns> steps(columns_of_rows<false>(a, s, at.first, at.first + rows - 1));
  const auto copy_keys = [&](int step) {
    const int first = steps.begin + step * kColumns;
    const T* from = static_cast<const T*>(p.k) + s.batch * p.k_strides.batch + key_head * p.k_strides.head +
                    (s.first_key + first) * p.k_strides.seq;
    copy_rows<T, kDepth, kColumns, kThreads, !tile.extended>(k_rows, from, p.k_strides.seq, s.keys - first, head_dim);
    device::copy_async_commit();
  };
  const auto copy_values = [&](int step) {
    const int first = steps.begin + step * kColumns;
    const T* from = static_cast<const T*>(p.v) + s.batch * p.v_strides.batch + key_head * p.v_strides.head +
                    (s.first_key + first) * p.v_strides.seq;
    copy_rows<T, kDepth, kColumns, kThreads, !tile.extended>(v_rows, from, p.v_strides.seq, s.keys - first, head_dim_v);
    device::copy_async_commit();
  };

  const int first_row = at.first + 16 * kTiles * warp;  // of the warp
  const int row = first_row + lane / 4;                 // of the thread, in the first of kTiles
  const Columns of_all = columns_of_all<false>(a, s, first_row, first_row + 16 * kTiles - 1);
  Accumulators<kDepth> out[kTiles];
  RunningSoftmax<T> softmax[kTiles];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) fill<kDepth>(out[i], 0.0f);
  if (steps.count > 0) {
    const Logits<tile.extended> logits(a, s, head);
    const T* from = static_cast<const T*>(p.q) + s.batch * p.q_strides.batch + head * p.q_strides.head +
                    (s.first_query + at.first) * p.q_strides.seq;
    copy_rows<T, kDepth, tile.rows, kThreads>(q_rows, from, p.q_strides.seq, rows, head_dim);
    copy_keys(0);
    constexpr bool kScaleLater = !tile.extended;
    const bool later = kScaleLater && logits.scale > 0.0f;
    const float scale = later ? logits.scale * kLog2e : kLog2e;
    for (int step = 0; step < steps.count; ++step) {
      device::copy_async_wait<0>();
      __syncthreads();  // keys have arrived, and every warp has read the previous step's values
      copy_values(step);
      Accumulators<kColumns> x[kTiles];
      multiply_rows<T, kDepth, kColumns, kTiles>(x, q_rows + 16 * kTiles * warp * kStride, k_rows, lane);
      device::copy_async_wait<0>();
      __syncthreads();  // values have arrived, and every warp has read the keys
      if (step + 1 < steps.count) copy_keys(step + 1);
      const int first_column = steps.begin + step * kColumns;
      const DropoutOfHead dropout(a, s, head);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        // The scale is multiplied by where the exponentials are made, unless a hidden element, -inf, has no sign then.
        if (!later) logits.template scale_products<kColumns>(x[i], [](int, int, float) {});
        logits.template finish<T, kColumns>(x[i], AccumulatorCoords<false>{row + 16 * i, first_column + lane % 4 * 2},
                                            of_all, a, s);
        softmax[i].template add<kColumns, kDepth>(x[i], out[i], scale, later ? &a.softmax_scale : nullptr);
        if (tile.extended && a.dropout.seed != nullptr)
          dropout.template apply<kColumns, false>(a.dropout.threshold, first_row + 16 * i, first_column, lane,
                                                  [&](int n, int e, bool keep) {
                                                    if (!keep) x[i][n][e] = 0.0f;
                                                  });
      }
      add_product<T, kDepth, kColumns, kDepth, kTiles>(out, x, v_rows, lane);
    }
  }

  const float sink = sink_of<T>(a, head);
  const bool exists = at.sequence < a.batch;  // packed, false: tokens after the last sequence, with lse -inf
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const RowEnd end = softmax[i].end(r, exists ? sink : -INFINITY);
      float factor = end.factor;
      if (tile.extended && a.dropout.seed != nullptr) factor *= static_cast<float>(a.dropout.scale);
#pragma unroll
      for (int n = 0; n < kDepth / 8; ++n) {
        out[i][n][2 * r] *= factor;
        out[i][n][2 * r + 1] *= factor;
      }
      const int64_t length = a.cu_seqlens_q != nullptr ? a.total_q : a.seqlen_q;
      if (lane % 4 == 0 && row + 16 * i + 8 * r < s.queries) {
        const int64_t at = (s.batch * heads + head) * length + s.first_query + row + 16 * i + 8 * r;
        if (p.lse != nullptr) device::store(static_cast<float*>(p.lse) + at, end.lse);
        if (p.lse_rest != nullptr) device::store(static_cast<float*>(p.lse_rest) + at, end.rest);
      }
    }
  T* to = static_cast<T*>(p.out) + s.batch * p.out_strides.batch + head * p.out_strides.head +
          (s.first_query + first_row) * p.out_strides.seq;
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
    store_rows<T, kDepth>(to + i * 16 * p.out_strides.seq, p.out_strides.seq, out[i], s.queries - first_row - 16 * i,
                          head_dim_v, lane);
}

}  // namespace warpsmith::attention
