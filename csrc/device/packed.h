#pragma once
#include <cstdint>
#include <type_traits>

#include "device/convert.h"
#include "device/vector.h"

// Vectors of storage types as they lie in memory, for kernels that are short of instructions or registers: pairs of
// 16-bit elements stay words, because the compiler takes vectors of 16-bit elements apart and puts them together again,
// at twice the instructions. Any thread, no ordering.
namespace warpsmith::device {

template <class T, int N> using Packed =
    std::conditional_t<sizeof(T) == 2 && N % 2 == 0, Vector<uint32_t, N / 2>, Vector<T, N>>;

// Where the vector lies that begins with `element`; it must be aligned to its size.
template <class T, int N> __device__ __forceinline__ const Packed<T, N>* packed_at(const void* base, int64_t element) {
  return reinterpret_cast<const Packed<T, N>*>(static_cast<const T*>(base) + element);
}

template <class T, int N> __device__ __forceinline__ Packed<T, N>* packed_at(void* base, int64_t element) {
  return reinterpret_cast<Packed<T, N>*>(static_cast<T*>(base) + element);
}

template <class T, int N> __device__ __forceinline__ void unpack(float (&to)[N], const Packed<T, N>& from) {
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
#pragma unroll
    for (int k = 0; k < N / 2; ++k) {
      to[2 * k] = low_half<T>(from.at[k]);
      to[2 * k + 1] = high_half<T>(from.at[k]);
    }
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k) to[k] = to_float(from.at[k]);
  }
}

// To nearest even.
template <class T, int N> __device__ __forceinline__ Packed<T, N> rounded(const float (&x)[N]) {
  Packed<T, N> y;
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
#pragma unroll
    for (int k = 0; k < N / 2; ++k) y.at[k] = pack<T>(x[2 * k], x[2 * k + 1]);
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k) y.at[k] = from_float<T>(x[k]);
  }
  return y;
}

// The compiler no longer knows what it has made of the vector: it unpacks it once more where it is used again, instead
// of keeping the elements in registers of their own.
template <int W> __device__ __forceinline__ void forget([[maybe_unused]] Vector<uint32_t, W>& v) {
#ifndef WARPSMITH_SIM
#pragma unroll
  for (uint32_t& word : v.at) asm volatile("" : "+r"(word));
#endif
}
template <int W> __device__ __forceinline__ void forget(Vector<float, W>&) {}  // has nothing to unpack

// Nor what lies in memory: shared values that are read again need no registers in between.
__device__ __forceinline__ void forget_memory() { asm volatile("" ::: "memory"); }

}  // namespace warpsmith::device
