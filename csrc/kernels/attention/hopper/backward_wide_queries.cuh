#pragma once
#include "kernels/attention/hopper/backward_wide_tile.cuh"
#include "kernels/attention/mask.cuh"

// dq of a tile of 128 query rows (backward_wide.cuh): the body of backward_sm90_wide_queries.
//
// Reads q, dout and statistics of the tile once. A step reads 64 rows of k and v. Each of two warpgroups has 64 query
// rows and three products of 64 x 64 x 256 a step:
//   s = q k^T | p = exp(s - lse) | dp = dout v^T | dS = p (dp - delta) | dq += dS k
// dS is an A operand in registers. dq of a step overlaps with the scores of the next step.
namespace warpsmith::attention {

struct WideQueriesShared {
  // k has two buffers, because dq of a step still reads k while the next scores are computed. v has one: its next block
  // is loaded during two products of each warpgroup.
  static constexpr unsigned kKeyStages = 2;
  static constexpr int kDout = 2 * kWideBytes, kK = 4 * kWideBytes, kV = kK + kKeyStages * kWideBytes;
  static constexpr int kTile = kV + kWideBytes;
  static constexpr int kBarriers = kTile + static_cast<int>(sizeof(WideTile));
  static constexpr int kBytes = kBarriers + (4 + 2 * kKeyStages) * static_cast<int>(sizeof(Mbarrier));

  unsigned char* memory;

  __device__ __forceinline__ unsigned char* q(unsigned group) const { return memory + group * kWideBytes; }
  __device__ __forceinline__ unsigned char* dout(unsigned group) const { return memory + kDout + group * kWideBytes; }
  __device__ __forceinline__ unsigned char* k(unsigned i) const { return memory + kK + i * kWideBytes; }
  __device__ __forceinline__ unsigned char* v() const { return memory + kV; }
  __device__ __forceinline__ WideTile* tile() const { return reinterpret_cast<WideTile*>(memory + kTile); }
  __device__ __forceinline__ Mbarrier* barrier(unsigned i) const {
    return reinterpret_cast<Mbarrier*>(memory + kBarriers) + i;
  }
  __device__ __forceinline__ Mbarrier* rows_full(unsigned group) const { return barrier(group); }  // q and dout
  __device__ __forceinline__ Mbarrier* v_full() const { return barrier(2); }
  __device__ __forceinline__ Mbarrier* v_empty() const { return barrier(3); }
  __device__ __forceinline__ Mbarrier* k_full(unsigned i) const { return barrier(4 + i); }
  __device__ __forceinline__ Mbarrier* k_empty(unsigned i) const { return barrier(4 + kKeyStages + i); }

  // Called by one thread.
  __device__ __forceinline__ void initialise() const {
    for (unsigned group = 0; group < 2; ++group) device::mbarrier_init(rows_full(group), 1);
    device::mbarrier_init(v_full(), 1);
    device::mbarrier_init(v_empty(), 8);  // warps of both warpgroups
    for (unsigned i = 0; i < kKeyStages; ++i) {
      device::mbarrier_init(k_full(i), 1);
      device::mbarrier_init(k_empty(i), 8);
    }
    device::mbarrier_init_fence();
  }
};

// Called by one thread.
__device__ __forceinline__ void describe_wide_queries(const WideParams& p, WideTile* t) {
  const TileIndex at = describe_wide_tile(p, kWideRows, t);
  if (at.batch < 0) return;
  const int keys = at.batch < p.batch ? t->keys : 0;
  const VisitingTiles blocks = visiting_tiles(p.window, at.row_tile, t->queries, keys, kWideRows, kWideKeys);
  device::store(&t->begin, blocks.first);
  device::store(&t->end, blocks.end);
}

// Called by one thread.
__device__ __forceinline__ void load_wide_queries(const WideParams& p, const WideMaps& maps,
                                                  const WideQueriesShared& shared) {
  const WideTile* t = shared.tile();
  const int begin = t->begin, blocks = t->end - begin, key_head = t->head / p.heads_per_key_head;
  const bool packed = p.cu_seqlens_q != nullptr;
  if (blocks <= 0) return;
  device::prefetch_tensor_map(&maps.k);
  device::prefetch_tensor_map(&maps.v);
  for (unsigned group = 0; group < 2; ++group) {
    const int row = t->q.row + t->first + static_cast<int>(group) * 64;
    device::mbarrier_arrive_expect(shared.rows_full(group), 2 * kWideBytes);
    load_wide_rows(shared.q(group), &maps.q, shared.rows_full(group), packed, row, t->head, t->q.batch);
    load_wide_rows(shared.dout(group), &maps.dout, shared.rows_full(group), packed, row, t->head, t->q.batch);
  }
#pragma unroll 1
  for (int i = 0; i < blocks; ++i) {
    const unsigned step = static_cast<unsigned>(i), stage = step % WideQueriesShared::kKeyStages;
    const int row = t->k.row + (begin + i) * kWideKeys;
    device::mbarrier_wait(shared.k_empty(stage), (step / WideQueriesShared::kKeyStages & 1) ^ 1);
    device::mbarrier_arrive_expect(shared.k_full(stage), kWideBytes);
    load_wide_rows(shared.k(stage), &maps.k, shared.k_full(stage), packed, row, key_head, t->k.batch);
    device::mbarrier_wait(shared.v_empty(), (step & 1) ^ 1);
    device::mbarrier_arrive_expect(shared.v_full(), kWideBytes);
    load_wide_rows(shared.v(), &maps.v, shared.v_full(), packed, row, key_head, t->k.batch);
  }
}

// A warpgroup owns 64 query rows. A thread has two of them.
template <class T> struct WideQueryGradient {
  const WideParams& p;
  const WideQueriesShared& shared;
  const unsigned group;
  float lse[2], delta[2];
  float dq[kWideDim / 2], s[kWideKeys / 2], dp[kWideKeys / 2];
  uint32_t ds[4][4];  // packed

  __device__ __forceinline__ WideQueryGradient(const WideParams& params, const WideQueriesShared& memory, int warpgroup)
      : p(params), shared(memory), group(static_cast<unsigned>(warpgroup)) {}

  __device__ __forceinline__ int first_query() const {
    return device::load(&shared.tile()->first) + static_cast<int>(group) * 64;
  }
  __device__ __forceinline__ const float* statistics() const {
    const WideTile* t = shared.tile();
    const int64_t block = static_cast<int64_t>(t->first_block + first_query() / kWideStep) * p.heads + t->head;
    return p.statistics + block * kWideStride;
  }
  // Rows beyond the sequence have an infinite lse, so their probabilities are 0.
  __device__ __forceinline__ void load_statistics() {
    const WideTile* t = shared.tile();
    const int first = first_query();
    const float* from = statistics();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = wide_row() + 8 * r;
      lse[r] = INFINITY;
      delta[r] = 0.0f;
      if (first + row < t->queries) {
        lse[r] = device::load(from + statistics_place(row));
        delta[r] = device::load(from + kWideStep + statistics_place(row));
      }
    }
  }
  // Subtracts lse and lse_rest from the scores of the rows of a far block.
  __device__ __forceinline__ void subtract_far() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!has_far_mark(lse[r])) continue;
      const float* far = statistics() + kWideStride / 2 + statistics_place(wide_row() + 8 * r);
      subtract_far_lse(s, r, device::load(far), device::load(far + kWideStep), p.scale, p.to_scores);
    }
  }
  // p = 2^(scale_log2 * s - lse), in place of s.
  __device__ __forceinline__ void exponentials() {
#pragma unroll
    for (int i = 0; i < kWideKeys / 2; ++i) s[i] = device::exp2(s[i] * p.scale_log2 - lse[i / 2 % 2]);
  }
  // dS = p (dp - delta), packed.
  __device__ __forceinline__ void score_gradients() {
#pragma unroll
    for (int i = 0; i < kWideKeys / 2; i += 2) {
      const float d = delta[i / 2 % 2];
      ds[i / 8][i / 2 % 4] = device::pack<T>(s[i] * (dp[i] - d), s[i + 1] * (dp[i + 1] - d));
    }
  }
  __device__ __forceinline__ void run() {
#pragma unroll
    for (float& x : dq) x = 0.0f;
    const WideTile* t = shared.tile();
    // The shuffles tell the compiler that all lanes have the same bounds, so that these go to uniform registers.
    const int begin = __shfl_sync(0xffffffffu, device::load(&t->begin), 0);
    const int end = __shfl_sync(0xffffffffu, device::load(&t->end), 0);
    if (begin < end) {
      load_statistics();
      // Blocks whose first key is at `whole_first` to `whole_last` are seen as a whole by all 64 rows.
      const int first = first_query() + t->shift;
      const int last_whole = min(first + p.window.right, t->keys - 1) - (kWideKeys - 1);
      // A far block is seen as a whole by none: that saves steps a branch.
      const bool far = __any_sync(0xffffffffu, has_far_mark(lse[0]));
      const int whole_first = __shfl_sync(0xffffffffu, far ? 1 << 30 : first + 63 - p.window.left, 0);
      const int whole_last = __shfl_sync(0xffffffffu, last_whole, 0);
      device::mbarrier_wait(shared.rows_full(group), 0);
#pragma unroll 1
      for (int block = begin; block < end; ++block) {
        const unsigned step = static_cast<unsigned>(block - begin), stage = step % WideQueriesShared::kKeyStages;
        device::mbarrier_wait(shared.k_full(stage), step / WideQueriesShared::kKeyStages & 1);
        multiply_wide_rows<T>(s, shared.q(group), shared.k(stage));
        device::wgmma_wait<1>();  // dq of the previous step is done
        hold_weights(ds);
        if (step > 0) arrive_as_warp(shared.k_empty(stage ^ 1));
        device::mbarrier_wait(shared.v_full(), step & 1);
        multiply_wide_rows<T>(dp, shared.dout(group), shared.v());
        device::wgmma_wait<1>();
        device::hold(s);
        const int first_key = block * kWideKeys;
        if (first_key < whole_first || first_key > whole_last) {
          mask_scores(s, p.window, first_query() + wide_row(), first_key, static_cast<int>(threadIdx.x % 32), t->shift,
                      t->keys);
          subtract_far();
        }
        exponentials();
        device::wgmma_wait<0>();
        device::hold(dp);
        arrive_as_warp(shared.v_empty());
        score_gradients();
        accumulate_wide_rows<T>(dq, ds, shared.k(stage));
      }
      device::wgmma_wait<0>();
      device::hold(dq);
    }
    const int first = first_query();
    T* to = static_cast<T*>(p.dq) + t->batch * p.dq_strides.batch + t->head * p.dq_strides.head +
            (int64_t{t->q_token} + first) * p.dq_strides.seq;
    store_accumulators(to, p.dq_strides.seq, dq, p.scale, wide_row(), t->queries - first, p.head_dim,
                       static_cast<int>(threadIdx.x % 32));
  }
};

}  // namespace warpsmith::attention
