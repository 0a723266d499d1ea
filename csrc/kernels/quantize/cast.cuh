#pragma once
#include <cfloat>
#include <cstdint>

#include "common/float8_scale.h"
#include "device/float8.h"
#include "device/packed.h"
#include "device/vector.h"

// How values become 8-bit floats, for every kernel of the family: x / scale, to nearest even, beyond the range the
// largest value. Of values that are not finite e5m2 keeps infinities; all others become NaN, 0x7f.
namespace warpsmith::quantize {

using device::Vector;

template <class F> constexpr Float8Limits kLimits = kE4m3Limits;
template <> inline constexpr Float8Limits kLimits<float8_e5m2> = kE5m2Limits;

// What a thread has seen, until add_counts.
struct Counts {
  unsigned saturated = 0, not_finite = 0;
};

// |x|, or 0 where x is not finite.
__device__ __forceinline__ float finite_magnitude(float x) {
  const float m = fabsf(x);
  return m <= FLT_MAX ? m : 0.0f;
}

// The byte of one value for which x / scale is not within the range. `rounded`: what the conversion gave.
template <class F>
__device__ __forceinline__ uint32_t odd_byte(float x, float quotient, uint32_t rounded, Counts& counts) {
  const bool finite = fabsf(x) <= FLT_MAX, is_nan = quotient != quotient;
  counts.not_finite += !finite;
  counts.saturated += finite && !is_nan;
  if (is_nan) return 0x7f;
  if (finite) return rounded;
  return kLimits<F>.has_infinity ? 0x7cu | (__float_as_uint(x) >> 24 & 0x80u) : 0x7fu;
}

// N values, a multiple of 4, as bytes in their order. Values beyond the range are rare: they cost a branch.
template <class F, int N>
__device__ __forceinline__ Vector<uint32_t, N / 4> cast(const float (&x)[N], float scale, Counts& counts) {
  float q[N];
  if (has_exact_reciprocal(scale)) {
    const float reciprocal = reciprocal_of(scale);
#pragma unroll
    for (int k = 0; k < N; ++k) q[k] = x[k] * reciprocal;
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k) q[k] = x[k] / scale;
  }
  Vector<uint32_t, N / 4> bytes;
  bool odd = false;
  const float largest = detail::float_of(kLimits<F>.largest_bits);
#pragma unroll
  for (int k = 0; k < N; k += 4) bytes.at[k / 4] = device::pack<F>(q[k], q[k + 1], q[k + 2], q[k + 3]);
#pragma unroll
  for (int k = 0; k < N; ++k) odd |= !(fabsf(q[k]) <= largest);
  if (odd) {
#pragma unroll
    for (int k = 0; k < N; ++k)
      if (!(fabsf(q[k]) <= largest)) {
        const int shift = 8 * (k % 4);
        const uint32_t byte = odd_byte<F>(x[k], q[k], bytes.at[k / 4] >> shift & 0xffu, counts);
        bytes.at[k / 4] = (bytes.at[k / 4] & ~(0xffu << shift)) | byte << shift;
      }
  }
  return bytes;
}

// Adds what the threads of a warp have seen to the totals. Called by the whole warp, converged.
__device__ __forceinline__ void add_counts(const Counts& mine, int64_t* totals) {
  if (!__any_sync(0xffffffffu, mine.saturated + mine.not_finite != 0)) return;
  const unsigned saturated = __reduce_add_sync(0xffffffffu, mine.saturated);
  const unsigned not_finite = __reduce_add_sync(0xffffffffu, mine.not_finite);
  if (threadIdx.x % 32 != 0) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(totals), static_cast<unsigned long long>(saturated));
  atomicAdd(reinterpret_cast<unsigned long long*>(totals) + 1, static_cast<unsigned long long>(not_finite));
}

// 16 bytes of values, as they lie in memory, of which `here` exist; the others are 0. `whole`: one access may read them
// if all exist.
template <class T> constexpr int kPiece = 16 / sizeof(T);
template <class T> using Piece = device::Packed<T, kPiece<T>>;

template <class T> __device__ __forceinline__ Piece<T> load_piece(const T* x, int here, bool whole) {
  if (whole && here >= kPiece<T>) return device::load(device::packed_at<T, kPiece<T>>(x, 0));
  Vector<T, kPiece<T>> piece = {};
#pragma unroll
  for (int k = 0; k < kPiece<T>; ++k)
    if (k < here) piece.at[k] = device::load(x + k);
  return __builtin_bit_cast(Piece<T>, piece);
}

// The first `here` of 4 W bytes. `whole`: likewise.
template <int W>
__device__ __forceinline__ void store_bytes(uint8_t* to, const Vector<uint32_t, W>& bytes, int here, bool whole) {
  if (whole && here >= 4 * W) {
    device::store(reinterpret_cast<Vector<uint32_t, W>*>(to), bytes);
    return;
  }
#pragma unroll
  for (int k = 0; k < 4 * W; ++k)
    if (k < here) device::store(to + k, static_cast<uint8_t>(bytes.at[k / 4] >> (8 * (k % 4))));
}

}  // namespace warpsmith::quantize
