#pragma once
#include "kernels/attention/backward_order.cuh"
#include "kernels/attention/portable_config.h"
#include "kernels/attention/portable_logits.cuh"

// The backward of attention in code of sm_80, with every option and without an atomic: dq, dk and dv, and dbias each
// have a kernel whose blocks own a part of the result and add to it in the order of their steps. The price is that each
// makes the probabilities again: 4 products for dk and dv, 3 or 6 for dq, 2 for dbias, where one kernel would need 5.
//
// delta = dot(dout, out) has the rounding of out. Where a softmax is saturated, the differences dP - delta that the
// gradients are made of cancel, and that rounding is all that is left of them. The kernel of dq, which runs first, sums
// p * (dP - delta) over the keys of a row, which says by how much delta is off, and corrects it for all that run after
// it. It is launched twice: the second time, blocks in which no correction counts return at once.
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

constexpr int kStatisticsThreads = 256;

// delta = dot(dout, out) - dlse. Reads both once. A block takes 64 queries of one head, 16 lanes a query. In float one
// thread adds in the order of multiply_rows: where a query sees one key, delta and the product of dout and v are then
// equal to the last bit, and their difference is 0 as it must be.
template <class T> __global__ void __launch_bounds__(kStatisticsThreads)
    portable_statistics(const __grid_constant__ AttentionBwdParams p) {
  constexpr int kLanes = sizeof(T) == 4 ? 1 : 16, kAtOnce = kStatisticsThreads / kLanes,
                kElements = 16 / static_cast<int>(sizeof(T));
  const AttentionProblem& a = p.problem;
  const int head = static_cast<int>(blockIdx.x % static_cast<unsigned>(a.heads_q));
  const int64_t number = blockIdx.x / static_cast<unsigned>(a.heads_q);
  const RowTile at = row_tile<false, kBlockQueries>(a, number);
  const SequenceOfTile s = sequence_of_tile<false>(a, at.sequence);
  const int t = static_cast<int>(threadIdx.x) % kLanes;
  const T* dout = static_cast<const T*>(p.dout) + s.batch * p.dout_strides.batch + head * p.dout_strides.head;
  const T* out = static_cast<const T*>(p.out) + s.batch * p.out_strides.batch + head * p.out_strides.head;
  const int64_t of_head =
      (s.batch * a.heads_q + head) * (a.cu_seqlens_q != nullptr ? a.total_q : a.seqlen_q) + s.first_query;
  for (int i = static_cast<int>(threadIdx.x) / kLanes; i < kBlockQueries; i += kAtOnce) {
    const int query = at.first + i;
    const bool exists = query < s.queries;
    float delta = 0.0f;
    if (exists)
      for (int c = t * kElements; c < static_cast<int>(a.head_dim_v); c += kLanes * kElements) {
        const auto x = device::load_vector<kElements>(dout + (s.first_query + query) * p.dout_strides.seq + c);
        const auto y = device::load_vector<kElements>(out + (s.first_query + query) * p.out_strides.seq + c);
#pragma unroll
        for (int e = 0; e < kElements; ++e) delta += device::to_float(x.at[e]) * device::to_float(y.at[e]);
      }
    delta = device::group_sum<kLanes>(delta);
    if (t == 0) {
      float lse = exists ? device::load(static_cast<const float*>(p.lse) + of_head + query) * kLog2e : INFINITY;
      if (lse == -INFINITY) lse = INFINITY;
      if (exists && p.dlse != nullptr) delta -= device::load(static_cast<const float*>(p.dlse) + of_head + query);
      float* to = static_cast<float*>(p.workspace) + (number * a.heads_q + head) * kStatistics + i;
      device::store(to, lse);
      device::store(to + kBlockQueries, lse == INFINITY ? 0.0f : delta);
    }
  }
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

// A warp's 16 rows of the matrix of queries and keys of one head: what is the same for all columns.
template <bool kKeysAreRows> struct WarpRows {
  int first;          // of the warp
  Columns seen[2];    // of the thread's rows
  float lse[2] = {};  // queries are rows: of these
  float delta[2] = {};
};

// Probabilities and their gradients for 16 rows and kColumns columns, from the rows of both pairs of tensors in shared
// memory: p holds probabilities as they meet dout, ds the gradients of logits or, `of_products`, those of products over
// softmax_scale. `statistics`: keys are rows: lse of the columns, then delta.
template <class T, int kDepth, int kColumns, int kRows, bool kKeysAreRows>
__device__ __forceinline__ void make_gradients(Accumulators<kColumns>& p, Accumulators<kColumns>& ds, bool of_products,
                                               const AttentionProblem& a, const SequenceOfTile& s,
                                               const WarpRows<kKeysAreRows>& warp, int head, int first_column,
                                               const T* rows, int row, const T* columns, const float* statistics,
                                               int lane) {
  constexpr int kStride = kSharedStride<T, kDepth>;
  const int column = lane % 4 * 2;  // of the thread's first element
  multiply_rows<T, kDepth, kColumns>(ds, rows + (kRows + row) * kStride, columns + kColumns * kStride, lane);
  const bool dropout = a.dropout.seed != nullptr;
  const float keep_scale = static_cast<float>(a.dropout.scale);
  static_assert(kColumns <= 64);
  uint32_t kept = 0xffffffffu;  // a bit an element
  if (dropout) {
    kept = 0;
    DropoutOfHead(a, s, head)
        .template apply<kColumns, kKeysAreRows>(warp.first, first_column, lane, [&](int n, int e, bool keep) {
          kept |= static_cast<uint32_t>(keep) << (4 * n + e);
          ds[n][e] = keep ? ds[n][e] * keep_scale : 0.0f;
        });
  }
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      ds[n][e] -= kKeysAreRows ? statistics[kColumns + n * 8 + column + e % 2] : warp.delta[e / 2];
  const Logits logits(a, s, head);
  multiply_rows<T, kDepth, kColumns>(p, rows + row * kStride, columns, lane);
  logits.scale_products<kColumns>(p, [&](int n, int e, float derivative) {
    if (of_products) ds[n][e] *= derivative;
  });
  logits.finish<T, kColumns>(p, Place<kKeysAreRows>{warp.first + lane / 4, first_column + column}, warp.seen);
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float lse = kKeysAreRows ? statistics[n * 8 + column + e % 2] : warp.lse[e / 2];
      p[n][e] = device::exp2(p[n][e] - lse);
      // Where nothing is seen, values and gradients that are not finite must not count.
      ds[n][e] = p[n][e] == 0.0f ? 0.0f : p[n][e] * ds[n][e];
      if (dropout) p[n][e] = (kept >> (4 * n + e) & 1) != 0 ? p[n][e] * keep_scale : 0.0f;
    }
}

template <int kColumns> __device__ __forceinline__ void fill(Accumulators<kColumns>& x, float value) {
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) x[n][e] = value;
}

template <int kTile, bool kKeysAreRows> constexpr int kBackwardThreads =
    kKeysAreRows ? kPortableBackward[kTile].threads_of_keys() : kPortableBackward[kTile].threads();

// The correction of delta counts from this part of a row's sum of |ds| on: an eighth of the most by which the rounding
// of every ds to T, before its product with k, moves that sum.
template <class T> constexpr float kDeltaCounts =
    sizeof(T) == 4 ? 0x1p-27f : (std::is_same_v<T, float16> ? 0x1p-14f : 0x1p-11f);

// A thread's part of the sums of ds and |ds| of its two rows.
struct SumsOfRows {
  float sum[2] = {0.0f, 0.0f}, size[2] = {0.0f, 0.0f};

  template <int kColumns> __device__ __forceinline__ void add(const Accumulators<kColumns>& ds) {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sum[e / 2] += ds[n][e];
        size[e / 2] += fabsf(ds[n][e]);
      }
  }
};

// Corrects delta of a warp's rows in the workspace. Returns whether that counts for any row of the thread. Softmax and
// sink have 1 in sum, so that the sum over keys of p * delta lacks the sink's part.
template <class T> __device__ __forceinline__ bool correct_delta(const AttentionBwdParams& p, const SequenceOfTile& s,
                                                                 int head, SumsOfRows& sums, WarpRows<false>& own,
                                                                 int lane) {
  const AttentionProblem& a = p.problem;
  const float sink = sink_of<T>(a, head);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sums.sum[r] = device::group_sum<4>(sums.sum[r]);
    sums.size[r] = device::group_sum<4>(sums.size[r]);
  }
  __syncwarp(0xffffffffu);  // all lanes of a row have read the delta that one of them writes
  bool counts = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = own.first + lane / 4 + 8 * r;
    if (row >= s.queries || own.lse[r] == INFINITY) continue;
    float correction = sums.sum[r] - device::exp2(sink - own.lse[r]) * own.delta[r];
    if (p.dlse != nullptr) {
      const int64_t length = a.cu_seqlens_q != nullptr ? a.total_q : a.seqlen_q;
      correction -=
          device::load(static_cast<const float*>(p.dlse) + (s.batch * a.heads_q + head) * length + s.first_query + row);
    }
    if (lane % 4 == 0)
      device::store(static_cast<float*>(p.workspace) + statistics_of(a, s, row, head) + kBlockQueries,
                    own.delta[r] + correction);
    counts = counts || !(fabsf(correction) <= kDeltaCounts<T> * sums.size[r]);
  }
  return counts;
}

struct BackwardPortableParams {
  AttentionBwdParams gradients;
  int* again;   // [blocks of dq], in the workspace: whether a block must run again
  bool second;  // it does
};

// dk and dv (kKeysAreRows), or dq. A block owns a tile of keys of one head of k, whose rows of k and v stay in shared
// memory, and goes over the queries that see them, head after head of those that share it; or a tile of queries, and
// goes over keys. Reads its own rows once, the others once for each tile that they meet; writes its gradients once. The
// first dq corrects delta; with a softcap, whose derivative has no place in the sums for that, it does nothing else.
template <class T, int kTile, bool kKeysAreRows>
__global__ void __launch_bounds__(kBackwardThreads<kTile, kKeysAreRows>, 1)
    backward_portable(const __grid_constant__ BackwardPortableParams params) {
  const AttentionBwdParams& p = params.gradients;
  constexpr PortableTile tile = kPortableBackward[kTile];
  constexpr int kDepth = tile.head_dim, kColumns = tile.columns, kStride = kSharedStride<T, kDepth>;
  constexpr int kThreads = kBackwardThreads<kTile, kKeysAreRows>, kRowWarps = tile.rows / 16;
  constexpr int kWidth = kKeysAreRows ? kDepth / tile.column_parts : kDepth;  // columns of gradients a warp adds to
  WARPSMITH_DYNAMIC_SHARED(memory);
  T* const rows = reinterpret_cast<T*>(memory);
  const auto stage = [&](int step) {
    return memory + 2 * tile.rows * tile.row_bytes() + step % tile.stages * tile.stage_bytes();
  };
  const AttentionProblem& a = p.problem;
  const int ratio = static_cast<int>(a.heads_q / a.heads_k);
  const int heads = static_cast<int>(kKeysAreRows ? a.heads_k : a.heads_q);
  const unsigned block = block_number<kKeysAreRows>(a);
  const int head = static_cast<int>(block % static_cast<unsigned>(heads));
  const RowTile at = row_tile<kKeysAreRows, tile.rows>(a, block / static_cast<unsigned>(heads));
  const SequenceOfTile s = sequence_of_tile<kKeysAreRows>(a, at.sequence);
  const int length = kKeysAreRows ? s.keys : s.queries, count = min(tile.rows, length - at.first);
  if (count <= 0) return;
  if (!kKeysAreRows && params.second && device::load(params.again + block) == 0) return;
  const bool for_delta_alone = !kKeysAreRows && !params.second && a.softcap > 0;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;

  WarpRows<kKeysAreRows> own;
  const int local = warp % kRowWarps * 16, first_width = warp / kRowWarps * kWidth;
  own.first = at.first + local;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = own.first + lane / 4 + 8 * r;
    own.seen[r] = columns_of_rows<kKeysAreRows>(a, s, row, row);
    if (!kKeysAreRows && row < s.queries) {
      const float* from = static_cast<const float*>(p.workspace) + statistics_of(a, s, row, head);
      own.lse[r] = device::load(from);
      own.delta[r] = device::load(from + kBlockQueries);
    }
  }
  const Steps<kColumns> columns(columns_of_rows<kKeysAreRows>(a, s, at.first, at.first + count - 1));
  const int steps = columns.count * (kKeysAreRows ? ratio : 1);
  const auto head_of = [&](int step) { return kKeysAreRows ? head * ratio + step / columns.count : head; };
  const auto first_of = [&](int step) { return columns.begin + step % columns.count * kColumns; };
  const auto copy_columns = [&](int step) {
    T* to = reinterpret_cast<T*>(stage(step));
    const int first = first_of(step);
    if constexpr (kKeysAreRows) {
      const int of = head_of(step);
      copy_pair<T, kDepth, kColumns, kThreads>(to, q_rows<T>(p, s, of), dout_rows<T>(p, s, of), first, s.queries, a);
      if (thread < 2 * kColumns) {
        const float* from = static_cast<const float*>(p.workspace) + statistics_of(a, s, first, of);
        device::copy_async<4>(to + 2 * kColumns * kStride + thread * (4 / static_cast<int>(sizeof(T))),
                              from + thread / kColumns * kBlockQueries + thread % kColumns);
      }
    } else {
      copy_pair<T, kDepth, kColumns, kThreads>(to, k_rows<T>(p, s, head / ratio), v_rows<T>(p, s, head / ratio), first,
                                               s.keys, a);
    }
    device::copy_async_commit();
  };

  Accumulators<kWidth> of_products, of_values;  // the gradient of k or q, and that of v
  fill<kWidth>(of_products, 0.0f);
  fill<kWidth>(of_values, 0.0f);
  SumsOfRows sums;
  if (steps > 0) {
    if constexpr (kKeysAreRows)
      copy_pair<T, kDepth, tile.rows, kThreads>(rows, k_rows<T>(p, s, head), v_rows<T>(p, s, head), at.first, s.keys,
                                                a);
    else
      copy_pair<T, kDepth, tile.rows, kThreads>(rows, q_rows<T>(p, s, head), dout_rows<T>(p, s, head), at.first,
                                                s.queries, a);
    copy_columns(0);
    for (int step = 0; step < steps; ++step) {
      if (tile.stages > 1 && step + 1 < steps) {
        copy_columns(step + 1);
        device::copy_async_wait<1>();
      } else {
        device::copy_async_wait<0>();
      }
      __syncthreads();
      const T* others = reinterpret_cast<const T*>(stage(step));
      Accumulators<kColumns> probabilities, ds;
      make_gradients<T, kDepth, kColumns, tile.rows, kKeysAreRows>(
          probabilities, ds, !for_delta_alone, a, s, own, head_of(step), first_of(step), rows, local, others,
          reinterpret_cast<const float*>(others + 2 * kColumns * kStride), lane);
      if constexpr (kKeysAreRows)
        add_product<T, kDepth, kColumns, kWidth>(of_values, probabilities, others + kColumns * kStride + first_width,
                                                 lane);
      else
        sums.template add<kColumns>(ds);
      add_product<T, kDepth, kColumns, kWidth>(of_products, ds, others + first_width, lane);
      __syncthreads();  // every warp has read the stage
      if (tile.stages == 1 && step + 1 < steps) copy_columns(step + 1);
    }
  }
  if constexpr (!kKeysAreRows) {
    if (!params.second) {
      const int again = __syncthreads_or(correct_delta<T>(p, s, head, sums, own, lane) || for_delta_alone);
      if (thread == 0) device::store(params.again + block, again != 0 ? 1 : 0);
      if (again != 0) return;
    }
  }

  const auto write = [&](void* base, const AttentionStrides& strides, Accumulators<kWidth>& x, int64_t head_dim,
                         float factor) {
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) x[n][e] *= factor;
    T* to = static_cast<T*>(base) + s.batch * strides.batch + head * strides.head +
            ((kKeysAreRows ? s.first_key : s.first_query) + own.first) * strides.seq;
    store_rows<T, kWidth>(to + first_width, strides.seq, x, length - own.first,
                          static_cast<int>(head_dim) - first_width, lane);
  };
  const float scale = static_cast<float>(a.softmax_scale);
  if constexpr (kKeysAreRows) {
    write(p.dk, p.dk_strides, of_products, a.head_dim, scale);
    write(p.dv, p.dv_strides, of_values, a.head_dim_v, 1.0f);
  } else {
    write(p.dq, p.dq_strides, of_products, a.head_dim, scale);
  }
}

}  // namespace warpsmith::attention
