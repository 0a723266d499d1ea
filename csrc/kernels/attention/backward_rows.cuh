#pragma once
#include <cmath>

#include "device/convert.h"
#include "device/fence.h"
#include "device/packed.h"
#include "device/programmatic_launch.h"
#include "device/reduce.h"
#include "kernels/attention/attention_dropout.h"
#include "kernels/attention/backward_order.cuh"
#include "kernels/attention/online_softmax.cuh"
#include "kernels/attention/store_accumulators.cuh"

// The kernels around the Hopper backward, which work on blocks of 64 or 128 query rows of one head: the statistics
// before it, and dq, dk, dv and dsink after it.
namespace warpsmith::attention {

struct RowParams {
  Window window;
  const int32_t *cu_seqlens_q, *cu_seqlens_k;  // null: not packed
  int64_t batch, queries, keys, total_q, total_k;
  int heads, head_dim, head_dim_v;
  const void *dout, *out;
  const float *lse, *lse_rest, *dlse;  // lse_rest, dlse: null: zero
  void* dq;
  AttentionStrides dout_strides, out_strides, dq_strides;
  float* statistics;  // as in BackwardParams
  const float* dq_sums;
  int* tiles_added;  // null: none
  int* counter;      // two: of the tiles of keys, and of dbias. Null: none
  int* some_far;     // kSomeFar if a block of queries is far. Null: none
  float scale;
  float dropout_log2_scale, dropout_inverse_scale;  // read only with dropout
  AttentionDropoutCounters dropout;
};

// A block of queries: its sequence, the place of its rows, and whether some tile of keys visits it.
struct RowBlock {
  int64_t batch;          // packed: 0
  int64_t token;          // the first row
  int64_t statistic;      // offset of the first row in lse, without that of the head
  int64_t head_rows;      // rows from one head to the next in lse
  int64_t dropout_block;  // number of the first 16 queries, as counted by attention_row_block()
  int rows;               // 0: no block has this number
  bool visited;
};

template <int kBlock> __device__ __forceinline__ RowBlock row_block(const RowParams& p, int64_t number) {
  RowBlock r{};
  int64_t sequence, queries = p.queries, keys = p.keys, start = 0, block;
  if (p.cu_seqlens_q != nullptr) {
    const int batch = static_cast<int>(p.batch), total_q = static_cast<int>(p.total_q);
    const int most_q = static_cast<int>(p.queries), most_k = static_cast<int>(p.keys);
    const auto first = [&](int i) {
      return first_block(p.cu_seqlens_q, i, sequence_at(p.cu_seqlens_q, i, batch, total_q, most_q).start, 0, kBlock);
    };
    int low = 0, high = batch + 1;  // first(low) <= number < first(high)
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (first(middle) <= number ? low : high) = middle;
    }
    sequence = low;
    const Sequence q = sequence_at(p.cu_seqlens_q, low, batch, total_q, most_q);
    start = q.start;
    queries = q.length;
    keys = low < batch ? sequence_at(p.cu_seqlens_k, low, batch, static_cast<int>(p.total_k), most_k).length : 0;
    block = number - first(low);
    r.statistic = start;
    r.head_rows = p.total_q;
  } else {
    const int64_t blocks = (queries + kBlock - 1) / kBlock;
    sequence = number / blocks;
    block = number - sequence * blocks;
    r.batch = sequence;
    r.statistic = sequence * p.heads * queries;
    r.head_rows = queries;
  }
  r.token = start + block * kBlock;
  r.dropout_block = attention_row_block(p.dropout, p.cu_seqlens_q, sequence) + block * (kBlock / 16);
  r.statistic += block * kBlock;
  const int64_t left = queries - block * kBlock;
  r.rows = static_cast<int>(left < 0 ? 0 : left < kBlock ? left : kBlock);
  if (r.rows > 0) {
    const VisitingTiles tiles =
        visiting_tiles(p.window, static_cast<int>(block), static_cast<int>(queries), static_cast<int>(keys), kBlock);
    r.visited = tiles.end > tiles.first;
  }
  return r;
}

constexpr int kRowLanes = 16;      // threads per row; each has 8 columns
constexpr int kWideRowLanes = 32;  // the same for head dimensions above 128
constexpr int row_threads(int block_queries, int lanes = kRowLanes) { return block_queries * lanes / 4; }

// Writes delta = rowsum(dout * out) - dlse, and lse in units of log2. A row without keys and a row that does not exist
// get lse = +inf, so that their probabilities are 0. Blocks that are far: statistics_stride(). Also resets tiles_added
// and the counters, and writes dq = 0 for blocks that no tile visits. tiles_added, counter and some_far may be null.
template <class T, int kBlock, bool kDropout, int kLanes = kRowLanes>
__global__ void __launch_bounds__(row_threads(kBlock, kLanes)) backward_statistics(const RowParams p) {
  device::launch_dependents();
  const int64_t number = blockIdx.x / static_cast<unsigned>(p.heads);
  const int head = static_cast<int>(blockIdx.x % static_cast<unsigned>(p.heads));
  const int thread = static_cast<int>(threadIdx.x), t = thread % kLanes, first = thread / kLanes;
  if (p.counter != nullptr && blockIdx.x == 0 && thread < 2) device::store(p.counter + thread, 0);
  const int64_t at = number * p.heads + head;
  if (p.tiles_added != nullptr && thread < 2) device::store(p.tiles_added + at * 2 + thread, 0);
  const RowBlock r = row_block<kBlock>(p, number);
  if constexpr (kDropout)
    if (thread < kBlock / 16)
      device::store(p.statistics + at * statistics_stride(kBlock, true) + 2 * kBlock + thread,
                    __uint_as_float(attention_dropout_row(p.dropout, r.dropout_block, thread, head)));
  using Eight = device::Packed<T, 8>;
  constexpr int kRows = row_threads(kBlock, kLanes) / kLanes, kTurns = kBlock / kRows;
  const T* dout = static_cast<const T*>(p.dout) + r.batch * p.dout_strides.batch + head * p.dout_strides.head;
  const T* out = static_cast<const T*>(p.out) + r.batch * p.out_strides.batch + head * p.out_strides.head;
  Eight x[kTurns], y[kTurns];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int row = i * kRows + first;
    x[i] = y[i] = Eight{};
    if (row < r.rows && t * 8 < p.head_dim_v) {
      x[i] = device::load(device::packed_at<T, 8>(dout, (r.token + row) * p.dout_strides.seq + t * 8));
      y[i] = device::load(device::packed_at<T, 8>(out, (r.token + row) * p.out_strides.seq + t * 8));
    }
  }
  // Read while the rows arrive, and again below: there are no registers to keep them.
  const auto lse_of = [&](int row) {
    return row < r.rows ? device::load(p.lse + r.statistic + head * r.head_rows + row) : -INFINITY;
  };
  const bool far = __syncthreads_or(thread < kBlock && is_far_lse<T>(lse_of(thread))) != 0;
  if (far && p.some_far != nullptr && thread == 0) device::store_release(p.some_far, kSomeFar);
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int row = i * kRows + first;
    float a[8], b[8], delta = 0.0f;
    device::unpack<T, 8>(a, x[i]);
    device::unpack<T, 8>(b, y[i]);
#pragma unroll
    for (int e = 0; e < 8; ++e) delta += a[e] * b[e];
    delta = device::group_sum<kLanes>(delta);
    if (t == 0) {
      const int64_t statistic = r.statistic + head * r.head_rows + row;
      constexpr int kStride = statistics_stride(kBlock, kDropout);
      const float lse = lse_of(row);
      float* to = p.statistics + at * kStride + statistics_place(row);
      const float of_dropout = kDropout ? p.dropout_log2_scale : 0.0f;
      if (far) {
        const bool has_rest = row < r.rows && p.lse_rest != nullptr;
        device::store(to, __uint_as_float(kFarMark));
        device::store(to + kStride / 2, far_lse(lse));
        device::store(to + kStride / 2 + kBlock,
                      (has_rest ? device::load(p.lse_rest + statistic) : 0.0f) - of_dropout * kLn2);
      } else {
        // The sum with 0 is never kFarMark.
        device::store(to, lse == -INFINITY ? INFINITY : (lse * kLog2e - of_dropout) + 0.0f);
      }
      if (row < r.rows && p.dlse != nullptr) delta -= device::load(p.dlse + statistic);
      if (lse == -INFINITY) delta = 0.0f;  // whatever dlse holds: its product with a probability of 0 must be 0
      device::store(to + kBlock, kDropout ? delta * p.dropout_inverse_scale : delta);
    }
    if (!r.visited && row < r.rows && t * 8 < p.head_dim) {
      T* dq = static_cast<T*>(p.dq) + r.batch * p.dq_strides.batch + head * p.dq_strides.head;
      device::store(device::packed_at<T, 8>(dq, (r.token + row) * p.dq_strides.seq + t * 8), Eight{});
    }
  }
}

constexpr int kDqThreads = 128;

// dq = scale * dq_sums. The sums are stored in the order of the accumulators of two warpgroups: one half (columns or
// rows) after the other. Also clears some_far.
template <class T, int kHeadDim, int kBlock> __global__ void __launch_bounds__(kDqThreads)
    backward_dq(const RowParams p) {
  device::wait_for_previous_kernel();
  const int64_t number = blockIdx.x / static_cast<unsigned>(p.heads);
  const int head = static_cast<int>(blockIdx.x % static_cast<unsigned>(p.heads));
  if (blockIdx.x == 0 && threadIdx.x == 0) device::store(p.some_far, 0);
  const RowBlock r = row_block<kBlock>(p, number);
  if (!r.visited) return;
  using Four = device::Vector<float, 4>;
  const int thread = static_cast<int>(threadIdx.x);
  const Four* from = reinterpret_cast<const Four*>(p.dq_sums + (number * p.heads + head) * kBlock * kHeadDim) + thread;
  T* dq = static_cast<T*>(p.dq) + r.batch * p.dq_strides.batch + head * p.dq_strides.head + r.token * p.dq_strides.seq;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int column = kBlock == 64 ? half * 64 : 0, row = kBlock == 64 ? 0 : half * 64;
    float x[32];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const Four four = device::load(from + (half * 8 + i) * kDqThreads);
#pragma unroll
      for (int e = 0; e < 4; ++e) x[4 * i + e] = four.at[e];
    }
    store_accumulators(dq + row * p.dq_strides.seq + column, p.dq_strides.seq, x, p.scale,
                       thread / 32 * 16 + thread % 32 / 4, r.rows - row, p.head_dim - column, thread % 32);
  }
}

struct KeyParams {
  Schedule schedule;  // of tiles of keys; `heads` counts key heads
  Window window;
  const int32_t *cu_seqlens_q, *cu_seqlens_k;  // null: not packed
  int queries, keys, total_q, total_k;
  int head_dim, head_dim_v;
  void *dk, *dv;
  AttentionStrides dk_strides, dv_strides;
  const float* key_sums;  // as in BackwardParams
  int parts;              // per key head
  float scale;
};

// A tile of keys of one key head: the place of its rows, and whether some query sees it.
struct KeyRows {
  int batch;  // packed: 0; -1: no tile has this number
  int head, rows;
  int64_t token;   // the first row
  int64_t number;  // of the tile, as counted by first_tile()
  bool visited;
};

__device__ __forceinline__ KeyRows key_rows(const KeyParams& p, int n) {
  const TileIndex at = tile_at(p.schedule, n);
  if (at.batch < 0) return {-1, 0, 0, 0, 0, false};
  int queries = p.queries, keys = p.keys, token = 0, batch = at.batch;
  if (p.cu_seqlens_q != nullptr) {
    const Sequence k = sequence_at(p.cu_seqlens_k, at.batch, p.schedule.batch, p.total_k, p.keys);
    keys = k.length;
    token = k.start;
    queries = 0;
    if (at.batch < p.schedule.batch)
      queries = sequence_at(p.cu_seqlens_q, at.batch, p.schedule.batch, p.total_q, p.queries).length;
    batch = 0;
  }
  const VisitedBlocks visited = visited_blocks(p.window, at.row_tile, queries, keys, kTileKeys);
  const int first = at.row_tile * kTileKeys;
  return {batch,
          at.head,
          min(kTileKeys, keys - first),
          int64_t{token} + first,
          first_tile(p.cu_seqlens_k, at.batch, token, keys) + at.row_tile,
          visited.end > visited.first};
}

// dk = dv = 0 for tiles of keys that no query sees, since backward_sm90 does not visit them. One block per tile.
template <class T> __global__ void __launch_bounds__(kDqThreads) backward_unseen_keys(const KeyParams p) {
  const KeyRows at = key_rows(p, static_cast<int>(blockIdx.x));
  if (at.batch < 0 || at.visited) return;
  using Eight = device::Packed<T, 8>;
  const auto clear = [&](void* to, const AttentionStrides& s, int columns) {
    T* base = static_cast<T*>(to) + at.batch * s.batch + at.head * s.head + at.token * s.seq;
    const int chunks = columns / 8;
    for (int i = static_cast<int>(threadIdx.x); i < at.rows * chunks; i += kDqThreads)
      device::store(device::packed_at<T, 8>(base, i / chunks * s.seq + i % chunks * 8), Eight{});
  };
  clear(p.dk, p.dk_strides, p.head_dim);
  clear(p.dv, p.dv_strides, p.head_dim_v);
}

constexpr int kDkvThreads = 256;

// dv and dk where a key head has several parts: sums the parts in their order, and multiplies dk by scale. Two blocks
// per tile, one for dv and one for dk. The threads correspond to those of the two consumer warpgroups.
template <class T, int kHeadDim> __global__ void __launch_bounds__(kDkvThreads) backward_dkv(const KeyParams p) {
  device::wait_for_previous_kernel();
  const KeyRows at = key_rows(p, static_cast<int>(blockIdx.x / 2));
  if (at.batch < 0 || !at.visited) return;
  using Four = device::Vector<float, 4>;
  const int tensor = static_cast<int>(blockIdx.x % 2), thread = static_cast<int>(threadIdx.x % 128),
            group = static_cast<int>(threadIdx.x / 128);
  float x[kHeadDim / 2] = {};
  for (int part = 0; part < p.parts; ++part) {
    const int64_t sums = ((at.number * p.schedule.heads + at.head) * p.parts + part) * 2 + tensor;
    const Four* from =
        reinterpret_cast<const Four*>(p.key_sums + sums * kTileKeys * kHeadDim) + group * 16 * kHeadDim + thread;
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j) {
      const Four four = device::load(from + j * 128);
#pragma unroll
      for (int e = 0; e < 4; ++e) x[4 * j + e] += four.at[e];
    }
  }
  const AttentionStrides& s = tensor == 0 ? p.dv_strides : p.dk_strides;
  T* to = static_cast<T*>(tensor == 0 ? p.dv : p.dk) + at.batch * s.batch + at.head * s.head +
          (at.token + group * 64) * s.seq;
  store_accumulators(to, s.seq, x, tensor == 0 ? 1.0f : p.scale, thread / 32 * 16 + thread % 32 / 4,
                     at.rows - group * 64, tensor == 0 ? p.head_dim_v : p.head_dim, thread % 32);
}

struct SinkParams {
  const float* statistics;  // as in BackwardParams
  const void* sink;         // [heads]
  void* dsink;              // [heads]
  int64_t blocks;
  int heads, block_queries;
  bool dropout = false;
};

constexpr int kSinkThreads = 256;

// exp(sink - lse) of a row of the statistics, whose lse is at `row`. In a far block, lse is `to_far` further and
// lse_rest `to_rest` behind that.
__device__ __forceinline__ float probability_of_sink(float sink, const float* row, int to_far, int to_rest) {
  const float lse = device::load(row);
  if (!has_far_mark(lse)) return device::exp2(sink * kLog2e - lse);
  return device::exp2(((sink - device::load(row + to_far)) - device::load(row + to_far + to_rest)) * kLog2e);
}

// dsink = -sum over rows of exp(sink - lse) * delta, in a fixed order. One block per head. S: the dtype of sink.
template <class S> __global__ void __launch_bounds__(kSinkThreads) backward_sink(const SinkParams p) {
  WARPSMITH_SHARED(float, scratch, kSinkThreads / 32);
  const int head = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const float sink = device::to_float(device::load(static_cast<const S*>(p.sink) + head));
  float sums[1] = {0.0f};
  const int at_once = kSinkThreads / p.block_queries;
  for (int64_t i = thread / p.block_queries; i < p.blocks; i += at_once) {
    const int stride = statistics_stride(p.block_queries, p.dropout);
    const float* row = p.statistics + (i * p.heads + head) * stride + thread % p.block_queries;
    sums[0] -= probability_of_sink(sink, row, stride / 2, p.block_queries) * device::load(row + p.block_queries);
  }
  device::block_reduce<kSinkThreads>(sums, scratch, device::Sum());
  if (thread == 0) device::store(static_cast<S*>(p.dsink) + head, device::from_float<S>(sums[0]));
}

}  // namespace warpsmith::attention
