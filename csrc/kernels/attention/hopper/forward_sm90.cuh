#pragma once
#include "device/register_budget.h"
#include "kernels/attention/hopper/forward_sm90_consumer.cuh"

// The forward of attention on Hopper: TMA, wgmma, specialised warpgroups, persistent blocks.
//
// Reads q once, and k and v once for each tile of query rows. Writes out and lse once. Scores, sums and out accumulate
// in float; probabilities are rounded to T before they are multiplied by the values. A masked key multiplies its value
// by 0, so a non-finite value spoils the rows of its tile even if it is masked.
//
// One block per multiprocessor:
//   warpgroup 0: the loader (one thread) publishes tiles in a ring of slots, and copies queries and blocks of keys and
//                values into rings of buffers. For each consumer, a storing warp copies out to global memory.
//   warpgroups 1 and up, the consumers: 64 query rows each. A step multiplies the queries by a block of keys, while the
//                previous block's probabilities are multiplied by its values. The exponentials of the first product
//                overlap with the second product. The last product of a tile overlaps with the first of the next tile.
//                Finished rows are staged in the shared memory of the tile's queries.
namespace warpsmith::attention {

// I: an entry of kForwardTiles.
template <class T, class I> __global__ void __launch_bounds__(I::value.threads(), 1)
    forward_sm90(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                 const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap out,
                 const __grid_constant__ TensorMap bias, const __grid_constant__ ForwardParams p) {
  constexpr ForwardTile tile = I::value;
  constexpr int kConsumerWarps = 4 * tile.groups;
  WARPSMITH_DYNAMIC_SHARED(memory);
  WARPSMITH_SHARED(ForwardState<tile>, state, 1);
  const ForwardShared<tile> shared(memory, state);
  if (threadIdx.x == 0) {
    for (int i = 0; i < tile.groups * tile.query_stages; ++i) {
      device::mbarrier_init(shared.query_full + i, 1);
      device::mbarrier_init(shared.query_empty + i, 1);
    }
    for (int i = 0; i < tile.block_stages; ++i) {
      device::mbarrier_init(shared.block_full + i, 1);
      device::mbarrier_init(shared.block_empty + i, kConsumerWarps);
    }
    for (int i = 0; i < kTileSlots; ++i) {
      device::mbarrier_init(shared.slot_full + i, 1);
      device::mbarrier_init(shared.slot_empty + i, kConsumerWarps + tile.groups + tile.stages_biases());
    }
    for (int i = 0; tile.stages_biases() && i < tile.groups; ++i) {
      device::mbarrier_init(shared.bias_full + i, 1);
      device::mbarrier_init(shared.bias_empty + i, 4);
    }
    device::mbarrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);
  if (warpgroup == 0) {
    device::decrease_registers<tile.producer_registers()>();
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
    if (p.schedule.counter != nullptr) device::wait_for_previous_kernel();  // prepare_schedule
    if (warp == 0) {
      if (threadIdx.x == 0) load_tiles<tile>(p, &q, &k, &v, shared);
    } else if (warp <= tile.groups) {
      store_tiles<tile>(p, &out, shared, warp - 1);
    } else if constexpr (tile.stages_biases()) {
      if (threadIdx.x % 32 == 0) load_biases<tile>(p, &bias, shared);
    }
  } else {
    device::increase_registers<tile.consumer_registers()>();
    ForwardConsumer<T, tile>(p, shared, warpgroup - 1).run();
    if (p.schedule.counter != nullptr) device::wait_for_previous_kernel();
  }
}

}  // namespace warpsmith::attention
