#pragma once
#include "kernels/attention/backward_sm90_consumer.cuh"

// The backward's steps with the scores of the next step multiplied during this one, also from tile to tile: no step
// waits for its scores, and the tensor cores have products at hand all the time. The operand of dk stays in registers,
// so that only the other warpgroup waits for dS in shared memory.
namespace warpsmith::attention {

template <class T, BackwardTile tile> struct BackwardAhead : BackwardConsumer<T, tile> {
  using Base = BackwardConsumer<T, tile>;
  using Base::p, Base::shared, Base::group, Base::lane, Base::it, Base::tiles, Base::t;
  using Base::s, Base::dp, Base::dk, Base::dv, Base::dq, Base::ds;
  using typename Base::Statistics;
  static constexpr int kQueries = tile.query_stages, kKeys = tile.key_stages;

  using Base::Base;

  // The tile after this one, when its keys and its first block of queries are there; null: there is none.
  __device__ __forceinline__ const KeyTile* next_tile() {
    device::mbarrier_wait(shared.slot_full(tiles), tiles / kKeySlots & 1);
    const KeyTile* next = shared.slot(tiles);
    const int blocks = __shfl_sync(0xffffffffu, device::load(&next->blocks), 0);
    if (blocks < 0) return nullptr;
    device::mbarrier_wait(shared.k_full(stage_of<kKeys>(tiles)), parity_of<kKeys>(tiles));
    return next;
  }
  __device__ __forceinline__ void wait_for_queries(unsigned step) {
    device::mbarrier_wait(shared.full(stage_of<kQueries>(step)), parity_of<kQueries>(step));
  }

  // One block of queries, whose scores are there. Returns the next tile after the last block of one.
  __device__ __forceinline__ const KeyTile* step(int first_query, bool first_of_tile, bool last_of_tile) {
    const unsigned stage = stage_of<kQueries>(it), ds_stage = stage_of(it);
    const unsigned key_stage = stage_of<kKeys>(tiles);
    const unsigned last_keys = first_of_tile && it != 0 ? stage_of<kKeys>(tiles - 1) : key_stage;
    const unsigned v_stage = stage_of<tile.value_stages>(tiles);
    if (first_of_tile) device::mbarrier_wait(shared.v_full(v_stage), parity_of<tile.value_stages>(tiles));
    Base::multiply_rows(dp, shared.v(v_stage), shared.dout(stage));
    if constexpr (tile.dropout) Base::dropout_masks(shared.statistics(stage));
    Base::mask(first_query);
    const Statistics* statistics = reinterpret_cast<const Statistics*>(shared.statistics(stage)) + lane % 4;
    Base::exponentials(statistics);
    Base::multiply_dv(stage);
    // The scores of the next step. After the last one of all tiles once more those of this one, for nobody: products in
    // one branch only would make ptxas serialise all of them.
    const KeyTile* next = nullptr;
    unsigned next_stage = stage_of<kQueries>(it + 1), next_keys = key_stage;
    if (last_of_tile) {
      ++tiles;
      next = next_tile();
      next_keys = next != nullptr ? stage_of<kKeys>(tiles) : key_stage;
      next_stage = next != nullptr ? next_stage : stage;
    }
    if (!last_of_tile || next != nullptr) wait_for_queries(it + 1);
    Base::multiply_rows(s, shared.k(next_keys), shared.q(next_stage));
    Base::multiply_dq(it - 1, last_keys);
    device::wgmma_wait<3>();  // dp, and dk of the step before
    device::hold(dp);
    device::hold(dk);
    hold_score_gradients();
    if (it != 0) Base::arrive(shared.empty(stage_of<kQueries>(it - 1)));
    if (last_of_tile) Base::arrive(shared.v_empty(v_stage));
    Base::score_gradients(statistics + kBlockQueries / 4);
    device::mbarrier_wait(shared.ds_empty(ds_stage), parity_of(it + 1) ^ 1);  // step -1 has used its buffer, too
    Base::store_score_gradients(shared.ds(ds_stage));
    device::fence_async_shared();
    __syncwarp(0xffffffffu);
    Base::arrive(shared.ds_full(ds_stage));
    const uint64_t q = Base::mn_major(shared.q(stage), kBlockQueries);
    device::wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i)
      device::wgmma<T, tile.head_dim, device::Major::mn>(dk, ds[i], device::advance(q, i * 16 * kRowBytes), true);
    device::wgmma_commit();
    device::wgmma_wait<1>();  // dv, s of the next step, dq of the step before
    device::hold(s);
    device::hold(dq);
    Base::hold_probabilities();
    Base::stage_dq(it - 1);
    if (first_of_tile && it != 0) Base::arrive(shared.k_empty(last_keys));
    ++it;
    return next;
  }
  __device__ __forceinline__ void hold_score_gradients() {
#pragma unroll
    for (auto& four : ds) device::hold(four);
  }

  __device__ __forceinline__ void run() {
    t = next_tile();
    if (t == nullptr) return;
    wait_for_queries(0);
    Base::multiply_rows(s, shared.k(0), shared.q(0));
    device::wgmma_wait<0>();
    device::hold(s);
    while (t != nullptr) {
      Base::clear_gradients();
      // The same in every lane, and known to be.
      const int blocks = __shfl_sync(0xffffffffu, device::load(&t->blocks), 0), steps = blocks * p.heads_per_part;
      int first_query = __shfl_sync(0xffffffffu, device::load(&t->last_block), 0) * kBlockQueries;
      Base::set_whole();
      const KeyTile* next = nullptr;
      for (int j = 0, inner = 0; j < steps; ++j) {
        next = step(first_query, j == 0, j == steps - 1);
        Base::next_query(first_query, inner, blocks);
      }
      device::wgmma_wait<0>();
      device::hold(dk);
      device::hold(dv);
      Base::store_gradients();
      __syncwarp(0xffffffffu);  // all lanes have read the tile
      Base::arrive(shared.slot_empty(tiles - 1));
      t = next;
    }
    Base::multiply_dq(it - 1, stage_of<kKeys>(tiles - 1));
    device::wgmma_wait<0>();
    device::hold(dq);
    Base::stage_dq(it - 1);
  }
};

}  // namespace warpsmith::attention
