#pragma once
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

// CUDA's built-in variables and functions, in their own names, for kernels that run on the host. Included by
// device/host_hooks.h only.

#define threadIdx (::warpsmith::sim::current_thread->index)
#define blockIdx (::warpsmith::sim::current_thread->block_view->index)
#define blockDim (::warpsmith::sim::current_thread->block_view->threads)
#define gridDim (::warpsmith::sim::current_thread->block_view->grid)

using std::isfinite;
using std::isinf;
using std::isnan;

// Barriers and warp operations. Masks are required, as everywhere in this project.
inline void __syncthreads(WARPSMITH_ONLY_SITE) { ::warpsmith::sim::block_barrier(site); }
inline int __syncthreads_or(int p WARPSMITH_SITE) { return ::warpsmith::sim::block_barrier_or(p != 0, site); }
inline void __syncwarp(unsigned mask WARPSMITH_SITE) { ::warpsmith::sim::warp_barrier(mask, site); }

template <class T> T __shfl_sync(unsigned mask, T value, int source, int width = 32 WARPSMITH_SITE) {
  const int lane = ::warpsmith::sim::current_thread->linear_index & 31;
  ::warpsmith::sim::warp_shuffle(mask, &value, sizeof(T), (lane & ~(width - 1)) | (source & (width - 1)), site);
  return value;
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32 WARPSMITH_SITE) {
  const int lane = ::warpsmith::sim::current_thread->linear_index & 31, source = lane ^ lane_mask;
  const bool outside =
      (source & ~(width - 1)) > (lane & ~(width - 1));  // PTX ISA "shfl": a later segment gives the own value
  ::warpsmith::sim::warp_shuffle(mask, &value, sizeof(T), outside ? -1 : source, site);
  return value;
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32 WARPSMITH_SITE) {
  const int lane = ::warpsmith::sim::current_thread->linear_index & 31, in_segment = lane & (width - 1);
  const bool outside = in_segment + static_cast<int>(delta) >= width;
  ::warpsmith::sim::warp_shuffle(mask, &value, sizeof(T), outside ? -1 : lane + static_cast<int>(delta), site);
  return value;
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32 WARPSMITH_SITE) {
  const int lane = ::warpsmith::sim::current_thread->linear_index & 31, in_segment = lane & (width - 1);
  const bool outside = in_segment < static_cast<int>(delta);
  ::warpsmith::sim::warp_shuffle(mask, &value, sizeof(T), outside ? -1 : lane - static_cast<int>(delta), site);
  return value;
}
inline unsigned __ballot_sync(unsigned mask, int p WARPSMITH_SITE) {
  return ::warpsmith::sim::warp_ballot(mask, p, site);
}
inline int __any_sync(unsigned mask, int p WARPSMITH_SITE) { return ::warpsmith::sim::warp_ballot(mask, p, site) != 0; }
inline int __all_sync(unsigned mask, int p WARPSMITH_SITE) {
  return ::warpsmith::sim::warp_ballot(mask, !p, site) == 0;
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned v WARPSMITH_SITE) {
  return ::warpsmith::sim::warp_reduce(mask, v, 0, site);
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned v WARPSMITH_SITE) {
  return ::warpsmith::sim::warp_reduce(mask, v, 1, site);
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned v WARPSMITH_SITE) {
  return ::warpsmith::sim::warp_reduce(mask, v, 2, site);
}

// Fences and atomics: relaxed, as on the device; ordering comes from fences and barriers.
inline void __threadfence(WARPSMITH_ONLY_SITE) { ::warpsmith::sim::memory_fence(site); }

namespace warpsmith::sim {
template <class T, class F> T atomic_update(T* p, F&& next, Site site) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "atomics exist for 4 and 8 bytes");
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  on_atomic(p, sizeof(T), site);
  Bits* word = reinterpret_cast<Bits*>(p);
  Bits old = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(word, &old, std::bit_cast<Bits>(static_cast<T>(next(std::bit_cast<T>(old)))),
                                      true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
  return std::bit_cast<T>(old);
}
}  // namespace warpsmith::sim

template <class T> T atomicAdd(T* p, std::type_identity_t<T> v WARPSMITH_SITE) {
  return ::warpsmith::sim::atomic_update(p, [&](T old) { return old + v; }, site);
}
template <class T> T atomicMax(T* p, std::type_identity_t<T> v WARPSMITH_SITE) {
  return ::warpsmith::sim::atomic_update(p, [&](T old) { return old < v ? v : old; }, site);
}
template <class T> T atomicExch(T* p, std::type_identity_t<T> v WARPSMITH_SITE) {
  return ::warpsmith::sim::atomic_update(p, [&](T) { return v; }, site);
}

// Bits.
inline float __uint_as_float(uint32_t u) { return std::bit_cast<float>(u); }
inline uint32_t __float_as_uint(float f) { return std::bit_cast<uint32_t>(f); }
// Bytes of x (0 to 3) and y (4 to 7), chosen by the hexadecimal digits of the selector. What a digit above 7 means,
// CUDA does not say.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector WARPSMITH_SITE) {
  if (selector & 0x8888u) ::warpsmith::sim::fail("__byte_perm: the digits of the selector are 0 to 7", site);
  const uint64_t bytes = uint64_t{y} << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(bytes >> (selector >> (4 * i) & 7) * 8 & 0xff) << (8 * i);
  return result;
}
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}

// Arithmetic. What the device approximates is approximate() here. Bounds: CUDA C++ Programming Guide, "Mathematical
// Functions"; of rsqrtf, which is one instruction, PTX ISA 9.7.3 "rsqrt".
namespace warpsmith::sim {
// The compiler must not contract a product that was rounded by name with a sum around it.
inline float rounded(float x) {
  asm("" : "+m"(x));
  return x;
}
}  // namespace warpsmith::sim

template <class T> constexpr T min(T a, std::type_identity_t<T> b) { return b < a ? b : a; }
template <class T> constexpr T max(T a, std::type_identity_t<T> b) { return a < b ? b : a; }
inline float rsqrtf(float x) {
  return ::warpsmith::sim::approximate(1.0 / std::sqrt(static_cast<double>(x)), x, 0x1.125p-23);  // 2^-22.9
}
inline float __fadd_rn(float a, float b) {
  return ::warpsmith::sim::rounded(::warpsmith::sim::rounded(a) + ::warpsmith::sim::rounded(b));
}
inline float __fmul_rn(float a, float b) { return ::warpsmith::sim::rounded(a * b); }
inline void __trap(WARPSMITH_ONLY_SITE) { ::warpsmith::sim::fail("__trap()", site); }
