#pragma once
#include "kernels/attention/hopper/backward_wide_tile.cuh"

// dk and dv of a tile of 64 keys (backward_wide.cuh): the body of backward_sm90_wide_keys.
//
// Reads k and v of the tile once. A step reads 64 rows of q and dout and their statistics, of all query heads of the
// key head, and has four products of 64 x 64 x 256. Two warpgroups have two each:
//   values: s = k q^T | p = exp(s - lse), to the other warpgroup as well | dv += p dout
//   keys:   dp = v dout^T | dS = p (dp - delta)                          | dk += dS q
// Scores are transposed: a row is a key, so that p and dS are A operands in registers. p goes to the other warpgroup in
// register order, through 8 KiB of shared memory that no tensor core reads. The buffers of p need no `empty` barrier:
// the other warpgroup reads p before it releases the q of its step, and q has as many stages.
namespace warpsmith::attention {

constexpr int kWideStages = 2;  // of q, of dout and of p

struct WideKeysShared {
  static constexpr int kExchangeBytes = kWideKeys * kWideStep * 2, kStatisticsBytes = kWideStatistics * 4;
  static constexpr int kV = kWideBytes, kQ = 2 * kWideBytes, kDout = kQ + kWideStages * kWideBytes;
  static constexpr int kP = kDout + kWideStages * kWideBytes, kRows = kP + kWideStages * kExchangeBytes;
  static constexpr int kTile = kRows + kWideStages * kStatisticsBytes;
  static constexpr int kBarriers = kTile + static_cast<int>(sizeof(WideTile));
  static constexpr int kBytes = kBarriers + (2 + 5 * kWideStages) * static_cast<int>(sizeof(Mbarrier));

  unsigned char* memory;

  __device__ __forceinline__ unsigned char* k() const { return memory; }
  __device__ __forceinline__ unsigned char* v() const { return memory + kV; }
  __device__ __forceinline__ unsigned char* q(unsigned i) const { return memory + kQ + i * kWideBytes; }
  __device__ __forceinline__ unsigned char* dout(unsigned i) const { return memory + kDout + i * kWideBytes; }
  __device__ __forceinline__ float* statistics(unsigned i) const {
    return reinterpret_cast<float*>(memory + kRows + i * kStatisticsBytes);
  }
  // Where the thread writes or reads its four A operands of p, 128 places apart.
  __device__ __forceinline__ device::Vector<uint32_t, 4>* exchange(unsigned i) const {
    return reinterpret_cast<device::Vector<uint32_t, 4>*>(memory + kP + i * kExchangeBytes) + threadIdx.x % 128;
  }
  __device__ __forceinline__ WideTile* tile() const { return reinterpret_cast<WideTile*>(memory + kTile); }
  __device__ __forceinline__ Mbarrier* barrier(unsigned i) const {
    return reinterpret_cast<Mbarrier*>(memory + kBarriers) + i;
  }
  __device__ __forceinline__ Mbarrier* k_full() const { return barrier(0); }
  __device__ __forceinline__ Mbarrier* v_full() const { return barrier(1); }
  __device__ __forceinline__ Mbarrier* q_full(unsigned i) const { return barrier(2 + i); }  // q, statistics
  __device__ __forceinline__ Mbarrier* q_empty(unsigned i) const { return barrier(4 + i); }
  __device__ __forceinline__ Mbarrier* dout_full(unsigned i) const { return barrier(6 + i); }
  __device__ __forceinline__ Mbarrier* dout_empty(unsigned i) const { return barrier(8 + i); }
  __device__ __forceinline__ Mbarrier* p_full(unsigned i) const { return barrier(10 + i); }

  // Called by one thread.
  __device__ __forceinline__ void initialise() const {
    device::mbarrier_init(k_full(), 1);
    device::mbarrier_init(v_full(), 1);
    for (unsigned i = 0; i < kWideStages; ++i) {
      device::mbarrier_init(q_full(i), 1);
      device::mbarrier_init(q_empty(i), 8);  // warps of both warpgroups
      device::mbarrier_init(dout_full(i), 1);
      device::mbarrier_init(dout_empty(i), 8);
      device::mbarrier_init(p_full(i), 4);
    }
    device::mbarrier_init_fence();
  }
};

// Called by one thread.
__device__ __forceinline__ void describe_wide_keys(const WideParams& p, WideTile* t) {
  const TileIndex at = describe_wide_tile(p, kWideKeys, t);
  if (at.batch < 0) return;
  const int queries = at.batch < p.batch ? t->queries : 0;
  const VisitedBlocks blocks = visited_blocks(p.window, at.row_tile, queries, t->keys, kWideStep, kWideKeys);
  device::store(&t->begin, blocks.first);
  device::store(&t->end, blocks.end);
}

// Called by one thread. Loads query blocks from the last to the first, head by head. Tiles of one head that start
// together then read the same blocks at about the same time, whichever blocks the mask cuts off.
__device__ __forceinline__ void load_wide_keys(const WideParams& p, const WideMaps& maps,
                                               const WideKeysShared& shared) {
  const WideTile* t = shared.tile();
  const int begin = t->begin, blocks = t->end - begin;
  const bool packed = p.cu_seqlens_q != nullptr;
  if (blocks <= 0) return;
  device::prefetch_tensor_map(&maps.q);
  device::prefetch_tensor_map(&maps.dout);
  const auto load_keys = [&](const TensorMap& map, unsigned char* to, Mbarrier* full) {
    device::mbarrier_arrive_expect(full, kWideBytes);
    load_wide_rows(to, &map, full, packed, t->k.row + t->first, t->head, t->k.batch);
  };
  load_keys(maps.k, shared.k(), shared.k_full());
  unsigned i = 0;
  for (int h = 0; h < p.heads_per_key_head; ++h) {
    const int head = t->head * p.heads_per_key_head + h;
#pragma unroll 1
    for (int block = begin + blocks - 1; block >= begin; --block, ++i) {
      const unsigned stage = i % kWideStages, parity = i / kWideStages & 1;
      const int row = t->q.row + block * kWideStep;
      device::mbarrier_wait(shared.q_empty(stage), parity ^ 1);
      device::mbarrier_arrive_expect(shared.q_full(stage), kWideBytes + WideKeysShared::kStatisticsBytes);
      load_wide_rows(shared.q(stage), &maps.q, shared.q_full(stage), packed, row, head, t->q.batch);
      const int64_t number = static_cast<int64_t>(t->first_block + block) * p.heads + head;
      device::bulk_load(shared.statistics(stage), p.statistics + number * kWideStride, WideKeysShared::kStatisticsBytes,
                        shared.q_full(stage));
      if (i == 0) load_keys(maps.v, shared.v(), shared.v_full());
      device::mbarrier_wait(shared.dout_empty(stage), parity ^ 1);
      device::mbarrier_arrive_expect(shared.dout_full(stage), kWideBytes);
      load_wide_rows(shared.dout(stage), &maps.dout, shared.dout_full(stage), packed, row, head, t->q.batch);
    }
  }
}

// What both consumer warpgroups share.
template <class T> struct WideKeysConsumer {
  using Statistics = device::Vector<float, 4>;

  const WideParams& p;
  const WideKeysShared& shared;
  int blocks, steps;  // blocks of a head; of all heads

  __device__ __forceinline__ WideKeysConsumer(const WideParams& params, const WideKeysShared& memory)
      : p(params), shared(memory) {
    // The shuffle tells the compiler that all lanes have the same count, so that it goes to a uniform register.
    const WideTile* t = shared.tile();
    blocks = __shfl_sync(0xffffffffu, max(device::load(&t->end) - device::load(&t->begin), 0), 0);
    steps = blocks * p.heads_per_key_head;
  }
  // The first four of a thread's sixteen lse. Its delta are kWideStep / 4 vectors further.
  __device__ __forceinline__ const Statistics* statistics(unsigned stage) const {
    return reinterpret_cast<const Statistics*>(shared.statistics(stage)) + threadIdx.x % 4;
  }
  __device__ __forceinline__ void store(void* to, const AttentionStrides& strides, const float (&x)[kWideDim / 2],
                                        float factor, int columns) const {
    const WideTile* t = shared.tile();
    T* at = static_cast<T*>(to) + t->batch * strides.batch + t->head * strides.head +
            (int64_t{t->k_token} + t->first) * strides.seq;
    store_accumulators(at, strides.seq, x, factor, wide_row(), t->keys - t->first, columns,
                       static_cast<int>(threadIdx.x % 32));
  }
};

template <class T> struct WideValueGradient : WideKeysConsumer<T> {
  using Base = WideKeysConsumer<T>;
  using Base::p, Base::shared, Base::blocks, Base::steps;
  using typename Base::Statistics;

  float dv[kWideDim / 2], s[kWideStep / 2];  // s: 64 keys x 64 queries
  uint32_t pr[4][4];                         // packed probabilities

  using Base::Base;

  // Sets scores of pairs that do not see each other to -inf. Blocks whose first query is at `first` to `last` see all
  // keys of the tile.
  __device__ __forceinline__ void mask(int first_query, int first, int last) {
    if (first_query >= first && first_query <= last) return;
    const WideTile* t = shared.tile();
    const int shift = t->shift, keys = t->keys;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = t->first + wide_row() + 8 * r, column = first_query + static_cast<int>(threadIdx.x % 4) * 2;
      // Columns from `low` to `high` see the key.
      const int low = key >= keys ? kWideStep : key - shift - p.window.right - column;
      const int high = key - shift + p.window.left - column;
#pragma unroll
      for (int i = 0; i < kWideStep / 2; i += 4)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (2 * i + e < low || 2 * i + e > high) s[i + 2 * r + e] = -INFINITY;
    }
  }
  // As BackwardConsumer::subtract_far(). `step`: counted over all heads.
  __device__ __forceinline__ void subtract_far(const Statistics* lse, int step, int first_query) {
    if (!has_far_mark(device::load(lse).at[0])) return;
    const WideTile* t = shared.tile();
    const int head = t->head * p.heads_per_key_head + step / blocks;
    const int64_t block = static_cast<int64_t>(t->first_block + first_query / kWideStep) * p.heads + head;
    const float* far = p.statistics + block * kWideStride + kWideStride / 2 + threadIdx.x % 4 * 4;
    subtract_far_lse<kWideStep>(s, far, p.scale, p.to_scores);
  }
  // p = 2^(scale_log2 * s - lse), packed.
  __device__ __forceinline__ void exponentials(const Statistics* lse) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Statistics l = device::load(lse + 4 * i);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float* x = s + 8 * i + 2 * e;
        pr[i][e] = device::pack<T>(device::exp2(x[0] * p.scale_log2 - l.at[e / 2 * 2]),
                                   device::exp2(x[1] * p.scale_log2 - l.at[e / 2 * 2 + 1]));
      }
    }
  }
  __device__ __forceinline__ void run() {
#pragma unroll
    for (float& x : dv) x = 0.0f;
    if (steps > 0) {
      const WideTile* t = shared.tile();
      const int last_query = __shfl_sync(0xffffffffu, (t->end - 1) * kWideStep, 0);
      const int first_key = t->first, shift = t->shift;
      const int whole = first_key + kWideKeys <= t->keys ? first_key + kWideKeys - 1 - shift - p.window.right : 1 << 30;
      const int whole_first = __shfl_sync(0xffffffffu, whole, 0);
      const int whole_last = __shfl_sync(0xffffffffu, first_key - (kWideStep - 1) - shift + p.window.left, 0);
      device::mbarrier_wait(shared.k_full(), 0);
      int first_query = last_query, of_head = 0;
#pragma unroll 1
      for (int i = 0; i < steps; ++i) {
        const unsigned stage = i % kWideStages, parity = i / kWideStages & 1;
        device::mbarrier_wait(shared.q_full(stage), parity);
        multiply_wide_rows<T>(s, shared.k(), shared.q(stage));
        device::wgmma_wait<1>();  // dv of the previous step is done
        hold_weights(pr);
        if (i > 0) arrive_as_warp(shared.dout_empty(stage ^ 1));
        device::wgmma_wait<0>();
        device::hold(s);
        mask(first_query, whole_first, whole_last);
        subtract_far(Base::statistics(stage), i, first_query);
        exponentials(Base::statistics(stage));
#pragma unroll
        for (int j = 0; j < 4; ++j)
          device::store(shared.exchange(stage) + j * 128,
                        device::Vector<uint32_t, 4>{{pr[j][0], pr[j][1], pr[j][2], pr[j][3]}});
        __syncwarp(0xffffffffu);
        arrive_as_warp(shared.q_empty(stage));  // q and lse have been read
        arrive_as_warp(shared.p_full(stage));
        device::mbarrier_wait(shared.dout_full(stage), parity);
        accumulate_wide_rows<T>(dv, pr, shared.dout(stage));
        first_query -= kWideStep;
        if (++of_head == blocks) {
          of_head = 0;
          first_query = last_query;
        }
      }
      device::wgmma_wait<0>();
      device::hold(dv);
    }
    Base::store(p.dv, p.dv_strides, dv, 1.0f, p.head_dim_v);
  }
};

template <class T> struct WideKeyGradient : WideKeysConsumer<T> {
  using Base = WideKeysConsumer<T>;
  using Base::p, Base::shared, Base::steps;
  using typename Base::Statistics;

  float dk[kWideDim / 2], dp[kWideStep / 2];
  uint32_t ds[4][4];  // packed

  using Base::Base;

  // dS = p (dp - delta), packed, from the rounded p.
  __device__ __forceinline__ void score_gradients(const Statistics* delta, unsigned stage) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Statistics d = device::load(delta + 4 * i);
      const device::Vector<uint32_t, 4> pr = device::load(shared.exchange(stage) + i * 128);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float* x = dp + 8 * i + 2 * e;
        ds[i][e] = device::pack<T>(device::low_half<T>(pr.at[e]) * (x[0] - d.at[e / 2 * 2]),
                                   device::high_half<T>(pr.at[e]) * (x[1] - d.at[e / 2 * 2 + 1]));
      }
    }
  }
  __device__ __forceinline__ void run() {
#pragma unroll
    for (float& x : dk) x = 0.0f;
    if (steps > 0) {
      device::mbarrier_wait(shared.v_full(), 0);
#pragma unroll 1
      for (int i = 0; i < steps; ++i) {
        const unsigned stage = i % kWideStages, parity = i / kWideStages & 1;
        device::mbarrier_wait(shared.dout_full(stage), parity);
        multiply_wide_rows<T>(dp, shared.v(), shared.dout(stage));
        device::wgmma_wait<1>();  // dk of the previous step is done
        hold_weights(ds);
        if (i > 0) arrive_as_warp(shared.q_empty(stage ^ 1));
        device::wgmma_wait<0>();
        device::hold(dp);
        arrive_as_warp(shared.dout_empty(stage));
        device::mbarrier_wait(shared.q_full(stage), parity);
        device::mbarrier_wait(shared.p_full(stage), parity);
        score_gradients(Base::statistics(stage) + kWideStep / 4, stage);
        __syncwarp(0xffffffffu);  // all lanes have read p and delta before the next step releases q
        accumulate_wide_rows<T>(dk, ds, shared.q(stage));
      }
      device::wgmma_wait<0>();
      device::hold(dk);
    }
    Base::store(p.dk, p.dk_strides, dk, p.scale, p.head_dim);
  }
};

}  // namespace warpsmith::attention
