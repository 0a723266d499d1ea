#pragma once
#include <cfloat>
#include <cstdint>

#include "common/float8_scale.h"
#include "device/float8.h"
#include "device/reduce.h"
#include "device/vector.h"

// How values become 8-bit floats, for every kernel that writes them: x / scale, to nearest even; beyond the range the
// largest value. Of values that are not finite e5m2 keeps infinities; all others become NaN, 0x7f.
namespace warpsmith::quantize {

using device::Vector;

template <class F> constexpr Float8Limits kLimits = kE4m3Limits;
template <> inline constexpr Float8Limits kLimits<float8_e5m2> = kE5m2Limits;

// What a thread has seen, until add_counts.
struct Counts {
  unsigned saturated = 0, not_finite = 0;
  __device__ __forceinline__ void add(const Counts& more) {
    saturated += more.saturated;
    not_finite += more.not_finite;
  }
};

// |x|, or 0 where x is not finite.
__device__ __forceinline__ float finite_magnitude(float x) {
  const float m = fabsf(x);
  return m <= FLT_MAX ? m : 0.0f;
}

// The divisor of values: a power of two has an exact reciprocal. Others, between 2^-60 and 2^60, have one whose
// products cast() corrects; scales beyond have NaN, which leaves every value to repair().
struct Divisor {
  float scale, reciprocal;
};
__device__ __forceinline__ Divisor divisor(float scale) {
  if (has_exact_reciprocal(scale)) return {scale, reciprocal_of(scale)};
  return {scale, scale >= 0x1p-60f && scale <= 0x1p60f ? 1.0f / scale : __uint_as_float(0x7fffffffu)};
}

// N values, a multiple of 4, as bytes in their order, where all are within the range. Returns whether one is not: then
// repair() must follow. Two corrections by the remainder make a quotient the nearest float (Markstein, "Computation of
// elementary functions on the IBM RISC System/6000 processor", 1990), at a fifth of the code of a division.
// kExact: d has an exact reciprocal, and nothing else of it is read.
template <class F, bool kExact = false, int N>
__device__ __forceinline__ bool cast(const float (&x)[N], const Divisor& d, Vector<uint32_t, N / 4>& bytes) {
  float q[N];
#pragma unroll
  for (int k = 0; k < N; ++k) q[k] = x[k] * d.reciprocal;
  if (!kExact && !has_exact_reciprocal(d.scale)) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      q[k] = fmaf(fmaf(-q[k], d.scale, x[k]), d.reciprocal, q[k]);
      q[k] = copysignf(fmaf(fmaf(-q[k], d.scale, x[k]), d.reciprocal, q[k]), x[k]);  // -0 too
    }
  }
#pragma unroll
  for (int k = 0; k < N; k += 4) bytes.at[k / 4] = device::pack<F>(q[k], q[k + 1], q[k + 2], q[k + 3]);
  bool odd = false;
#pragma unroll
  for (int k = 0; k < N; ++k) odd |= !(fabsf(q[k]) <= detail::float_of(kLimits<F>.largest_bits));
  return odd;
}

// Any one value, counted. For loops that are not unrolled: values beyond the range are rare.
template <class F> __device__ __forceinline__ uint8_t repair(float x, float scale, Counts& counts) {
  const float q = x / scale;
  const bool finite = fabsf(x) <= FLT_MAX, is_nan = q != q;
  counts.not_finite += !finite;
  counts.saturated += finite && fabsf(q) > detail::float_of(kLimits<F>.largest_bits);
  if (is_nan || (!finite && !kLimits<F>.has_infinity)) return 0x7f;
  if (!finite) return static_cast<uint8_t>(0x7cu | (__float_as_uint(x) >> 24 & 0x80u));
  return device::from_float<F>(q).bits;
}

// Adds what the threads of a warp have seen to the totals; null: not wanted. Called by the whole warp, converged.
__device__ __forceinline__ void add_counts(const Counts& mine, int64_t* totals) {
  if (!totals || !__any_sync(0xffffffffu, mine.saturated + mine.not_finite != 0)) return;
  const unsigned saturated = __reduce_add_sync(0xffffffffu, mine.saturated);
  const unsigned not_finite = __reduce_add_sync(0xffffffffu, mine.not_finite);
  if (threadIdx.x % 32 != 0) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(totals), static_cast<unsigned long long>(saturated));
  atomicAdd(reinterpret_cast<unsigned long long*>(totals) + 1, static_cast<unsigned long long>(not_finite));
}

// Casts a row of y that the threads of a block hold, V vectors of 16 bytes each, and have stored, as `segments` of the
// quantize family would. values_of(v, values) gives a vector's values, column_of(v) its first column, `stored` is where
// the row lies. Called by all threads of whole warps; one barrier inside. `scratch`: a float a warp that no thread
// still reads.
template <class T, int V, class Values, class Column>
__device__ __forceinline__ void cast_row(Values&& values_of, Column&& column_of, int columns, const T* stored,
                                         const Float8Rows& to, int64_t row, float* scratch) {
  constexpr int N = 16 / sizeof(T);
  const int lane = static_cast<int>(threadIdx.x % 32), warps = static_cast<int>(blockDim.x / 32);
  float amax = 0.0f;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if (column_of(v) >= columns) continue;
    float values[N];
    values_of(v, values);
#pragma unroll
    for (int k = 0; k < N; ++k) amax = fmaxf(amax, finite_magnitude(values[k]));
  }
  amax = device::group_max<32>(amax);
  if (lane == 0) scratch[threadIdx.x / 32] = amax;
  __syncthreads();
  amax = device::group_max<32>(scratch[lane < warps ? lane : 0]);
  const Divisor by = divisor(scale_of_amax(amax, kE4m3Limits, true));
  if (threadIdx.x == 0) device::store(to.scale + row, by.scale);
  uint8_t* const data = to.data + row * columns;
  bool odd = false;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if (column_of(v) >= columns) continue;
    float values[N];
    values_of(v, values);
    Vector<uint32_t, N / 4> bytes;
    odd |= cast<float8_e4m3, true>(values, by, bytes);
    device::store(reinterpret_cast<Vector<uint32_t, N / 4>*>(data + column_of(v)), bytes);
  }
  Counts counts;
  if (odd) {  // elements that are not finite: once more, each alone, as this thread has stored them
#pragma unroll 1
    for (int i = 0; i < V * N; ++i) {
      const int column = column_of(i / N) + i % N;
      if (column >= columns) break;
      device::store(data + column,
                    repair<float8_e4m3>(device::to_float(device::load(stored + column)), by.scale, counts));
    }
  }
  add_counts(counts, to.counts);
}

}  // namespace warpsmith::quantize
