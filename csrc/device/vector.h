#pragma once
#include <cstdint>

#include "device/convert.h"
#include "device/platform.h"

// Memory access of 1 to 16 bytes by one instruction. Addresses must be aligned to the size of what is moved. Any thread
// may call; loads and stores have no ordering beyond program order. PTX ISA 9.7.9 "ld", "st".
namespace warpsmith::device {

template <class T, int N> struct alignas(sizeof(T) * N) Vector {
  T at[N];
};

template <class T> constexpr int kElementsPer16Bytes = 16 / sizeof(T);

// A cache hint. `streaming`: global memory that is read or written once (evict first). `keep`: the default, for shared
// memory too.
enum class Cache { keep, streaming };

namespace detail {

template <int Bytes> struct Word;
template <> struct Word<1> {
  using type = unsigned char;
};
template <> struct Word<2> {
  using type = unsigned short;
};
#ifndef WARPSMITH_SIM
template <> struct Word<4> {
  using type = unsigned;
};
template <> struct Word<8> {
  using type = uint2;
};
template <> struct Word<16> {
  using type = uint4;
};
#endif

}  // namespace detail

// V: a scalar, a 16-bit storage type or a Vector.
template <Cache cache = Cache::keep, class V> __device__ __forceinline__ V load(const V* p WARPSMITH_SITE) {
  static_assert(sizeof(V) == 1 || sizeof(V) == 2 || sizeof(V) == 4 || sizeof(V) == 8 || sizeof(V) == 16);
#ifdef WARPSMITH_SIM
  sim::on_load(p, sizeof(V), site);
  return *p;
#else
  using Word = typename detail::Word<sizeof(V)>::type;
  const Word* from = reinterpret_cast<const Word*>(p);
  union {
    Word word;
    V value;
  } u;
  if constexpr (cache == Cache::streaming)
    u.word = __ldcs(from);
  else
    u.word = *from;
  return u.value;
#endif
}

template <Cache cache = Cache::keep, class V> __device__ __forceinline__ void store(V* p, const V& v WARPSMITH_SITE) {
  static_assert(sizeof(V) == 1 || sizeof(V) == 2 || sizeof(V) == 4 || sizeof(V) == 8 || sizeof(V) == 16);
#ifdef WARPSMITH_SIM
  sim::on_store(p, sizeof(V), site);
  *p = v;
#else
  using Word = typename detail::Word<sizeof(V)>::type;
  union {
    V value;
    Word word;
  } u{v};
  if constexpr (cache == Cache::streaming)
    __stcs(reinterpret_cast<Word*>(p), u.word);
  else
    *reinterpret_cast<Word*>(p) = u.word;
#endif
}

// N consecutive elements from an element pointer.
template <int N, Cache cache = Cache::keep, class T>
__device__ __forceinline__ Vector<T, N> load_vector(const T* p WARPSMITH_SITE) {
  return load<cache>(reinterpret_cast<const Vector<T, N>*>(p) WARPSMITH_PASS_SITE);
}

template <Cache cache = Cache::keep, class T, int N>
__device__ __forceinline__ void store_vector(T* p, const Vector<T, N>& v WARPSMITH_SITE) {
  store<cache>(reinterpret_cast<Vector<T, N>*>(p), v WARPSMITH_PASS_SITE);
}

// A hint: brings the bytes around p, in global memory, to the second-level cache. PTX ISA 9.7.9 "prefetch".
__device__ __forceinline__ void prefetch_to_l2(const void* p) {
#ifdef WARPSMITH_SIM
  (void)p;
#else
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#endif
}

}  // namespace warpsmith::device
