#pragma once
#include "device/platform.h"

// The block's 16 hardware barriers, for groups of whole warps. Barrier 0 is __syncthreads(): use 1 to 15. `threads` (a
// multiple of 32) counts every thread of the phase, those that wait and those that only arrive, and is the same for all
// of them. Memory: what a thread did before it arrived is visible to those that waited. PTX ISA 9.7.13.1 "bar".
namespace warpsmith::device {

__device__ __forceinline__ void named_barrier_wait(int id, int threads WARPSMITH_SITE) {
#ifdef WARPSMITH_SIM
  sim::named_barrier(id, threads, true, site);
#else
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads WARPSMITH_SITE) {
#ifdef WARPSMITH_SIM
  sim::named_barrier(id, threads, false, site);
#else
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}

}  // namespace warpsmith::device
