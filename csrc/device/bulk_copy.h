#pragma once
#include "device/mbarrier.h"

// Linear asynchronous copies by the copy engine (sm_90 and newer), issued by one thread. Both addresses and the size
// are multiples of 16 bytes. PTX ISA 9.7.9.25.5 "cp.async.bulk", "cp.reduce.async.bulk".
namespace warpsmith::device {

// Global to shared. Completion is counted in bytes on `barrier`: wait for its phase before reading.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, int bytes,
                                          Mbarrier* barrier WARPSMITH_SITE) {
#ifdef WARPSMITH_SIM
  sim::bulk_load(shared, global, bytes, barrier, site);
#elif __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   detail::shared_address(shared)),
               "l"(global), "r"(bytes), "r"(detail::shared_address(barrier))
               : "memory");
#endif
}

// Shared to global. The source was written behind fence_async_shared(); it may be overwritten after bulk_wait_read().
__device__ __forceinline__ void bulk_store(void* global, const void* shared, int bytes WARPSMITH_SITE) {
#ifdef WARPSMITH_SIM
  sim::bulk_store(global, shared, bytes, sim::BulkKind::plain, site);
#elif __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(detail::shared_address(shared)), "r"(bytes)
               : "memory");
#endif
}

// Adds fp32 values to global memory. Each addition is atomic; the order of several is free, so results are reproducible
// only if no two copies in flight add to one element.
__device__ __forceinline__ void bulk_add(float* global, const float* shared, int bytes WARPSMITH_SITE) {
#ifdef WARPSMITH_SIM
  sim::bulk_store(global, shared, bytes, sim::BulkKind::add_f32, site);
#elif __CUDA_ARCH__ >= 900
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
               "r"(detail::shared_address(shared)), "r"(bytes)
               : "memory");
#endif
}

// Closes the group of this thread's stores (plain, adding and of tensors) since the last commit.
__device__ __forceinline__ void bulk_commit() {
#ifdef WARPSMITH_SIM
  sim::bulk_commit();
#elif __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

// Waits until at most `GroupsInFlight` of this thread's latest groups still read their source. Before a block exits,
// its stores must at least have been read.
template <int GroupsInFlight> __device__ __forceinline__ void bulk_wait_read(WARPSMITH_ONLY_SITE) {
#ifdef WARPSMITH_SIM
  sim::bulk_wait(GroupsInFlight, true, site);
#elif __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(GroupsInFlight) : "memory");
#endif
}

// The same until they are complete: written, and visible to this thread.
template <int GroupsInFlight> __device__ __forceinline__ void bulk_wait(WARPSMITH_ONLY_SITE) {
#ifdef WARPSMITH_SIM
  sim::bulk_wait(GroupsInFlight, false, site);
#elif __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(GroupsInFlight) : "memory");
#endif
}

}  // namespace warpsmith::device
