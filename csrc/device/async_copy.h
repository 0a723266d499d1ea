#pragma once
#include <cstdint>

#include "device/platform.h"
#include "device/vector.h"

// Asynchronous copies from global to shared memory by single threads (sm_80 and newer). PTX ISA 9.7.9.25.3 "cp.async".
// A thread's copies are complete, for that thread, after copy_async_wait(); other threads see them after a barrier that
// follows the wait. Until then the destination must be neither read nor written, and the source not written.
namespace warpsmith::device {

// Any thread. Copies `Bytes` (4, 8 or 16; both addresses aligned to it); with valid == false writes zeros and reads
// nothing. Copies of 16 bytes may be `streaming`: what they bring to the second-level cache is evicted first. PTX ISA
// 9.7.9.19 "createpolicy".
template <int Bytes, Cache cache = Cache::keep>
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool valid = true WARPSMITH_SITE) {
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "cp.async moves 4, 8 or 16 bytes");
  static_assert(cache == Cache::keep || Bytes == 16);
#ifdef WARPSMITH_SIM
  sim::copy_async(shared, global, Bytes, valid ? Bytes : 0, site);
#else
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int read_bytes = valid ? Bytes : 0;
  if constexpr (cache == Cache::streaming) {
    uint64_t policy;  // not volatile: made once for all copies
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(global),
                 "r"(read_bytes), "l"(policy)
                 : "memory");
  } else if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(read_bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to), "l"(global), "r"(read_bytes), "n"(Bytes)
                 : "memory");
  }
#endif
}

// Closes the group of this thread's copies since the last commit (which may be empty).
__device__ __forceinline__ void copy_async_commit() {
#ifdef WARPSMITH_SIM
  sim::copy_async_commit();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most `GroupsInFlight` of this thread's latest groups are incomplete.
template <int GroupsInFlight> __device__ __forceinline__ void copy_async_wait(WARPSMITH_ONLY_SITE) {
#ifdef WARPSMITH_SIM
  sim::copy_async_wait(GroupsInFlight, site);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(GroupsInFlight) : "memory");
#endif
}

}  // namespace warpsmith::device
