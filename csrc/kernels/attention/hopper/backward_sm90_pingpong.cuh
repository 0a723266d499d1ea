#pragma once
#include "kernels/attention/hopper/backward_sm90_consumer.cuh"

// The order of the Hopper backward's steps. The two warpgroups keep half a step apart: one multiplies while the other
// computes exponentials. In phase, both would leave the tensor cores idle at once (H200, 4,096 keys: 552 instead of 601
// TFLOP/s).
namespace warpsmith::attention {

template <class T, BackwardTile tile> struct BackwardPingpong : BackwardConsumer<T, tile> {
  using Base = BackwardConsumer<T, tile>;
  using Base::p, Base::shared, Base::group, Base::lane, Base::it, Base::tiles, Base::t;
  using Base::s, Base::dp, Base::dk, Base::dv, Base::dq;
  using typename Base::Statistics;
  static constexpr int kPingpongThreads = 256;
  static constexpr int kOwnBarrier = 1, kPingpongBarrier = 3;  // each + group: one barrier per warpgroup

  using Base::Base;

  // One block of queries.
  __device__ __forceinline__ void step(int first_query, [[maybe_unused]] int head, unsigned key_stage, unsigned v_stage,
                                       bool first_of_tile, bool last_of_tile) {
    const unsigned stage = stage_of(it), last_keys = first_of_tile && it != 0 ? key_stage ^ 1 : key_stage;
    // Loaded here, biases arrive while this warpgroup waits for its turn and for the first product.
    [[maybe_unused]] uint32_t biases[Base::kBlock / 16][4];
    if constexpr (tile.biased()) Base::key_biases(first_query, head).load(biases, lane);
    device::named_barrier_wait(kPingpongBarrier + group, kPingpongThreads);
    device::mbarrier_wait(shared.full(stage), parity_of(it));
    Base::multiply_rows(s, shared.k(key_stage), shared.q(stage));
    Base::multiply_rows(dp, shared.v(v_stage), shared.dout(stage));
    if constexpr (tile.dropout && !Base::kMasksOneByOne) Base::dropout_masks(shared.statistics(stage));
    device::wgmma_wait<1>();  // s, and dk of the previous step
    device::hold(s);
    if (!first_of_tile) Base::arrive(shared.empty(stage ^ 1));
    if constexpr (tile.biased()) Base::key_biases(first_query, head).add(s, biases, t->shift, lane);
    const Statistics* statistics = reinterpret_cast<const Statistics*>(shared.statistics(stage)) + lane % 4;
    Base::mask(first_query, statistics);
    device::named_barrier_arrive(kPingpongBarrier + 1 - group, kPingpongThreads);
    Base::exponentials(statistics, shared.statistics(stage));
    Base::multiply_dv(stage);
    Base::multiply_dq(it - 1, last_keys);
    device::wgmma_wait<2>();  // dp
    device::hold(dp);
    if (last_of_tile) Base::arrive(shared.v_empty(v_stage));
    Base::score_gradients(statistics + Base::kBlock / 4);
    device::mbarrier_wait(shared.ds_empty(stage), parity_of(it + 1) ^ 1);  // step -1 has used its buffer as well
    Base::store_score_gradients(shared.ds(stage));
    device::fence_async_shared();
    __syncwarp(0xffffffffu);
    Base::arrive(shared.ds_full(stage));
    device::named_barrier_wait(kOwnBarrier + group, 128);
    Base::multiply_dk(stage, stage);
    device::wgmma_wait<1>();  // dv, and dq of the previous step
    device::hold(dq);
    Base::hold_probabilities();
    Base::stage_dq(it - 1);
    if (first_of_tile && it != 0) Base::arrive(shared.k_empty(last_keys));
    ++it;
  }

  __device__ __forceinline__ void run() {
    static_assert(tile.query_stages == kStages && tile.key_stages == 2);
    if (group == 1) device::named_barrier_arrive(kPingpongBarrier, kPingpongThreads);  // warpgroup 0 goes first
    for (;; ++tiles) {
      device::mbarrier_wait(shared.slot_full(tiles), tiles / kKeySlots & 1);
      t = shared.slot(tiles);
      // The shuffle tells the compiler that the value is the same in every lane.
      const int blocks = __shfl_sync(0xffffffffu, device::load(&t->blocks), 0);
      if (blocks < 0) break;
      Base::clear_gradients();
      const int last_block = __shfl_sync(0xffffffffu, device::load(&t->last_block), 0);
      Base::set_whole();
      const unsigned key_stage = stage_of(tiles), v_stage = stage_of<tile.value_stages>(tiles);
      device::mbarrier_wait(shared.k_full(key_stage), parity_of(tiles));
      device::mbarrier_wait(shared.v_full(v_stage), parity_of<tile.value_stages>(tiles));
      const int steps = blocks * p.heads_per_part;
      for (int j = 0, inner = 0, first_query = last_block * Base::kBlock; j < steps; ++j) {
        step(first_query, inner, key_stage, v_stage, j == 0, j == steps - 1);
        Base::next_query(first_query, inner, blocks);
      }
      device::wgmma_wait<0>();
      device::hold(dk);
      device::hold(dv);
      Base::arrive(shared.empty(stage_of(it - 1)));
      Base::store_gradients();
      __syncwarp(0xffffffffu);  // all lanes have read the tile
      Base::arrive(shared.slot_empty(tiles));
    }
    if (it == 0) return;
    Base::multiply_dq(it - 1, stage_of(tiles - 1));
    device::wgmma_wait<0>();
    device::hold(dq);
    Base::stage_dq(it - 1);
  }
};

}  // namespace warpsmith::attention
