#pragma once
#include "kernels/attention/backward_order.cuh"
#include "kernels/attention/portable_logits.cuh"

// What all portable kernels of the backward do in a step: rows of both pairs of tensors to shared memory,
// probabilities, and the gradients of logits.
namespace warpsmith::attention {

// Statistics of queries (kStatistics) are in the blocks of which backward_sink makes its sums. lse is +inf where a
// query sees no key or does not exist, so that its probabilities are 0.
static_assert(kStatisticsQueries == kBlockQueries);

__device__ __forceinline__ int64_t statistics_of(const AttentionProblem& p, const SequenceOfTile& s, int query,
                                                 int head) {
  const int64_t block =
      first_block(p.cu_seqlens_q, s.sequence, s.first_query, p.seqlen_q, kBlockQueries) + query / kBlockQueries;
  return (block * p.heads_q + head) * kStatistics + query % kBlockQueries;
}

// lse of a thread's rows of queries, row + 8 r; delta is kBlockQueries behind. Null where the warp's block of queries
// does not exist: nothing is seen there, and another warp's delta may be corrected at any time.
__device__ __forceinline__ const float* statistics_of_rows(const AttentionBwdParams& p, const SequenceOfTile& s,
                                                           int row, int head) {
  if (row / kBlockQueries * kBlockQueries >= s.queries) return nullptr;
  return static_cast<const float*>(p.workspace) + statistics_of(p.problem, s, row, head);
}

// Elements of the tensors of one sequence, from its first token of a head on.
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

// Starts copies of rows [first, first + kRows) of a pair of tensors: q and dout, or k and v.
template <class T, int kDepth, int kRows, int kThreads>
__device__ __forceinline__ void copy_pair(T* to, const HeadRows<T>& x, const HeadRows<T>& y, int first, int length,
                                          const AttentionProblem& p) {
  copy_rows<T, kDepth, kRows, kThreads>(to, x.first + first * x.stride, x.stride, length - first,
                                        static_cast<int>(p.head_dim));
  copy_rows<T, kDepth, kRows, kThreads>(to + kRows * kSharedStride<T, kDepth>, y.first + first * y.stride, y.stride,
                                        length - first, static_cast<int>(p.head_dim_v));
}

// Probabilities and their gradients for the rows of a warp, from `first_row` on, and kColumns columns. All T are in
// shared memory, in rows: x is q and y dout where queries are rows or columns, and k and v where keys are. p holds
// probabilities as they meet dout, ds the gradients of logits or, `of_products`, those of products over softmax_scale.
// `lse`: of the queries, from the first column on or from the thread's first row on (null: none), and delta `to_delta`
// behind it. Those of rows are read
// again in each step: registers are short.
template <class T, int kDepth, int kColumns, int kTiles, bool kKeysAreRows, bool kExtended>
__device__ __forceinline__ void make_gradients(Accumulators<kColumns> (&p)[kTiles],
                                               Accumulators<kColumns> (&ds)[kTiles], bool of_products,
                                               const AttentionProblem& a, const SequenceOfTile& s, int first_row,
                                               const Columns& of_all, int head, int first_column, const T* rows_x,
                                               const T* rows_y, const T* columns_x, const T* columns_y,
                                               const float* lse, int to_delta, int lane) {
  const int column = lane % 4 * 2;  // of the thread's first element
  multiply_rows<T, kDepth, kColumns, kTiles>(ds, rows_y, columns_y, lane);
  const bool dropout = kExtended && a.dropout.seed != nullptr;
  const float keep_scale = static_cast<float>(a.dropout.scale);
  const DropoutOfHead mask(a, s, head);
  static_assert(kColumns <= 64);
  uint32_t kept[kTiles];  // a bit an element
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
  // f(i, n, of its two queries) for all elements of a thread.
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
    logits.template finish<T, kColumns>(p[i], Place<kKeysAreRows>{first_row + 16 * i + lane / 4, first_column + column},
                                        of_all, a, s);
  }
  for_queries(0, [&](int i, int n, const device::Vector<float, 2>& two) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      p[i][n][e] = device::exp2(p[i][n][e] - two.at[kKeysAreRows ? e % 2 : e / 2]);
      // Where nothing is seen, values and gradients that are not finite must not count.
      ds[i][n][e] = p[i][n][e] == 0.0f ? 0.0f : p[i][n][e] * ds[i][n][e];
      if (dropout) p[i][n][e] = (kept[i] >> (4 * n + e) & 1) != 0 ? p[i][n][e] * keep_scale : 0.0f;
    }
  });
}

}  // namespace warpsmith::attention
