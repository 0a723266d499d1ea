#pragma once
#include <limits>

#include "common/dtype.h"
#include "device/convert.h"
#include "device/math.h"
#include "device/packed.h"
#include "device/vector.h"

// What the norms of pixels share: rows of channels read by threads that each keep to one vector of them.
namespace warpsmith::tiles {

using device::Packed;

// Element k of a vector as it lies in memory.
template <class T, int N> __device__ __forceinline__ float element(const Packed<T, N>& v, int k) {
  if constexpr (sizeof(T) == 2 && N % 2 == 0)
    return k % 2 ? device::high_half<T>(v.at[k / 2]) : device::low_half<T>(v.at[k / 2]);
  else
    return device::to_float(v.at[k]);
}

// Where a vector lies. Counted in vectors: of an address in elements nvcc does not see that it is aligned, and takes a
// store of 16 bytes apart.
template <class T, int N> __device__ __forceinline__ const Packed<T, N>* vector_at(const void* base, int64_t i) {
  return static_cast<const Packed<T, N>*>(base) + i;
}
template <class T, int N> __device__ __forceinline__ Packed<T, N>* vector_at(void* base, int64_t i) {
  return static_cast<Packed<T, N>*>(base) + i;
}

// The vectors of a thread in U rows, `step` rows apart from `first` on; zeros behind the last row.
template <class T, int N, device::Cache cache = device::Cache::keep, int U>
__device__ __forceinline__ void load_rows(Packed<T, N> (&to)[U], const void* base, int64_t stride_vectors,
                                          int64_t vector, int64_t first, int step, int64_t rows) {
  const auto* from = vector_at<T, N>(base, first * stride_vectors + vector);
  int64_t left = rows - first;
#pragma unroll
  for (int u = 0; u < U; ++u, from += step * stride_vectors, left -= step) {  // no registers for U addresses
    to[u] = {};
    if (left > 0) to[u] = device::load<cache>(from);
  }
}

// One element of a dtype known at run time.
__device__ __forceinline__ float load_as(const void* base, Dtype dtype, int64_t i) {
  if (dtype == Dtype::float32) return device::load(static_cast<const float*>(base) + i);
  if (dtype == Dtype::float16) return device::to_float(device::load(static_cast<const float16*>(base) + i));
  return device::to_float(device::load(static_cast<const bfloat16*>(base) + i));
}
__device__ __forceinline__ void store_as(void* base, Dtype dtype, int64_t i, float value) {
  if (dtype == Dtype::float32)
    device::store(static_cast<float*>(base) + i, value);
  else if (dtype == Dtype::float16)
    device::store(static_cast<float16*>(base) + i, device::from_float<float16>(value));
  else
    device::store(static_cast<bfloat16*>(base) + i, device::from_float<bfloat16>(value));
}

// A power of two of rstd's size: (x - mean) * unit is about x_hat, rounded as x - mean is, and overflows only where
// that does. rstd / unit is in [0.5, 1], so that its product with a weight does not overflow either.
__device__ __forceinline__ float unit_of(float mean, float rstd) {
  const float power = 2.0f * __uint_as_float(__float_as_uint(rstd) & 0x7f800000u);
  const float unit = fminf(fmaxf(power, 0x1p-126f), 0x1p64f);
  return fabsf(mean) * unit < 0x1p120f ? unit : 1.0f;
}

// rstd / unit, by unit's exponent.
__device__ __forceinline__ float share_of(float rstd, float unit) {
  return rstd * __uint_as_float(0x7f000000u - __float_as_uint(unit));
}

// What (x - mean) * rstd * weight + bias takes of a channel: two multiply-adds, the same roundings in the forward and
// where a backward computes it again.
struct alignas(16) Channel {
  float unit, offset, scale, bias;  // offset: -mean * unit; scale: rstd / unit * weight
  Channel() = default;
  __device__ __forceinline__ Channel(float mean, float rstd, float weight, float bias)
      : unit(unit_of(mean, rstd)), offset(-mean * unit), scale(share_of(rstd, unit) * weight), bias(bias) {}
  __device__ __forceinline__ float centered(float x) const { return fmaf(x, unit, offset); }
  __device__ __forceinline__ float value(float x) const { return fmaf(centered(x), scale, bias); }
};

// Sums of a thread: of d = x - center, and of d * d. The center is the mean of the thread's first rows, so that the
// squares about the mean do not cancel when they are taken of both sums, wherever the mean lies.
template <int N> struct Moments {
  float center[N], sum[N] = {}, square[N] = {};
};

// Takes the first `rows` of the rows of a turn. kWhole: all U rows are there.
template <bool kWhole, class T, int N, int U>
__device__ __forceinline__ void add_turn(Moments<N>& m, const Packed<T, N> (&x)[U], int rows) {
#pragma unroll
  for (int k = 0; k < N; ++k) {
    float d[U], square[U / 2];
#pragma unroll
    for (int u = 0; u < U; ++u) d[u] = kWhole || u < rows ? element<T, N>(x[u], k) - m.center[k] : 0.0f;
#pragma unroll
    for (int u = 0; u < U / 2; ++u) square[u] = fmaf(d[u], d[u], d[u + U / 2] * d[u + U / 2]);
#pragma unroll
    for (int width = U / 2; width > 0; width /= 2)
#pragma unroll
      for (int u = 0; u < width; ++u) {
        d[u] += d[u + width];
        if (width < U / 2) square[u] += square[u + width];
      }
    m.sum[k] += d[0];
    m.square[k] += square[0];
  }
}

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) <= std::numeric_limits<float>::max(); }

}  // namespace warpsmith::tiles
