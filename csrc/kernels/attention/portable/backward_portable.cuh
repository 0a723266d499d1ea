#pragma once
#include "kernels/attention/backward_rows.cuh"
#include "kernels/attention/portable/portable_config.h"
#include "kernels/attention/portable/portable_gradients.cuh"

// The backward of attention for sm_80 and newer, with every option and without atomics. dq, then dk and dv, then dbias
// have a kernel each. A block owns a part of the result and adds to it step by step, in a fixed order. The price: each
// kernel recomputes the probabilities. dk and dv take 4 products, dq takes 3 or 6, dbias 2; a single kernel would take
// 5 in all.
//
// delta = dot(dout, out) carries the rounding of out. In a saturated softmax the differences dP - delta, from which the
// gradients are made, cancel, and only that rounding is left. So the dq kernel, which runs first, sums p * (dP - delta)
// over the keys of each row. The sum is the error of delta; the kernel corrects delta for itself and for all later
// kernels. It is launched twice. In the second launch, blocks whose correction does not count return at once.
namespace warpsmith::attention {

constexpr int kStatisticsThreads = 256;

// delta = dot(dout, out) - dlse. Reads dout and out once. A block takes 64 queries of one head, with 16 lanes per
// query.
//
// In float, one thread adds a whole row, in the order of multiply_rows. If a query sees one key, delta and dot(dout, v)
// then agree to the last bit, and their difference is 0 as it must be.
//
// With `tiles_added`, it also resets that of its queries and the counter, and writes dq = 0 where no query of the block
// sees a key, since backward_portable_ordered_dq does not visit such blocks.
struct PortableStatisticsParams {
  AttentionBwdParams gradients;
  int *tiles_added, *counter;  // of backward_portable_ordered_dq; null: another kernel makes dq
};

template <class T> __global__ void __launch_bounds__(kStatisticsThreads)
    portable_statistics(const __grid_constant__ PortableStatisticsParams params) {
  const AttentionBwdParams& p = params.gradients;
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
  if (params.tiles_added != nullptr) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) device::store(params.tiles_added + blockIdx.x, 0);
    if (blockIdx.x == 0 && thread == 0) device::store(params.counter, 0);
    const int last = min(at.first + kBlockQueries, s.queries) - 1;
    const Columns seen = columns_of_rows<false>(a, s, at.first, last);
    if (seen.begin >= seen.end) {
      T* dq = static_cast<T*>(p.dq) + s.batch * p.dq_strides.batch + head * p.dq_strides.head;
      const int chunks = static_cast<int>(a.head_dim) / kElements;
      for (int i = thread; i < (last + 1 - at.first) * chunks; i += kStatisticsThreads)
        device::store_vector(dq + (s.first_query + at.first + i / chunks) * p.dq_strides.seq + i % chunks * kElements,
                             device::Vector<T, kElements>{});
    }
  }
  const int64_t of_head =
      (s.batch * a.heads_q + head) * (a.cu_seqlens_q != nullptr ? a.total_q : a.seqlen_q) + s.first_query;
  const auto lse_of = [&](int query) {
    return query < s.queries ? device::load(static_cast<const float*>(p.lse) + of_head + query) : -INFINITY;
  };
  const int own = static_cast<int>(threadIdx.x);
  const bool far = __syncthreads_or(own < kBlockQueries && is_far_lse<T>(lse_of(at.first + own))) != 0;
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
      const float lse = lse_of(query);
      if (exists && p.dlse != nullptr) delta -= device::load(static_cast<const float*>(p.dlse) + of_head + query);
      float* to = static_cast<float*>(p.workspace) + (number * a.heads_q + head) * kStatistics + i;
      if (far) {
        const bool has_rest = exists && p.lse_rest != nullptr;
        device::store(to, __uint_as_float(kFarMark));
        device::store(to + kStatistics / 2, far_lse(lse));
        device::store(to + kStatistics / 2 + kBlockQueries,
                      has_rest ? device::load(static_cast<const float*>(p.lse_rest) + of_head + query) : 0.0f);
      } else {
        device::store(to, lse == -INFINITY ? INFINITY : lse * kLog2e + 0.0f);  // the sum is never kFarMark
      }
      device::store(to + kBlockQueries, lse == -INFINITY ? 0.0f : delta);
    }
  }
}

// This kernel computes dk and dv in float only; for 16-bit elements backward_portable_keys does.
template <int kTile, bool kKeysAreRows> constexpr PortableTile kBackwardTile =
    kKeysAreRows ? kPortableFloatKeys[kTile - kPortable16Bit] : kPortableQueries[kTile];

// The correction of delta counts if it exceeds this fraction of the row's sum of |ds|: an eighth of the most by which
// that sum can move when every ds is rounded to T before its product with k.
template <class T> constexpr float kDeltaCounts =
    sizeof(T) == 4 ? 0x1p-27f : (std::is_same_v<T, float16> ? 0x1p-14f : 0x1p-11f);

// A thread's partial sums of ds and |ds| for its two rows.
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

// Corrects delta of a warp's rows in the workspace. Returns whether the correction counts for some row of the thread.
// The probabilities of keys and sink sum to 1, so the sum of p * delta over the keys lacks the sink's share; it is
// subtracted.
template <class T> __device__ __forceinline__ bool correct_delta(const AttentionBwdParams& p, const SequenceOfTile& s,
                                                                 int head, SumsOfRows& sums, int first_row,
                                                                 const float* of_rows, int lane) {
  const AttentionProblem& a = p.problem;
  const float sink = sink_of<T>(a, head);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sums.sum[r] = device::group_sum<4>(sums.sum[r]);
    sums.size[r] = device::group_sum<4>(sums.size[r]);
  }
  float of_sink[2], delta[2];
  bool keyless[2];
  if (of_rows == nullptr) return false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    of_sink[r] = probability_of_sink(sink, of_rows + 8 * r, kStatistics / 2, kBlockQueries);
    const float lse = device::load(of_rows + 8 * r);
    keyless[r] = (has_far_mark(lse) ? device::load(of_rows + 8 * r + kStatistics / 2) : lse) == INFINITY;
    delta[r] = device::load(of_rows + 8 * r + kBlockQueries);
  }
  __syncwarp(0xffffffffu);  // all lanes of a row have read the delta that one of them writes
  bool counts = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + lane / 4 + 8 * r;
    if (row >= s.queries || keyless[r]) continue;
    float correction = sums.sum[r] - of_sink[r] * delta[r];
    if (p.dlse != nullptr) {
      const int64_t length = a.cu_seqlens_q != nullptr ? a.total_q : a.seqlen_q;
      correction -=
          device::load(static_cast<const float*>(p.dlse) + (s.batch * a.heads_q + head) * length + s.first_query + row);
    }
    if (lane % 4 == 0)
      device::store(static_cast<float*>(p.workspace) + statistics_of(a, s, row, head) + kBlockQueries,
                    delta[r] + correction);
    counts = counts || !(fabsf(correction) <= kDeltaCounts<T> * sums.size[r]);
  }
  return counts;
}

struct BackwardPortableParams {
  AttentionBwdParams gradients;
  int* again;   // [blocks of dq], in the workspace: whether a block must run a second time
  bool second;  // this is the second launch
};

// Writes the rows of a warp times `factor`.
template <class T, int kWidth, int kTiles>
__device__ __forceinline__ void write_gradient(T* to, int64_t stride, Accumulators<kWidth> (&x)[kTiles], float factor,
                                               int rows, int columns, int lane) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) x[i][n][e] *= factor;
    store_rows<T, kWidth>(to + 16 * i * stride, stride, x[i], rows - 16 * i, columns, lane);
  }
}

// dk and dv in float (kKeysAreRows), or dq. For dk and dv, a block owns a tile of keys of one key head, keeps its rows
// of k and v in shared memory, and loops over the queries that see them, one query head of the group after the other.
// For dq, a block owns a tile of queries of one head and loops over the keys.
//
// Reads its own rows once, and the other rows once for each tile that meets them. Writes its gradients once. The first
// launch for dq corrects delta. With a softcap, the first launch does nothing else: the sums for the correction must
// not contain the softcap's derivative, and dq needs it.
template <class T, int kTile, bool kKeysAreRows>
__global__ void __launch_bounds__(kBackwardTile<kTile, kKeysAreRows>.threads(), 1)
    backward_portable(const __grid_constant__ BackwardPortableParams params) {
  const AttentionBwdParams& p = params.gradients;
  constexpr PortableTile tile = kBackwardTile<kTile, kKeysAreRows>;
  constexpr int kDepth = tile.head_dim, kColumns = tile.columns, kStride = kSharedStride<T, kDepth>;
  constexpr int kThreads = tile.threads(), kTiles = tile.warp_tiles, kRowWarps = tile.rows / 16 / kTiles;
  constexpr int kWidth = kKeysAreRows ? kDepth / tile.column_parts : kDepth;  // columns of gradients per warp
  WARPSMITH_DYNAMIC_SHARED(memory);
  T* const rows = reinterpret_cast<T*>(memory);
  const auto stage = [&](int step) {
    return memory + 2 * tile.rows * tile.row_bytes() + step % tile.stages * tile.stage_bytes(kKeysAreRows);
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
  if (!kKeysAreRows && params.second && device::load(params.again + blockIdx.x) == 0) return;
  const bool for_delta_alone = tile.extended && !kKeysAreRows && !params.second && a.softcap > 0;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;

  const int local = warp % kRowWarps * 16 * kTiles, first_width = warp / kRowWarps * kWidth;
  const int first_row = at.first + local;  // of the warp
  const Columns of_all = columns_of_all<kKeysAreRows>(a, s, first_row, first_row + 16 * kTiles - 1);
  const float* of_rows = kKeysAreRows ? nullptr : statistics_of_rows(p, s, first_row + lane / 4, head);
  const Steps<kColumns> columns(columns_of_rows<kKeysAreRows>(a, s, at.first, at.first + count - 1));
  const int steps = columns.count * (kKeysAreRows ? ratio : 1);
  const auto head_of = [&](int step) { return kKeysAreRows ? head * ratio + step / columns.count : head; };
  const auto first_of = [&](int step) {
    return columns.begin + (kKeysAreRows ? step % columns.count : step) * kColumns;
  };
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

  Accumulators<kWidth> of_products[kTiles], of_values[kTiles];  // the gradient of k or q, and that of v
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    fill<kWidth>(of_products[i], 0.0f);
    fill<kWidth>(of_values[i], 0.0f);
  }
  SumsOfRows sums[kTiles];
  const T *own_x = rows + local * kStride, *own_y = own_x + tile.rows * kStride;
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
      const float* lse = kKeysAreRows ? reinterpret_cast<const float*>(others + 2 * kColumns * kStride) : of_rows;
      Accumulators<kColumns> probabilities[kTiles], ds[kTiles];
      make_gradients<T, kDepth, kColumns, kTiles, kKeysAreRows, tile.extended>(
          probabilities, ds, !for_delta_alone, a, s, first_row, of_all, head_of(step), first_of(step), own_x, own_y,
          others, others + kColumns * kStride, lse, kKeysAreRows ? kColumns : kBlockQueries, p.workspace, lane);
      if constexpr (kKeysAreRows) {
        add_product<T, kDepth, kColumns, kWidth, kTiles>(of_values, probabilities,
                                                         others + kColumns * kStride + first_width, lane);
      } else {
#pragma unroll
        for (int i = 0; i < kTiles; ++i) sums[i].template add<kColumns>(ds[i]);
      }
      add_product<T, kDepth, kColumns, kWidth, kTiles>(of_products, ds, others + first_width, lane);
      __syncthreads();  // every warp has read the stage
      if (tile.stages == 1 && step + 1 < steps) copy_columns(step + 1);
    }
  }
  if constexpr (!kKeysAreRows) {
    if (!params.second) {
      bool counts = for_delta_alone;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        counts = correct_delta<T>(p, s, head, sums[i], first_row + 16 * i,
                                  of_rows == nullptr ? nullptr : of_rows + 16 * i, lane) ||
                 counts;
      }
      const int again = __syncthreads_or(counts);
      if (thread == 0) device::store(params.again + blockIdx.x, again != 0 ? 1 : 0);
      if (again != 0) return;
    }
  }

  const auto write = [&](void* base, const AttentionStrides& strides, Accumulators<kWidth>(&x)[kTiles],
                         int64_t head_dim, float factor) {
    const HeadRows<T> to(base, strides, s.batch, head, kKeysAreRows ? s.first_key : s.first_query);
    write_gradient<T, kWidth, kTiles>(const_cast<T*>(to.first) + first_row * to.stride + first_width, to.stride, x,
                                      factor, length - first_row, static_cast<int>(head_dim) - first_width, lane);
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
