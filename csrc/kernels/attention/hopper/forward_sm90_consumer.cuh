#pragma once
#include "device/matrix_access.h"
#include "device/wgmma.h"
#include "kernels/attention/hopper/forward_sm90_biases.cuh"
#include "kernels/attention/online_softmax.cuh"

// The consumer warpgroups of the Hopper forward (forward_sm90.cuh): both products and the softmax.
namespace warpsmith::attention {

// s = softcap * tanh(s * to_softcap). Takes two special functions per element, with the error of float. tanh.approx
// would put an error of 2^-11 of the cap into the exponent.
template <int kRegisters>
__device__ __forceinline__ void cap_scores(float (&s)[kRegisters], float softcap, float to_softcap) {
#pragma unroll
  for (float& x : s)
    x = softcap - 2.0f * softcap * device::reciprocal(1.0f + device::exp2(2.0f * kLog2e * to_softcap * x));
}

// A warpgroup owns 64 query rows of each tile. A thread has two of them: `query` and query + 8.
template <class T, ForwardTile tile> struct ForwardConsumer {
  using Softmax = OnlineSoftmax<T, tile.block_keys>;
  using Probabilities = typename Softmax::Probabilities;
  static constexpr int kPingpongThreads = 256;

  const ForwardParams& p;
  const ForwardShared<tile>& shared;
  const int group, lane, warp;
  Ring<tile.block_stages> ring;
  unsigned bias_parity = 0;  // of the visit
  const Tile* t;             // in shared memory
  int visits, masked;        // of the tile
  int query;
  uint64_t q;                    // descriptor
  float s[tile.block_keys / 2];  // scores; after a masked step, probabilities
  float o[tile.head_dim / 2];    // sum of p * v
  Softmax softmax;
  unsigned number = 0;  // of the tile
  float inverse[2];     // 1 / sum of the rows of tile number - 1
  __device__ __forceinline__ ForwardConsumer(const ForwardParams& params, const ForwardShared<tile>& memory,
                                             int warpgroup)
      : p(params), shared(memory), group(warpgroup), lane(threadIdx.x % 32), warp(threadIdx.x / 32 % 4) {}

  __device__ __forceinline__ int take_block() {
    const int stage = ring.stage;
    device::mbarrier_wait(shared.block_full + stage, ring.parity);
    ring.next();
    return stage;
  }
  // Call when the warp has finished reading the block.
  __device__ __forceinline__ void release_block(int stage) {
    if (lane == 0) device::mbarrier_arrive(shared.block_empty + stage);
  }

  // With tile.pingpong, a warpgroup issues both products of a step before the next warpgroup may issue its own. The
  // exponentials of one warpgroup then overlap with the products of the others. For tiles whose products and
  // exponentials take equally long.
  static __device__ __forceinline__ int pingpong_barrier(int g) { return store_barrier(0, tile.groups) + g; }
  __device__ __forceinline__ void wait_to_issue() {
    if (tile.pingpong) device::named_barrier_wait(pingpong_barrier(group), kPingpongThreads);
  }
  __device__ __forceinline__ void let_next_issue() {
    if (tile.pingpong)
      device::named_barrier_arrive(pingpong_barrier(group == tile.groups - 1 ? 0 : group + 1), kPingpongThreads);
  }

  // s = q k^T. Asynchronous.
  __device__ __forceinline__ void multiply_keys(int stage) {
    const uint64_t k = device::wgmma_descriptor(Swizzle::bytes128, shared.block(stage), 16, 1024);
    device::wgmma_fence();
#pragma unroll
    for (int i = 0; i < tile.head_dim / 16; ++i) {  // four instructions a panel
      const uint32_t panel = i / 4, column_bytes = i % 4 * 32;
      device::wgmma<T, tile.block_keys>(s, device::advance(q, panel * kGroupRows * kPanelRowBytes + column_bytes),
                                        device::advance(k, panel * tile.block_keys * kPanelRowBytes + column_bytes),
                                        i > 0);
    }
    device::wgmma_commit();
  }
  // o += probabilities * v. Asynchronous.
  __device__ __forceinline__ void multiply_values(int stage, const Probabilities& probabilities) {
    const uint64_t v =
        device::wgmma_descriptor(Swizzle::bytes128, shared.block(stage), tile.block_keys * kPanelRowBytes, 1024);
    device::wgmma_fence();
#pragma unroll
    for (int i = 0; i < tile.block_keys / 16; ++i)
      device::wgmma<T, tile.head_dim, device::Major::mn>(o, probabilities[i],
                                                         device::advance(v, i * 16 * kPanelRowBytes), true);
    device::wgmma_commit();
  }
  // Starts both products of a step. Returns when s is complete; the second product is then still in flight.
  //
  // `between` and `late` run after the first product has been issued. The operands of the second product are registers,
  // so a warp stalls while it issues that product; their work overlaps with the first product. The wait for the block
  // of values keeps `late` behind the instructions of the first product: without it, ptxas mixes both, and the product
  // waits for shuffles.
  template <class Between, class Late>
  __device__ __forceinline__ int start_step(const Probabilities& probabilities, Between&& between, Late&& late) {
    const int keys = take_block();
    wait_to_issue();
    multiply_keys(keys);
    between();
    const int values = take_block();
    late();
    multiply_values(values, probabilities);
    let_next_issue();
    device::wgmma_wait<1>();
    device::hold(s);
    release_block(keys);
    return values;
  }
  __device__ __forceinline__ int start_step(const Probabilities& probabilities) {
    return start_step(probabilities, [] {}, [] {});
  }
  __device__ __forceinline__ void finish_step(int values) {
    device::keep_before_wait(softmax.sum[0] + softmax.sum[1], shared.scratch);
    device::wgmma_wait<0>();
    device::hold(o);
    release_block(values);
  }
  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < tile.head_dim / 2; ++i) o[i] *= factor[i >> 1 & 1];
  }
  __device__ __forceinline__ void cap() {
    if (tile.extended && p.softcap != 0.0f) cap_scores(s, p.softcap, p.to_softcap);
  }

  // What turns the scores of a step, with softcap and biases, into logits.
  __device__ __forceinline__ float to_logits() const {
    return tile.biases == Biases::tensor || tile.biases == Biases::pairs ? 1.0f : p.to_logits;
  }

  // What the mask of a visit needs. Loaded before the products, which hide the latency.
  struct MaskPlace {
    int first_key, shift, keys;
  };
  __device__ __forceinline__ MaskPlace mask_place(int visit) const {
    return {t->block(visit) * tile.block_keys, t->shift, t->keys};
  }
  // Turns the scores of a masked visit into probabilities, under a base that follows the maximum.
  __device__ __forceinline__ void masked_softmax(const MaskPlace& m, float (&factor)[2]) {
    cap();
    if constexpr (tile.stages_biases()) {
      biases(m.first_key).add_alibi(s);
      staged_biases().load_and_add(s, p.biases.scale);
    } else if constexpr (tile.biased()) {
      biases(m.first_key).add_edge(s);
    }
    mask_scores(s, p.window, own_query(), m.first_key, lane, m.shift, m.keys);
    softmax.exponentials_in_place(s, softmax.raise_base(s, p.scale_log2, to_logits(), factor));
    if constexpr (tile.dropout) {
      const RowDropout dropout = row_dropout();
#pragma unroll
      for (int c = 0; c < tile.block_keys / kAttentionDropoutKeys; ++c) {
        const PhiloxCounter call = dropout.call(call_of(m.first_key, c));
#pragma unroll
        for (int half = 0; half < 2; ++half) drop<T>(call, half, p.dropout.threshold, s + 8 * (2 * c + half));
      }
    }
  }
  using StepBiases = QueryBiases<T, tile.block_keys, tile.biases>;
  __device__ __forceinline__ StepBiases biases(int first_key) const {
    return {p.biases, t->sequence, t->head, own_query(), t->queries, first_key + lane % 4 * 2, t->keys, t->shift};
  }
  __device__ __forceinline__ StagedBiases<T, tile> staged_biases() {
    return {p.biases, shared, bias_parity, group, warp, lane};
  }
  // The parts that the Philox calls of a step share. Computed in every step, because there are no registers to keep
  // them.
  __device__ __forceinline__ RowDropout row_dropout() const {
    if constexpr (!tile.dropout) return {};
    return RowDropout(p.dropout, t->dropout_row + static_cast<uint32_t>(group * 4 + warp) * p.dropout.counters.heads);
  }
  // Counter word 0 for the keys from first_key + 32 c on.
  __device__ __forceinline__ uint32_t call_of(int first_key, int c) const {
    static_assert(!tile.dropout || tile.block_keys % kAttentionDropoutKeys == 0);
    return attention_dropout_word0(p.dropout.counters, first_key + c * kAttentionDropoutKeys) +
           static_cast<uint32_t>(lane);
  }
  // Writes the gates of a step to `gates`, where its probabilities will be.
  __device__ __forceinline__ void make_gates(const RowDropout& dropout, int first_key, Probabilities& gates) const {
    uint32_t threshold[1] = {p.dropout.threshold}, all = 0;
    device::hold(threshold);  // in a register, from which every pair takes it
#pragma unroll
    for (int c = 0; c < tile.block_keys / kAttentionDropoutKeys; ++c) {
      const PhiloxCounter call = dropout.call(call_of(first_key, c));
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        uint32_t& pair = gates[2 * c + i / 4][i % 4];
        pair = pair_gates(call, i / 4, i % 4, threshold[0]);
        if (i % 2 == 0) all ^= pair;
      }
    }
    device::keep_before_wait(__uint_as_float(all), shared.scratch);
  }
  // A step with a mask. Packs the new probabilities after the product that reads the old ones has finished.
  __device__ __forceinline__ void masked_step(int visit, Probabilities& probabilities) {
    const MaskPlace place = mask_place(visit);
    const int values = start_step(probabilities);
    float factor[2];
    masked_softmax(place, factor);
    finish_step(values);
    rescale(factor);
    Softmax::pack(s, probabilities);
  }
  // A step without a mask, with the base of the previous steps. Keeps the scores: if the exponentials outgrow the base,
  // they are computed again under a higher base. The dropout mask depends on neither product, and is made while the
  // first one runs.
  __device__ __forceinline__ void lazy_step(int visit, const Probabilities& old, Probabilities& probabilities) {
    const int first_key = (t->whole_end - 1 - (visit - masked)) * tile.block_keys;
    [[maybe_unused]] const RowDropout dropout = row_dropout();
    const auto prepare = [&] {
      if constexpr (tile.dropout) make_gates(dropout, first_key, probabilities);
      if constexpr (tile.stages_biases())
        staged_biases().load(probabilities);
      else if constexpr (tile.biased())
        biases(first_key).load(probabilities);
    };
    const int values = start_step(old, prepare, [] {});
    cap();
    if constexpr (tile.biased()) biases(first_key).add(s, probabilities);
    float sums[2], factor[2];
    Softmax::template exponentials<tile.dropout>(s, softmax.exponent(p.scale_log2), probabilities, sums);
    const bool outgrown = __any_sync(0xffffffffu, softmax.outgrown(sums));
    if (outgrown) [[unlikely]] {
      if constexpr (tile.dropout) make_gates(row_dropout(), first_key, probabilities);
      const Exponent raised = softmax.raise_base(s, p.scale_log2, to_logits(), factor);
      Softmax::template exponentials<tile.dropout>(s, raised, probabilities, sums);
    }
    softmax.sum[0] += sums[0];
    softmax.sum[1] += sums[1];
    finish_step(values);
    if (outgrown) rescale(factor);
  }

  // A step without a mask, for tiles without registers for a second set of probabilities. Packs the new probabilities
  // after the product that reads the old ones has finished.
  __device__ __forceinline__ void following_step(Probabilities& probabilities) {
    const int values = start_step(probabilities);
    cap();
    float factor[2];
    Exponent exponent = softmax.exponent(p.scale_log2);
    const bool raised = softmax.follow_maxima(s, exponent, to_logits(), factor);
    softmax.exponentials_in_place(s, exponent);
    finish_step(values);
    if (raised) rescale(factor);
    Softmax::pack(s, probabilities);
  }

  // Serial tiles compute it anew where a tile begins and ends: a register for it would be spilled. Not for descriptors:
  // the compiler would not know that the value is the same in every lane.
  __device__ __forceinline__ int own_group() const {
    return tile.serial() ? static_cast<int>(threadIdx.x / 128) - 1 : group;
  }
  __device__ __forceinline__ int first_row(const Tile* of) const {
    return device::load(&of->first_query) + own_group() * kGroupRows + warp * 16 + lane / 4;
  }
  // kForward128Bias computes it in each step that needs it: a register for it would be spilled.
  __device__ __forceinline__ int own_query() const {
    return tile.stages_biases() && tile.head_dim == 128 ? first_row(t) : query;
  }
  // The number of a tile says where its slot and its queries are.
  static __device__ __forceinline__ unsigned slot_of(unsigned number) { return number % kTileSlots; }
  static __device__ __forceinline__ unsigned query_stage_of(unsigned number) { return number % tile.query_stages; }

  // The tile's number, from its slot, for tiles in which a register for it would be spilled.
  __device__ __forceinline__ unsigned read_number() const {
    return __shfl_sync(0xffffffffu, device::load(&t->number), 0);
  }
  // Takes tile `number`; false after the last.
  __device__ __forceinline__ bool take_tile() {
    device::mbarrier_wait(shared.slot_full + slot_of(number), number / kTileSlots & 1);
    t = shared.slots + slot_of(number);
    // The shuffle tells the compiler that the values are the same in every lane, so that loop counts and descriptors go
    // into uniform registers.
    visits = __shfl_sync(0xffffffffu, device::load(&t->visits), 0);
    masked = __shfl_sync(0xffffffffu, device::load(&t->masked), 0);
    query = first_row(t);
    softmax.begin();
    if (visits < 0) return false;
    const unsigned stage = query_stage_of(number);
    device::mbarrier_wait(shared.query_full + stage * tile.groups + own_group(), number / tile.query_stages & 1);
    q = device::wgmma_descriptor(Swizzle::bytes128, shared.query(stage, group), 16, 1024);
    return true;
  }
  __device__ __forceinline__ float sink_logit(int head) const {
    return p.sink_is_float ? device::load(static_cast<const float*>(p.sink) + head)
                           : device::to_float(device::load(static_cast<const T*>(p.sink) + head));
  }
  // Writes `inverse`, lse and lse_rest of tile number - 1, whose softmax is `of`.
  __device__ __forceinline__ void end_softmax(Softmax of) {
    const Tile* ended = shared.slots + slot_of(number - 1);
    const int queries = device::load(&ended->queries), first = first_row(ended);
    const int64_t at = device::load(&ended->lse) + first;
    of.total();
    float lse[2], rest[2] = {0.0f, 0.0f};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      inverse[r] = of.sum[r] != 0.0f ? device::reciprocal(of.sum[r]) : 0.0f;
      lse[r] = of.lse(r);
    }
    // One branch for both: tiles that have neither skip their code at once.
    if (of.far() || p.sink != nullptr) [[unlikely]] {
      // The sink is one more logit in the sum, without a value. -inf: none.
      const bool has_sink = p.sink != nullptr && device::load(&ended->sinks) != 0;
      const float sink = has_sink ? sink_logit(ended->head) : -INFINITY;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (of.far()) {
          const RowEnd end = far_end(of.base[r], of.sum[r], kHeadroom<T>, sink);
          inverse[r] = end.factor;
          lse[r] = end.lse;
          rest[r] = end.rest;
        } else if (sink != -INFINITY) {
          const float difference = lse[r] - sink, above = device::exp2(-fabsf(difference) * kLog2e);
          inverse[r] *= (difference > 0.0f ? 1.0f : above) * device::reciprocal(1.0f + above);
          lse[r] = fmaxf(lse[r], sink) + device::log2(1.0f + above) * kLn2;
          if (sink == INFINITY) inverse[r] = NAN;
        }
      }
    }
    if constexpr (tile.dropout)
      for (float& factor : inverse) factor *= p.dropout.scale;
    // Conditions without branches: each store has its predicate.
    const auto store = [&](float* to, int r, float x) {
      const bool mine = static_cast<bool>(static_cast<int>(lane % 4 == 0) & static_cast<int>(first + 8 * r < queries) &
                                          static_cast<int>(to != nullptr));
      if (mine) device::store(to + at + 8 * r, x);
    };
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      store(p.lse, r, lse[r]);
      store(p.lse_rest, r, rest[r]);
    }
  }
  // Writes o * inverse to the buffer of q of tile number - 1, which nobody reads any more, and signals the storing
  // warp.
  __device__ __forceinline__ void hand_over() {
    const unsigned of = number - 1, stage = query_stage_of(of);
    // Four 8 x 8 matrices per instruction: rows 0-7 and 8-15 of the warp's columns c to c + 7, then of columns c + 8 to
    // c + 15.
    unsigned char* buffer = shared.query(stage, own_group());
    const auto first = static_cast<uint32_t>((warp * 16 + lane % 16) * kPanelRowBytes + lane / 16 * 16);
#pragma unroll
    for (int c = 0; c < tile.head_dim / 16; ++c) {
      uint32_t rows[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        rows[i] = device::pack<T>(o[8 * c + 2 * i] * inverse[i % 2], o[8 * c + 2 * i + 1] * inverse[i % 2]);
      const uint32_t panel = c / 4 * kGroupRows * kPanelRowBytes, column_bytes = c % 4 * 32;
      device::store_matrix(buffer + panel + (device::swizzled(Swizzle::bytes128, first) ^ column_bytes), rows);
    }
    device::fence_async_shared();
    device::named_barrier_arrive(store_barrier(stage, own_group()), kStoreThreads);
    __syncwarp(0xffffffffu);  // all lanes have read the slot before one of them releases it
    if (lane == 0) device::mbarrier_arrive(shared.slot_empty + slot_of(of));
  }
  __device__ __forceinline__ void clear_output() {
#pragma unroll
    for (float& x : o) x = 0.0f;
  }

  // The first step of a tile: scores and probabilities of its first block.
  __device__ __forceinline__ void first_step(Probabilities& probabilities) {
    const int first = take_block();
    multiply_keys(first);
    device::wgmma_wait<0>();
    device::hold(s);
    release_block(first);
    float factor[2];
    masked_softmax(mask_place(0), factor);
    Softmax::pack(s, probabilities);
  }
  // The last product of a tile, which overlaps with nothing.
  __device__ __forceinline__ void last_product(const Probabilities& probabilities) {
    const int values = take_block();
    multiply_values(values, probabilities);
    device::wgmma_wait<0>();
    device::hold(o);
    release_block(values);
  }

  __device__ __forceinline__ void run() {
    if constexpr (tile.serial())
      run_serial();
    else
      run_overlapped();
  }
  __device__ __forceinline__ void run_serial() {
    if (tile.pingpong && group == tile.groups - 1) let_next_issue();
    Probabilities probabilities;
    while (take_tile()) {
      clear_output();
      first_step(probabilities);
      int visit = 1;
      for (; visit < masked; ++visit) masked_step(visit, probabilities);
      for (; visit < visits; ++visit) following_step(probabilities);
      last_product(probabilities);
      number = read_number() + 1;
      end_softmax(softmax);
      hand_over();
    }
  }
  __device__ __forceinline__ void run_overlapped() {
    if (tile.pingpong && group == tile.groups - 1) let_next_issue();
    if (!take_tile()) return;
    // Two arrays: the next probabilities are written while the tensor cores still read the previous ones.
    Probabilities p0, p1;
    float factor[2];
    clear_output();
    first_step(p0);
    for (;;) {
      int visit = 1;
      for (; visit < masked; ++visit) masked_step(visit, p0);
      for (; visit + 1 < visits; visit += 2) {
        lazy_step(visit, p0, p1);
        lazy_step(visit + 1, p1, p0);
      }
      if (visit < visits) {
        lazy_step(visit, p0, p1);
        // The XOR with a zero that the compiler does not know keeps this copy. ptxas would merge a plain copy with
        // registers that the product in flight still reads.
#pragma unroll
        for (int i = 0; i < tile.block_keys / 4; ++i) p0[i / 4][i % 4] = p1[i / 4][i % 4] ^ p.zero;
      }
      // The last product of this tile overlaps with the first product of the next tile. So does the end of its softmax.
      const Softmax ended = softmax;
      if constexpr (tile.stages_biases()) number = read_number();
      ++number;
      if (!take_tile()) {
        last_product(p0);
        end_softmax(ended);
        hand_over();
        break;
      }
      const MaskPlace place = mask_place(0);
      const int values = start_step(p0, [] {}, [&] { end_softmax(ended); });
      masked_softmax(place, factor);
      finish_step(values);
      hand_over();
      clear_output();
      Softmax::pack(s, p0);
    }
  }
};

}  // namespace warpsmith::attention
