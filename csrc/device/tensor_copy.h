#pragma once
#include "device/bulk_copy.h"
#include "device/tensor_map_type.h"

// Asynchronous copies of boxes of a tensor of up to five dimensions (TMA, sm_90 and newer), issued by one thread. The
// tensor map (device/tensor_map.h) fixes tensor, box and swizzle and is a __grid_constant__ kernel parameter.
// Coordinates are of the box's first element, innermost dimension first, and may lie outside the tensor; the innermost
// is a multiple of 16 bytes (an H200 ends the kernel with "illegal instruction" otherwise, 2026-11-20). The buffer in
// shared memory is aligned to swizzle_alignment_bytes. PTX ISA 9.7.9.27 "cp.async.bulk.tensor",
// "cp.reduce.async.bulk.tensor".
namespace warpsmith::device {

// Optional hint, before the first use of a map.
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
#ifdef WARPSMITH_SIM
  (void)map;
#elif __CUDA_ARCH__ >= 900
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
#endif
}

// Global to shared. The whole box counts on `barrier`; elements outside the tensor arrive as zero.
template <int Rank> __device__ __forceinline__ void tensor_load(void* shared, const TensorMap* map, Mbarrier* barrier,
                                                                const int (&c)[Rank] WARPSMITH_SITE) {
#ifdef WARPSMITH_SIM
  sim::tensor_load(shared, map, c, Rank, barrier, 0, site);
#elif __CUDA_ARCH__ >= 900
  const uint32_t to = detail::shared_address(shared), bar = detail::shared_address(barrier);
#define WARPSMITH_LOAD(rank, coordinates, ...)                                                                        \
  asm volatile("cp.async.bulk.tensor." rank                                                                           \
               ".shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {" coordinates "}], [%2];" ::"r"(to), \
               "l"(map), "r"(bar), __VA_ARGS__                                                                        \
               : "memory")
  if constexpr (Rank == 1)
    WARPSMITH_LOAD("1d", "%3", "r"(c[0]));
  else if constexpr (Rank == 2)
    WARPSMITH_LOAD("2d", "%3,%4", "r"(c[0]), "r"(c[1]));
  else if constexpr (Rank == 3)
    WARPSMITH_LOAD("3d", "%3,%4,%5", "r"(c[0]), "r"(c[1]), "r"(c[2]));
  else if constexpr (Rank == 4)
    WARPSMITH_LOAD("4d", "%3,%4,%5,%6", "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
  else if constexpr (Rank == 5)
    WARPSMITH_LOAD("5d", "%3,%4,%5,%6,%7", "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]), "r"(c[4]));
#undef WARPSMITH_LOAD
#endif
}

// A hint: brings a box to the second-level cache.
__device__ __forceinline__ void tensor_prefetch(const TensorMap* map, const int (&c)[2] WARPSMITH_SITE) {
#ifdef WARPSMITH_SIM
  sim::tensor_prefetch(map, c, 2, site);
#elif __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1,%2}];" ::"l"(map), "r"(c[0]), "r"(c[1])
               : "memory");
#endif
}

// The same into every block of the cluster whose bit is set in `blocks`: same offset, and counted on the barrier at the
// same offset there. Every receiving block expects the bytes on its own barrier.
template <int Rank> __device__ __forceinline__ void tensor_load_multicast(void* shared, const TensorMap* map,
                                                                          Mbarrier* barrier, uint16_t blocks,
                                                                          const int (&c)[Rank] WARPSMITH_SITE) {
#ifdef WARPSMITH_SIM
  sim::tensor_load(shared, map, c, Rank, barrier, blocks, site);
#elif __CUDA_ARCH__ >= 900
  const uint32_t to = detail::shared_address(shared), bar = detail::shared_address(barrier);
#define WARPSMITH_LOAD(rank, coordinates, ...)                                                                    \
  asm volatile("cp.async.bulk.tensor." rank                                                                       \
               ".shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {" coordinates \
               "}], "                                                                                             \
               "[%2], %3;" ::"r"(to),                                                                             \
               "l"(map), "r"(bar), "h"(blocks), __VA_ARGS__                                                       \
               : "memory")
  if constexpr (Rank == 1)
    WARPSMITH_LOAD("1d", "%4", "r"(c[0]));
  else if constexpr (Rank == 2)
    WARPSMITH_LOAD("2d", "%4,%5", "r"(c[0]), "r"(c[1]));
  else if constexpr (Rank == 3)
    WARPSMITH_LOAD("3d", "%4,%5,%6", "r"(c[0]), "r"(c[1]), "r"(c[2]));
  else if constexpr (Rank == 4)
    WARPSMITH_LOAD("4d", "%4,%5,%6,%7", "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
  else if constexpr (Rank == 5)
    WARPSMITH_LOAD("5d", "%4,%5,%6,%7,%8", "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]), "r"(c[4]));
#undef WARPSMITH_LOAD
#endif
}

// Shared to global; elements beyond the tensor's end are not written, negative coordinates are refused (an H200 ends
// the kernel with "illegal instruction", though loads may begin before the tensor). Source, commit and waits as for
// bulk_store().
template <int Rank> __device__ __forceinline__ void tensor_store(const TensorMap* map, const void* shared,
                                                                 const int (&c)[Rank] WARPSMITH_SITE) {
#ifdef WARPSMITH_SIM
  sim::tensor_store(map, c, Rank, shared, false, site);
#elif __CUDA_ARCH__ >= 900
  const uint32_t from = detail::shared_address(shared);
#define WARPSMITH_STORE(rank, coordinates, ...)                                                 \
  asm volatile("cp.async.bulk.tensor." rank ".global.shared::cta.bulk_group [%0, {" coordinates \
               "}], [%1];" ::"l"(map),                                                          \
               "r"(from), __VA_ARGS__                                                           \
               : "memory")
  if constexpr (Rank == 1)
    WARPSMITH_STORE("1d", "%2", "r"(c[0]));
  else if constexpr (Rank == 2)
    WARPSMITH_STORE("2d", "%2,%3", "r"(c[0]), "r"(c[1]));
  else if constexpr (Rank == 3)
    WARPSMITH_STORE("3d", "%2,%3,%4", "r"(c[0]), "r"(c[1]), "r"(c[2]));
  else if constexpr (Rank == 4)
    WARPSMITH_STORE("4d", "%2,%3,%4,%5", "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
  else if constexpr (Rank == 5)
    WARPSMITH_STORE("5d", "%2,%3,%4,%5,%6", "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]), "r"(c[4]));
#undef WARPSMITH_STORE
#endif
}

// Adds to global memory in the map's dtype. Each addition is atomic; the order of several is free (see bulk_add()).
template <int Rank> __device__ __forceinline__ void tensor_add(const TensorMap* map, const void* shared,
                                                               const int (&c)[Rank] WARPSMITH_SITE) {
#ifdef WARPSMITH_SIM
  sim::tensor_store(map, c, Rank, shared, true, site);
#elif __CUDA_ARCH__ >= 900
  const uint32_t from = detail::shared_address(shared);
#define WARPSMITH_ADD(rank, coordinates, ...)                                                              \
  asm volatile("cp.reduce.async.bulk.tensor." rank ".global.shared::cta.add.bulk_group [%0, {" coordinates \
               "}], [%1];" ::"l"(map),                                                                     \
               "r"(from), __VA_ARGS__                                                                      \
               : "memory")
  if constexpr (Rank == 1)
    WARPSMITH_ADD("1d", "%2", "r"(c[0]));
  else if constexpr (Rank == 2)
    WARPSMITH_ADD("2d", "%2,%3", "r"(c[0]), "r"(c[1]));
  else if constexpr (Rank == 3)
    WARPSMITH_ADD("3d", "%2,%3,%4", "r"(c[0]), "r"(c[1]), "r"(c[2]));
  else if constexpr (Rank == 4)
    WARPSMITH_ADD("4d", "%2,%3,%4,%5", "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
  else if constexpr (Rank == 5)
    WARPSMITH_ADD("5d", "%2,%3,%4,%5,%6", "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]), "r"(c[4]));
#undef WARPSMITH_ADD
#endif
}

}  // namespace warpsmith::device
