#pragma once
#include "kernels/attention/backward_order.cuh"
#include "kernels/attention/portable/portable_logits.cuh"

// The step that all portable backward kernels share: copy the rows of two tensors to shared memory, then make
// probabilities and the gradients of logits.
namespace warpsmith::attention {

// The statistics of queries (kStatistics) have the block size that backward_sink reads. A query that sees no key or
// does not exist has lse = +inf, so that its probabilities are 0. Far blocks: statistics_stride().
static_assert(kStatisticsQueries == kBlockQueries && kStatistics == statistics_stride(kBlockQueries, false));

__device__ __forceinline__ int64_t statistics_of(const AttentionProblem& p, const SequenceOfTile& s, int query,
                                                 int head) {
  const int64_t block =
      first_block(p.cu_seqlens_q, s.sequence, s.first_query, p.seqlen_q, kBlockQueries) + query / kBlockQueries;
  return (block * p.heads_q + head) * kStatistics + query % kBlockQueries;
}

// The lse of a thread's rows (queries) row and row + 8; delta follows kBlockQueries later. Null if the warp's block of
// queries does not exist: such a warp sees nothing, and must not read, because another warp may be correcting the delta
// there.
__device__ __forceinline__ const float* statistics_of_rows(const AttentionBwdParams& p, const SequenceOfTile& s,
                                                           int row, int head) {
  if (row / kBlockQueries * kBlockQueries >= s.queries) return nullptr;
  return static_cast<const float*>(p.workspace) + statistics_of(p.problem, s, row, head);
}

// The rows of one sequence and head of a tensor, from the sequence's first token on.
template <class T> struct HeadRows {
  const T* first;
  int64_t stride;

  __device__ __forceinline__ HeadRows(const void* base, const AttentionStrides& strides, int64_t batch, int head,
                                      int64_t token)
      : first(static_cast<const T*>(base) + batch * strides.batch + head * strides.head + token * strides.seq),
        stride(strides.seq) {}
};

template <class T>
__device__ __forceinline__ HeadRows<T> q_rows(const AttentionBwdParams& p, const SequenceOfTile& s, int head) {
  return {p.q, p.q_strides, s.batch, head, s.first_query};
}
template <class T>
__device__ __forceinline__ HeadRows<T> dout_rows(const AttentionBwdParams& p, const SequenceOfTile& s, int head) {
  return {p.dout, p.dout_strides, s.batch, head, s.first_query};
}
template <class T>
__device__ __forceinline__ HeadRows<T> k_rows(const AttentionBwdParams& p, const SequenceOfTile& s, int key_head) {
  return {p.k, p.k_strides, s.batch, key_head, s.first_key};
}
template <class T>
__device__ __forceinline__ HeadRows<T> v_rows(const AttentionBwdParams& p, const SequenceOfTile& s, int key_head) {
  return {p.v, p.v_strides, s.batch, key_head, s.first_key};
}

// Starts the copies of rows [first, first + kRows) of two tensors: q and dout, or k and v.
template <class T, int kDepth, int kRows, int kThreads, bool kAnew = false>
__device__ __forceinline__ void copy_pair(T* to, const HeadRows<T>& x, const HeadRows<T>& y, int first, int length,
                                          const AttentionProblem& p) {
  copy_rows<T, kDepth, kRows, kThreads, kAnew>(to, x.first + first * x.stride, x.stride, length - first,
                                               static_cast<int>(p.head_dim));
  copy_rows<T, kDepth, kRows, kThreads, kAnew>(to + kRows * kSharedStride<T, kDepth>, y.first + first * y.stride,
                                               y.stride, length - first, static_cast<int>(p.head_dim_v));
}

// Makes probabilities and their gradients for kTiles * 16 rows of a warp, from `first_row` on, and kColumns columns.
//   rows_x, rows_y, columns_x, columns_y: rows in shared memory. x is q and y is dout for queries; for keys, x is k
//        and y is v.
//   p:   output: probabilities after dropout, as they are multiplied by dout.
//   ds:  output: gradients of the logits; with `of_products`, gradients of the products q k^T over softmax_scale.
//   lse: statistics of the queries, from the first column on (keys are rows) or from the thread's first row on; null:
//        none. delta follows `to_delta` floats later. Read again in each step, because registers are short.
//   statistics: of all queries, in the workspace.
template <class T, int kDepth, int kColumns, int kTiles, bool kKeysAreRows, bool kExtended>
__device__ __forceinline__ void make_gradients(Accumulators<kColumns> (&p)[kTiles],
                                               Accumulators<kColumns> (&ds)[kTiles], bool of_products,
                                               const AttentionProblem& a, const SequenceOfTile& s, int first_row,
                                               const Columns& of_all, int head, int first_column, const T* rows_x,
                                               const T* rows_y, const T* columns_x, const T* columns_y,
                                               const float* lse, int to_delta, const void* statistics, int lane) {
  const int column = lane % 4 * 2;  // of the thread's first element
  multiply_rows<T, kDepth, kColumns, kTiles>(ds, rows_y, columns_y, lane);
  const bool dropout = kExtended && a.dropout.seed != nullptr;
  const float keep_scale = static_cast<float>(a.dropout.scale);
  const DropoutOfHead mask(a, s, head);
  static_assert(kColumns <= 64);
  uint32_t kept[kTiles];  // one bit per element
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    kept[i] = 0xffffffffu;
    if (dropout) {
      kept[i] = 0;
      mask.template apply<kColumns, kKeysAreRows>(a.dropout.threshold, first_row + 16 * i, first_column, lane,
                                                  [&](int n, int e, bool keep) {
                                                    kept[i] |= static_cast<uint32_t>(keep) << (4 * n + e);
                                                    ds[i][n][e] = keep ? ds[i][n][e] * keep_scale : 0.0f;
                                                  });
    }
  }
  // Calls f(i, n, statistics of two queries) for all elements of a thread.
  const auto for_queries = [&](int at, auto&& f) {
    device::Vector<float, 2> two;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if constexpr (!kKeysAreRows) {
        two = {};
        if (lse != nullptr) two = {{device::load(lse + at + 16 * i), device::load(lse + at + 16 * i + 8)}};
      }
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        if constexpr (kKeysAreRows) two = device::load_vector<2>(lse + at + n * 8 + column);
        f(i, n, two);
      }
    }
  };
  for_queries(to_delta, [&](int i, int n, const device::Vector<float, 2>& two) {
#pragma unroll
    for (int e = 0; e < 4; ++e) ds[i][n][e] -= two.at[kKeysAreRows ? e % 2 : e / 2];
  });
  const Logits<kExtended> logits(a, s, head);
  multiply_rows<T, kDepth, kColumns, kTiles>(p, rows_x, columns_x, lane);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    logits.template scale_products<kColumns>(p[i], [&](int n, int e, float derivative) {
      if (of_products) ds[i][n][e] *= derivative;
    });
    logits.template finish<T, kColumns>(
        p[i], AccumulatorCoords<kKeysAreRows>{first_row + 16 * i + lane / 4, first_column + column}, of_all, a, s);
  }
  // A far block of queries: lse and lse_rest, in the second half of its statistics, leave differences from lse.
  if (lse != nullptr && has_far_mark(device::load(lse))) {
    const int query = kKeysAreRows ? first_column : first_row;
    const float* far = static_cast<const float*>(statistics) + statistics_of(a, s, query, head) + kStatistics / 2 +
                       (kKeysAreRows ? column : lane / 4);
    const auto subtract = [&](float& x, float of, float rest) { x = (x - of) - rest; };
    if constexpr (kKeysAreRows) {
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        const auto of = device::load_vector<2>(far + n * 8), rest = device::load_vector<2>(far + n * 8 + kBlockQueries);
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
#pragma unroll
          for (int e = 0; e < 4; ++e) subtract(p[i][n][e], of.at[e % 2], rest.at[e % 2]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        const float of = device::load(far + 8 * i), rest = device::load(far + 8 * i + kBlockQueries);
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) subtract(p[i / 2][n][i % 2 * 2 + e], of, rest);
      }
    }
  }
  for_queries(0, [&](int i, int n, const device::Vector<float, 2>& two) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      p[i][n][e] = device::exp2(p[i][n][e] * kLog2e - two.at[kKeysAreRows ? e % 2 : e / 2]);
      // A hidden pair must contribute 0 even if its value or gradient is not finite.
      ds[i][n][e] = p[i][n][e] == 0.0f ? 0.0f : p[i][n][e] * ds[i][n][e];
      if (dropout) p[i][n][e] = (kept[i] >> (4 * n + e) & 1) != 0 ? p[i][n][e] * keep_scale : 0.0f;
    }
  });
}

}  // namespace warpsmith::attention
