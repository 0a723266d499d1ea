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

// The rows of a thread: of the `left` rows at `from` each `apart`-th, U of them a turn; the next turn lies `turn` rows
// on. A turn with another behind it is whole.
template <class T, int N> struct Rows {
  const Packed<T, N>* from;
  int64_t stride;  // in vectors
  int64_t left;
  int64_t turn;
  int apart;

  template <device::Cache cache, int U> __device__ __forceinline__ void load(Packed<T, N> (&to)[U]) const {
    load_rows<T, N, cache>(to, from, stride, 0, 0, apart, left);
  }
  template <int U> __device__ __forceinline__ int there() const {
    int rows = 0;
#pragma unroll
    for (int u = 0; u < U; ++u) rows += u * apart < left;
    return rows;
  }
  __device__ __forceinline__ void next() { from += turn * stride, left -= turn; }
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

// All rows of a thread. The loads of a turn are in flight while the one before is added. Returns their number.
template <int U, class T, int N> __device__ __forceinline__ float add_rows(Moments<N>& m, Rows<T, N> rows) {
  constexpr auto keep = device::Cache::keep;
  Packed<T, N> x[U], ahead[U];
  float count = 0;
  rows.template load<keep>(x);
  const int first = rows.template there<U>();
  const float part = 1.0f / static_cast<float>(max(first, 1));
#pragma unroll
  for (int k = 0; k < N; ++k) {
    float sum = 0;
#pragma unroll
    for (int u = 0; u < U; ++u) sum += u < first ? element<T, N>(x[u], k) : 0.0f;
    m.center[k] = sum * part;
  }
  while (rows.left > rows.turn) {
    rows.next();
    rows.template load<keep>(ahead);
    add_turn<true, T, N>(m, x, U);
    count += U;
#pragma unroll
    for (int u = 0; u < U; ++u) x[u] = ahead[u];
  }
  const int last = rows.template there<U>();
  if (last > 0) add_turn<false, T, N>(m, x, last);
  return count + static_cast<float>(last);
}

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) <= std::numeric_limits<float>::max(); }

// The sums of x and of its squares over a thread's rows of the channel `k` of its vector, in double: where those in
// float are not finite.
template <int U, class T, int N>
__device__ void add_in_double(const Rows<T, N>& rows, int k, double& sum, double& square) {
  const T* const x = reinterpret_cast<const T*>(rows.from) + k;
  sum = square = 0;
  for (int64_t turn = 0; turn < rows.left; turn += rows.turn)
    for (int64_t row = turn; row < min(turn + int64_t{U} * rows.apart, rows.left); row += rows.apart) {
      const double value = device::to_float(device::load(x + row * rows.stride * N));
      sum += value;
      square += value * value;
    }
}

}  // namespace warpsmith::tiles
