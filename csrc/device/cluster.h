#pragma once
#include <cstdint>

#include "device/mbarrier.h"
#include "device/platform.h"
#ifdef WARPSMITH_SIM
#include "device/host_hooks_sm90.h"
#endif

// Clusters of blocks (LaunchConfig::cluster, sm_90 and newer). Any thread may ask for rank and size. PTX ISA 10
// "%cluster_ctarank", 9.7.13.3 "barrier.cluster", 9.7.9.23 "mapa".
namespace warpsmith::device {

__device__ __forceinline__ unsigned cluster_rank() {
#ifdef WARPSMITH_SIM
  return sim::current_thread->block_view->cluster_rank;
#elif __CUDA_ARCH__ >= 900
  unsigned r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
#else
  return 0;
#endif
}

__device__ __forceinline__ unsigned cluster_size() {
#ifdef WARPSMITH_SIM
  return sim::current_thread->block_view->cluster_size;
#elif __CUDA_ARCH__ >= 900
  unsigned n;
  asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(n));
  return n;
#else
  return 1;
#endif
}

// A barrier of the cluster: every thread of every block arrives once, then waits once. Writes before the arrival are
// visible after the wait. A kernel that accesses another block's shared memory needs two such barriers: a first one
// after which the other block has started, and a last one before which it has not exited.
__device__ __forceinline__ void cluster_arrive(WARPSMITH_ONLY_SITE) {
#ifdef WARPSMITH_SIM
  sim::cluster_arrive(site);
#elif __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

// The arrival without the release: earlier writes need not be visible after the wait. Enough for the first barrier,
// which only says that a block has started, and cheaper: the release of cluster_arrive is a fence of the whole device.
__device__ __forceinline__ void cluster_arrive_relaxed(WARPSMITH_ONLY_SITE) {
#ifdef WARPSMITH_SIM
  sim::cluster_arrive(site);
#elif __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait(WARPSMITH_ONLY_SITE) {
#ifdef WARPSMITH_SIM
  sim::cluster_wait(site);
#elif __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_barrier(WARPSMITH_ONLY_SITE) {
  device::cluster_arrive(WARPSMITH_PASS_ONLY_SITE);
  device::cluster_wait(WARPSMITH_PASS_ONLY_SITE);
}

// The address of the same shared variable in the block with this rank (distributed shared memory). Ordinary loads and
// stores may use it.
template <class T> __device__ __forceinline__ T* cluster_shared(T* shared, unsigned rank WARPSMITH_SITE) {
#ifdef WARPSMITH_SIM
  return static_cast<T*>(sim::cluster_shared(shared, rank, site));
#elif __CUDA_ARCH__ >= 900
  uint64_t remote;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(remote) : "l"(reinterpret_cast<uint64_t>(shared)), "r"(rank));
  return reinterpret_cast<T*>(remote);
#else
  return shared;
#endif
}

// Stores 16 bytes in the shared memory of a block of the cluster, and counts them on an mbarrier of that block, as a
// bulk copy does. A thread that has waited for the mbarrier's phase sees the bytes; neither a fence nor a barrier of
// the cluster is needed. Both addresses come from cluster_shared(); `remote` is aligned to 16 bytes. PTX ISA
// 9.7.9.12 "st.async".
template <class V>
__device__ __forceinline__ void store_async(V* remote, const V& value, Mbarrier* remote_barrier WARPSMITH_SITE) {
  static_assert(sizeof(V) == 16);
#ifdef WARPSMITH_SIM
  sim::store_async(remote, &value, remote_barrier, site);
#elif __CUDA_ARCH__ >= 900
  union {
    V value;
    uint32_t word[4];
  } u{value};
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   detail::shared_address(remote)),
               "r"(u.word[0]), "r"(u.word[1]), "r"(u.word[2]), "r"(u.word[3]),
               "r"(detail::shared_address(remote_barrier))
               : "memory");
#endif
}

}  // namespace warpsmith::device
