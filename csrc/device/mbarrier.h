#pragma once
#include <cstdint>

#include "device/platform.h"
#ifdef WARPSMITH_SIM
#include "device/host_hooks_sm90.h"
#endif

// Barriers in shared memory that also count the bytes of bulk copies (sm_90 and newer). A phase completes when all
// arrivals and all expected bytes are in; then the next begins, with the parity flipped. PTX ISA 9.7.13.15 "mbarrier".
namespace warpsmith::device {

struct alignas(8) Mbarrier {
  uint64_t state;
};

#ifndef WARPSMITH_SIM
namespace detail {
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
}  // namespace detail
#endif

// One thread, once, before any use; `arrivals` >= 1 complete a phase.
__device__ __forceinline__ void mbarrier_init(Mbarrier* b, int arrivals WARPSMITH_SITE) {
#ifdef WARPSMITH_SIM
  sim::mbarrier_init(b, arrivals, site);
#else
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(detail::shared_address(b)), "r"(arrivals) : "memory");
#endif
}

// By the initialising thread after all mbarrier_init, before the block or cluster barrier that publishes them.
__device__ __forceinline__ void mbarrier_init_fence() {
#ifdef WARPSMITH_SIM
  sim::mbarrier_init_fence();
#elif __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// One arrival; releases what this thread did before.
__device__ __forceinline__ void mbarrier_arrive(Mbarrier* b WARPSMITH_SITE) {
#ifdef WARPSMITH_SIM
  sim::mbarrier_arrive(b, 1, 0, site);
#else
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(detail::shared_address(b)) : "memory");
#endif
}

// One arrival that also announces `bytes` of bulk copies for the current phase. Before those copies are issued.
__device__ __forceinline__ void mbarrier_arrive_expect(Mbarrier* b, int bytes WARPSMITH_SITE) {
#ifdef WARPSMITH_SIM
  sim::mbarrier_arrive_expect(b, bytes, site);
#elif __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(detail::shared_address(b)), "r"(bytes)
               : "memory");
#endif
}

// One arrival on the same barrier of another block of the cluster. `remote` comes from cluster_shared().
__device__ __forceinline__ void mbarrier_arrive_remote(Mbarrier* remote WARPSMITH_SITE) {
#ifdef WARPSMITH_SIM
  sim::mbarrier_arrive_remote(remote, site);
#elif __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(remote)))
               : "memory");
#endif
}

// mbarrier_arrive() by the threads with `on`, without a branch: ptxas takes a loop that ends with `if (lane == 0)
// arrive` as divergent.
__device__ __forceinline__ void mbarrier_arrive_if(bool on, Mbarrier* b WARPSMITH_SITE) {
#ifdef WARPSMITH_SIM
  if (on) sim::mbarrier_arrive(b, 1, 0, site);
#else
  asm volatile("{.reg .pred p; setp.ne.b32 p, %1, 0; @p mbarrier.arrive.shared::cta.b64 _, [%0];}" ::"r"(
                   detail::shared_address(b)),
               "r"(static_cast<int>(on))
               : "memory");
#endif
}

// mbarrier_arrive_remote() likewise, on the barrier at this one's place in block `rank` of the cluster. Orders nothing
// between blocks: it says only that asynchronous reads of a buffer (wgmma, waited for) are over.
// mbarrier_arrive_remote() orders ordinary accesses, by a fence of the whole device that takes 1,500 cycles.
__device__ __forceinline__ void mbarrier_arrive_cluster_if(bool on, Mbarrier* b, unsigned rank WARPSMITH_SITE) {
#ifdef WARPSMITH_SIM
  if (on) sim::mbarrier_arrive_remote(sim::cluster_shared(b, rank, site), site);
#elif __CUDA_ARCH__ >= 900
  asm volatile(
      "{.reg .pred p; .reg .b32 r; setp.ne.b32 p, %2, 0; mapa.shared::cluster.u32 r, %0, %1; "
      "@p mbarrier.arrive.shared::cluster.b64 _, [r];}" ::"r"(detail::shared_address(b)),
      "r"(rank), "r"(static_cast<int>(on))
      : "memory");
#endif
}

// Has the phase of this parity completed? Acquires if so. A fresh barrier counts as "parity 1 completed".
__device__ __forceinline__ bool mbarrier_test(Mbarrier* b, unsigned parity WARPSMITH_SITE) {
#ifdef WARPSMITH_SIM
  return sim::mbarrier_test(b, parity, site);
#elif __CUDA_ARCH__ >= 900
  uint32_t done;
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(done)
               : "r"(detail::shared_address(b)), "r"(parity)
               : "memory");
  return done;
#else
  return false;
#endif
}

// Waits for the phase of this parity: acquires what the arrivals released, and the data of its bulk copies.
__device__ __forceinline__ void mbarrier_wait(Mbarrier* b, unsigned parity WARPSMITH_SITE) {
#ifdef WARPSMITH_SIM
  sim::mbarrier_wait(b, parity, site);
#else
  while (!mbarrier_test(b, parity)) {}
#endif
}

// Position in a ring of `Stages` buffers with one full and one empty mbarrier each. Consumers wait for "full" with
// `parity`, producers for "empty" with `parity ^ 1`, so that the first pass over the ring does not wait.
template <int Stages> struct Ring {
  int stage = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == Stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace warpsmith::device
