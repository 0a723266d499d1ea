#pragma once
#include "device/programmatic_launch.h"
#include "device/register_budget.h"
#include "kernels/attention/hopper/backward_sm90_pingpong.cuh"

// The backward of attention on Hopper: dq, dk and dv in one pass over tiles of 128 keys, with the same bits on every
// run.
//
// Reads k and v once. Reads q, dout and 8 bytes of statistics per row once for each tile of keys that sees the row.
// Writes dk and dv once. Adds 4 bytes per element of dq for each tile that sees its row. Accumulates in float;
// probabilities and dS are rounded to T before they are multiplied. Masked rows and keys are multiplied by 0, so a
// non-finite element of a visited block spoils the sums even if it is masked.
//
// One block per multiprocessor. A step is one block of 64 or 128 queries; steps go downwards.
//   warpgroup 0: the loader (one thread) claims tiles, and copies k (two buffers), v, and a ring of q and dout.
//                Three threads of other warps add dq to global memory, in the order of the tiles (backward_order.cuh).
//   warpgroups 1 and 2, the consumers: 64 keys each. Scores are transposed: probabilities are register operands.
//                s = k q^T and dp = v dout^T | p | dv += p dout | dS to shared memory | dk += dS q.
//                Each also multiplies half of dq = dS^T k, one step late: by then the other's dS has arrived.
namespace warpsmith::attention {

// I: an entry of kBackwardTiles.
template <class T, class I> __global__ void __launch_bounds__(I::value.threads(), 1)
    backward_sm90(const __grid_constant__ BackwardMaps maps, const __grid_constant__ BackwardParams p) {
  constexpr BackwardTile tile = I::value;
  WARPSMITH_DYNAMIC_SHARED(memory);
  const BackwardShared<tile> shared{memory};
  if (threadIdx.x == 0) shared.initialise();
  shared.clear_step_before_first();
  __syncthreads();
  device::wait_for_previous_kernel();
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);
  if (warpgroup == 0) {
    device::decrease_registers<tile.producer_registers()>();
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
    if (threadIdx.x % 32 != 0) return;
    if (warp == 0)
      load_steps<tile>(p, maps, shared);
    else if (warp <= kAdders)
      add_dq<tile>(p, shared, warp - 1);
  } else {
    device::increase_registers<tile.consumer_registers()>();
    BackwardPingpong<T, tile>(p, shared, warpgroup - 1).run();
  }
}

}  // namespace warpsmith::attention
