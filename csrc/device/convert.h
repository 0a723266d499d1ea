#pragma once
#include <cstdint>

#include "common/half.h"
#include "device/platform.h"

// Conversions between storage types and float. Rounding is to nearest even; a NaN becomes the device's canonical NaN
// (0x7fff for both 16-bit types). Any thread may call, no ordering. PTX ISA 9.7.9 "cvt".
namespace warpsmith::device {

__device__ __forceinline__ float to_float(float x) { return x; }

__device__ __forceinline__ float to_float(bfloat16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }

__device__ __forceinline__ float to_float(float16 x) {
#ifdef WARPSMITH_SIM
  return static_cast<float>(std::bit_cast<_Float16>(x.bits));
#else
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
#endif
}

template <class T> __device__ __forceinline__ T from_float(float x);

template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }

template <> __device__ __forceinline__ float16 from_float<float16>(float x) {
#ifdef WARPSMITH_SIM
  return {x != x ? uint16_t{0x7fff} : std::bit_cast<uint16_t>(static_cast<_Float16>(x))};
#else
  float16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
#endif
}

template <> __device__ __forceinline__ bfloat16 from_float<bfloat16>(float x) {
#ifdef WARPSMITH_SIM
  const uint32_t u = std::bit_cast<uint32_t>(x);
  return {x != x ? uint16_t{0x7fff} : static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
#else
  bfloat16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
#endif
}

// Two values in one register, `low` in the low half: the operand layout of mma and wgmma. One instruction on the
// device.
template <class T> __device__ __forceinline__ uint32_t pack(float low, float high);

template <> __device__ __forceinline__ uint32_t pack<bfloat16>(float low, float high) {
#ifdef WARPSMITH_SIM
  return from_float<bfloat16>(low).bits | static_cast<uint32_t>(from_float<bfloat16>(high).bits) << 16;
#else
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
#endif
}

template <> __device__ __forceinline__ uint32_t pack<float16>(float low, float high) {
#ifdef WARPSMITH_SIM
  return from_float<float16>(low).bits | static_cast<uint32_t>(from_float<float16>(high).bits) << 16;
#else
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
#endif
}

// Unpacks both halves to floats. A kernel that keeps 16-bit values packed until it uses them needs half the registers.
template <class T> __device__ __forceinline__ float low_half(uint32_t two);
template <class T> __device__ __forceinline__ float high_half(uint32_t two);

template <> __device__ __forceinline__ float low_half<bfloat16>(uint32_t two) { return __uint_as_float(two << 16); }
template <> __device__ __forceinline__ float high_half<bfloat16>(uint32_t two) {
  return __uint_as_float(two & 0xffff0000u);
}
template <> __device__ __forceinline__ float low_half<float16>(uint32_t two) {
  return to_float(float16{static_cast<uint16_t>(two)});
}
template <> __device__ __forceinline__ float high_half<float16>(uint32_t two) {
  return to_float(float16{static_cast<uint16_t>(two >> 16)});
}

#ifdef WARPSMITH_SIM
namespace detail {
// The device's rules: max(NaN, number) is the number, and +0 is larger than -0.
inline float larger(float a, float b) {
  if (a != a || b != b) return a != a ? b : a;
  return a == b ? (std::bit_cast<uint32_t>(a) >> 31 ? b : a) : a > b ? a : b;
}
template <class T> uint32_t max_halves(uint32_t a, uint32_t b) {
  return pack<T>(larger(low_half<T>(a), low_half<T>(b)), larger(high_half<T>(a), high_half<T>(b)));
}
}  // namespace detail
#endif

// The larger value of each half: one instruction for two elements. max(NaN, number) is the number; max(NaN, NaN) is the
// canonical NaN. PTX ISA 9.7.4 "max".
template <class T> __device__ __forceinline__ uint32_t max_halves(uint32_t a, uint32_t b);

template <> __device__ __forceinline__ uint32_t max_halves<bfloat16>(uint32_t a, uint32_t b) {
#ifdef WARPSMITH_SIM
  return detail::max_halves<bfloat16>(a, b);
#else
  uint32_t y;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
#endif
}
template <> __device__ __forceinline__ uint32_t max_halves<float16>(uint32_t a, uint32_t b) {
#ifdef WARPSMITH_SIM
  return detail::max_halves<float16>(a, b);
#else
  uint32_t y;
  asm("max.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
#endif
}

// Makes the compiler treat the register as a new value. It then unpacks the register again after this point, instead of
// keeping two unpacked floats alive. Emits no instruction; may be called in divergent code.
__device__ __forceinline__ void keep_packed(uint32_t& two) {
#ifdef WARPSMITH_SIM
  (void)two;
#else
  asm volatile("" : "+r"(two));
#endif
}

}  // namespace warpsmith::device
