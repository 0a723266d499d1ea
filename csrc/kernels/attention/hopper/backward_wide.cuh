#pragma once
#include "device/register_budget.h"
#include "kernels/attention/hopper/backward_wide_keys.cuh"
#include "kernels/attention/hopper/backward_wide_queries.cuh"

// The backward of attention on Hopper for head dimensions above 128, up to 256: two kernels, the same bits on every
// run.
//
//   backward_sm90_wide_keys     dk and dv of 64 keys: loops over the queries that see them, 64 a step, with 4 products
//   backward_sm90_wide_queries  dq of 128 queries: loops over the keys that they see, 64 a step, with 3 products
//
// One kernel for all three gradients would need 5 products instead of 7, but 64 x 256 of dk and of dv already fill the
// registers of two warpgroups, and dq would be added to global memory in a fixed order once for every 64 keys. Here
// every sum stays in the registers of one warpgroup, so nothing is added in global memory and no block waits for
// another. docs/design/attention.md has the budget.
//
// Both read 8 bytes of statistics for each query row (backward_statistics). Sums accumulate in float. dS is rounded to
// T before it is multiplied, and so are the probabilities of dv. dk computes dS from the rounded probabilities, dq from
// the unrounded ones. Masked rows and keys are multiplied by 0, so a non-finite element in their blocks makes the sums
// NaN.
//
// A block of threads has one tile. One thread of warpgroup 0 loads; warpgroups 1 and 2 multiply.
namespace warpsmith::attention {

template <class T> __global__ void __launch_bounds__(kWideThreads, 1)
    backward_sm90_wide_keys(const __grid_constant__ WideMaps maps, const __grid_constant__ WideParams p) {
  WARPSMITH_DYNAMIC_SHARED(memory);
  const WideKeysShared shared{memory};
  if (threadIdx.x == 0) {
    shared.initialise();
    describe_wide_keys(p, shared.tile());
  }
  __syncthreads();
  const WideTile* t = shared.tile();
  if (device::load(&t->batch) < 0) return;
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);
  if (warpgroup == 0) {
    device::decrease_registers<kWideProducerRegisters>();
    if (threadIdx.x == 0) load_wide_keys(p, maps, shared);
  } else {
    device::increase_registers<kWideConsumerRegisters>();
    if (warpgroup == 1)
      WideValueGradient<T>(p, shared).run();
    else
      WideKeyGradient<T>(p, shared).run();
  }
}

template <class T> __global__ void __launch_bounds__(kWideThreads, 1)
    backward_sm90_wide_queries(const __grid_constant__ WideMaps maps, const __grid_constant__ WideParams p) {
  WARPSMITH_DYNAMIC_SHARED(memory);
  const WideQueriesShared shared{memory};
  if (threadIdx.x == 0) {
    shared.initialise();
    describe_wide_queries(p, shared.tile());
  }
  __syncthreads();
  const WideTile* t = shared.tile();
  if (device::load(&t->batch) < 0) return;
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);
  if (warpgroup == 0) {
    device::decrease_registers<kWideProducerRegisters>();
    if (threadIdx.x == 0) load_wide_queries(p, maps, shared);
  } else {
    device::increase_registers<kWideConsumerRegisters>();
    WideQueryGradient<T>(p, shared, warpgroup - 1).run();
  }
}

}  // namespace warpsmith::attention
