#pragma once
#include <cstdint>
#include <type_traits>

#include "common/float8.h"
#include "common/half.h"
#include "device/platform.h"
#include "device/swizzle.h"
#ifdef WARPSMITH_SIM
#include "device/host_hooks_sm90.h"
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "device/wgmma_instruction.h"
#endif

// Asynchronous matrix multiply-accumulate by a warpgroup: four consecutive warps, the first a multiple of four,
// converged (sm_90a only). PTX ISA 9.7.15 "wgmma".
//   d[64 x N] (+)= a[64 x 16] * b[16 x N], 16-bit inputs, fp32 accumulation. Warp w of the group holds rows
//   16w..16w+15; its lane l holds d[j] = D[16w + l/4 + 8*((j>>1)&1)][8*(j>>2) + 2*(l%4) + (j&1)].
// Order of calls: wgmma_fence, wgmma..., wgmma_commit, wgmma_wait. Between issue and wait the accumulators and register
// operands must not be touched and operands in shared memory not overwritten.
namespace warpsmith::device {

namespace detail {
// The N whose instruction is written out for the device and has run on a card; the host refuses others too.
template <int N> constexpr bool kHasWgmmaFloat8 =
    N == 8 || N == 16 || N == 32 || N == 64 || N == 96 || N == 128 || N == 192 || N == 256;
template <int N> constexpr bool kHasWgmma = kHasWgmmaFloat8<N> || N == 80 || N == 144 || N == 160 || N == 176;
}  // namespace detail

enum class Major : int { k = 0, mn = 1 };  // which dimension of an operand in shared memory is contiguous

// Describes an operand tile in shared memory. `start` is aligned to the swizzle's period, then moved inside by
// advance().
//   K-major: rows (along M or N) of `span` bytes along K.
//     stride: bytes between groups of 8 rows
//     leading: not used; without swizzle the bytes between the two 16-byte halves along K
//     the next 16 elements of K are 32 bytes on
//   MN-major: rows (along K) of `span` bytes along M or N.
//     stride: bytes between groups of 8 rows along K
//     leading: bytes between panels of `span` bytes along M or N
//     without swizzle the two change places
__device__ __forceinline__ uint64_t wgmma_descriptor(Swizzle swizzle, const void* start, uint32_t leading_bytes,
                                                     uint32_t stride_bytes WARPSMITH_SITE) {
#ifdef WARPSMITH_SIM
  const uint32_t address = sim::shared_address(start, site);
  if (address >= 1u << 18)
    sim::fail("wgmma_descriptor: the operand is beyond the first 256 KiB of shared memory", site);
#else
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(start));
#endif
  const uint64_t mode = swizzle == Swizzle::bytes128  ? 1
                        : swizzle == Swizzle::bytes64 ? 2
                        : swizzle == Swizzle::bytes32 ? 3
                                                      : 0;
  return (address & 0x3ffff) >> 4 | static_cast<uint64_t>(leading_bytes >> 4) << 16 |
         static_cast<uint64_t>(stride_bytes >> 4) << 32 | mode << 62;
}

__device__ __forceinline__ uint64_t advance(uint64_t descriptor, uint32_t bytes) { return descriptor + (bytes >> 4); }

// Before the first wgmma of a group: orders it after ordinary accesses to its registers.
__device__ __forceinline__ void wgmma_fence(WARPSMITH_ONLY_SITE) {
#ifdef WARPSMITH_SIM
  sim::wgmma_fence(site);
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

// Both operands in shared memory. accumulate == false overwrites d.
template <class T, int N, Major AMajor = Major::k, Major BMajor = Major::k, int Registers>
__device__ __forceinline__ void wgmma(float (&d)[Registers], uint64_t a, uint64_t b, bool accumulate WARPSMITH_SITE) {
  static_assert(N == 2 * Registers, "a thread holds N / 2 accumulators");
  static_assert(std::is_same_v<T, float16> || std::is_same_v<T, bfloat16>, "8-bit floats: wgmma_float8()");
  static_assert(detail::kHasWgmma<N>, "add this N to device/wgmma_instruction.h");
#ifdef WARPSMITH_SIM
  sim::wgmma(
      {d, N, nullptr, a, b, AMajor == Major::mn, BMajor == Major::mn, accumulate, sim::kOperand<T>, sim::kOperand<T>},
      site);
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
  detail::Wgmma<T, T>::template run<N, static_cast<int>(AMajor), static_cast<int>(BMajor)>(d, a, b, accumulate);
#endif
}

// d = a * b: the first instruction of a sum. ptxas may use the registers of d for other values until here;
// wgmma(..., false) would keep them occupied.
template <class T, int N, Major AMajor = Major::k, Major BMajor = Major::k, int Registers>
__device__ __forceinline__ void wgmma_overwrite(float (&d)[Registers], uint64_t a, uint64_t b WARPSMITH_SITE) {
  static_assert(N == 2 * Registers, "a thread holds N / 2 accumulators");
  static_assert(std::is_same_v<T, float16> || std::is_same_v<T, bfloat16>, "8-bit floats: wgmma_float8()");
  static_assert(N == 32 || N == 64 || N == 128, "the overwriting form of this N has not run on a card");
#ifdef WARPSMITH_SIM
  sim::wgmma({d, N, nullptr, a, b, AMajor == Major::mn, BMajor == Major::mn, false, sim::kOperand<T>, sim::kOperand<T>},
             site);
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
  detail::Wgmma<T, T>::template overwrite<N, static_cast<int>(AMajor), static_cast<int>(BMajor)>(d, a, b);
#endif
}

// a in registers, as in mma_m16n8k16 for the 16 rows of each warp.
template <class T, int N, Major BMajor = Major::k, int Registers>
__device__ __forceinline__ void wgmma(float (&d)[Registers], const uint32_t (&a)[4], uint64_t b,
                                      bool accumulate WARPSMITH_SITE) {
  static_assert(N == 2 * Registers, "a thread holds N / 2 accumulators");
  static_assert(std::is_same_v<T, float16> || std::is_same_v<T, bfloat16>, "8-bit floats: wgmma_float8()");
  static_assert(detail::kHasWgmma<N>, "add this N to device/wgmma_instruction.h");
#ifdef WARPSMITH_SIM
  sim::wgmma({d, N, a, 0, b, false, BMajor == Major::mn, accumulate, sim::kOperand<T>, sim::kOperand<T>}, site);
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
  detail::Wgmma<T, T>::template run<N, static_cast<int>(BMajor)>(d, a, b, accumulate);
#endif
}

// d[64 x N] (+)= a[64 x 32] * b[32 x N] for 8-bit floats, fp32 accumulation; A and B may differ in type. Operands in
// shared memory are K-major: 32 elements are 32 bytes. The tensor cores add up with fewer bits than fp32 has (about 14
// on an H800: DeepSeek-V3 Technical Report, 3.5.2), so long sums move to ordinary registers from time to time.
template <class A, class B, int N, int Registers>
__device__ __forceinline__ void wgmma_float8(float (&d)[Registers], uint64_t a, uint64_t b,
                                             bool accumulate WARPSMITH_SITE) {
  static_assert(N == 2 * Registers, "a thread holds N / 2 accumulators");
  static_assert(detail::kHasWgmmaFloat8<N>, "8-bit floats of this N have not run on a card");
#ifdef WARPSMITH_SIM
  sim::wgmma({d, N, nullptr, a, b, false, false, accumulate, sim::kOperand<A>, sim::kOperand<B>}, site);
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
  detail::Wgmma<A, B>::template run<N>(d, a, b, accumulate);
#endif
}

// a in registers, for each warp its 16 rows: with g = lane / 4 and t = lane % 4, four elements share a register, the
// first in the lowest byte.
//   a[0]: row g, columns 4t to 4t+3    a[1]: row g+8    a[2]: columns 4t+16 to 4t+19    a[3]: row g+8 and these columns
template <class A, class B, int N, int Registers>
__device__ __forceinline__ void wgmma_float8(float (&d)[Registers], const uint32_t (&a)[4], uint64_t b,
                                             bool accumulate WARPSMITH_SITE) {
  static_assert(N == 2 * Registers, "a thread holds N / 2 accumulators");
  static_assert(detail::kHasWgmmaFloat8<N>, "8-bit floats of this N have not run on a card");
#ifdef WARPSMITH_SIM
  sim::wgmma({d, N, a, 0, b, false, false, accumulate, sim::kOperand<A>, sim::kOperand<B>}, site);
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
  detail::Wgmma<A, B>::template run<N>(d, a, b, accumulate);
#endif
}

// Closes the group of wgmmas since the last commit.
__device__ __forceinline__ void wgmma_commit(WARPSMITH_ONLY_SITE) {
#ifdef WARPSMITH_SIM
  sim::wgmma_commit(site);
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Waits until at most `GroupsInFlight` of the latest groups are incomplete. Follow with hold() on what the finished
// ones wrote.
template <int GroupsInFlight> __device__ __forceinline__ void wgmma_wait(WARPSMITH_ONLY_SITE) {
#ifdef WARPSMITH_SIM
  sim::wgmma_wait(GroupsInFlight, site);
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GroupsInFlight) : "memory");
#endif
}

// Keeps arithmetic on these registers behind the wait. Without it the compiler may move that arithmetic up, since it
// takes an asynchronous result as ready when the instruction is issued.
template <class T, int N> __device__ __forceinline__ void hold([[maybe_unused]] T (&r)[N]) {
#ifndef WARPSMITH_SIM
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if constexpr (std::is_same_v<T, float>)
      asm volatile("" : "+f"(r[i])::"memory");
    else
      asm volatile("" : "+r"(r[i])::"memory");
  }
#endif
}

// Called before a wait: keeps the computation of `x` (>= 0) in front of the wait. hold() binds the compiler's front end
// alone; ptxas may still move a wait above arithmetic that does not depend on the products in flight, and that
// arithmetic would then no longer overlap with them. `shared` is never written. Costs two instructions.
__device__ __forceinline__ void keep_before_wait([[maybe_unused]] float x, [[maybe_unused]] float* shared) {
#ifndef WARPSMITH_SIM
  asm volatile("{.reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p st.shared.f32 [%1], %0;}" ::"f"(x),
               "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared)))
               : "memory");
#endif
}

}  // namespace warpsmith::device
