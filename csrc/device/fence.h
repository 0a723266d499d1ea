#pragma once
#include <cstdint>

#include "device/platform.h"
#ifdef WARPSMITH_SIM
#include "device/host_hooks_sm90.h"
#endif

// Ordering between ordinary accesses and the asynchronous proxy (bulk copies, wgmma operands), and between blocks.
namespace warpsmith::device {

// Orders a thread's ordinary stores to shared memory before later accesses by wgmma and bulk copies. Every thread that
// stored calls it, then the block meets at a barrier, then wgmma or the copy may start. Ordinary loads need only the
// barrier. PTX ISA 9.7.13.5 "fence.proxy.async".
__device__ __forceinline__ void fence_async_shared() {
#ifdef WARPSMITH_SIM
  sim::proxy_fence();
#elif __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// The same for every state space. Needed for global memory too: before a flag that tells another block's bulk copies
// that this block's bulk copies are done.
__device__ __forceinline__ void fence_async() {
#ifdef WARPSMITH_SIM
  sim::proxy_fence();
#elif __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

// A flag in global memory between blocks of one launch. Writes before store_release are visible to a thread that has
// read the new value by load_acquire. A block may wait only for a block that is running or has run: launch
// cooperatively, or hand out work in an order in which the awaited block has started before. PTX ISA 9.7.9.8
// "ld.acquire", 9.7.9.11 "st.release".
__device__ __forceinline__ int load_acquire(const int* p) {
#ifdef WARPSMITH_SIM
  const int v = __atomic_load_n(p, __ATOMIC_RELAXED);
  sim::acquire_access(p);
  sim::spin_pause();
  return v;
#else
  int v;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
#endif
}

__device__ __forceinline__ void store_release(int* p, int v WARPSMITH_SITE) {
#ifdef WARPSMITH_SIM
  sim::on_atomic(p, sizeof(int), site);
  sim::release_access(p);
  __atomic_store_n(p, v, __ATOMIC_RELAXED);
#else
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
#endif
}

}  // namespace warpsmith::device
