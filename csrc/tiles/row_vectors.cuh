#pragma once
#include <cstdint>
#include <type_traits>

#include "device/convert.h"
#include "device/math.h"
#include "device/vector.h"

// Rows of cross_entropy and softmax as aligned vectors of 16 bytes, and sums of exponentials of their elements.
namespace warpsmith::tiles {

constexpr float kMinusInfinity = -__builtin_huge_valf();
constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

using device::Vector;

// Sixteen bytes of a row as stored: 16-bit elements stay packed in registers.
using Packed = Vector<uint32_t, 4>;

// sum += y; returns what rounding lost. Symmetric in its arguments, whichever is larger. Source: Knuth, The Art of
// Computer Programming 2, 4.2.2, theorem B.
__device__ __forceinline__ float add_exactly(float& sum, float y) {
  const float x = sum;
  sum = x + y;
  const float part = sum - x;
  return x - (sum - part) + (y - part);
}

// A sum of exponentials. float32 rows keep what rounding loses: if the largest element has nearly all the probability,
// the error law allows one ulp of the sum. 16-bit rows use two independent chains of additions.
template <class T> struct ExponentialSum {
  float s = 0.f, other = 0.f;
  __device__ __forceinline__ void add(float e, int n) {
    if constexpr (sizeof(T) == 4) {
      other += add_exactly(s, e);
    } else {
      (n % 2 ? other : s) += e;
    }
  }
};

// Calls step(d) for the distances of a butterfly exchange among `lanes` adjacent threads (a power of two). Unrolled: a
// loop would cost more than its steps.
template <class Step> __device__ __forceinline__ void for_distances(int lanes, Step&& step) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2)
    if (d < lanes) step(d);
}

// The maximum of groups of `lanes` threads. They share it before they sum, so that their sums need no rescaling.
__device__ __forceinline__ float max_of_lanes(float m, int lanes) {
  for_distances(lanes, [&](int d) { m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, d)); });
  return m;
}

template <class T> __device__ __forceinline__ float element(const Packed& x, int n) {
  if constexpr (sizeof(T) == 2)
    return device::to_float(T{static_cast<uint16_t>(n % 2 ? x.at[n / 2] >> 16 : x.at[n / 2])});
  else
    return __uint_as_float(x.at[n]);
}

template <class T, int N> __device__ __forceinline__ Packed packed(const float (&x)[N]) {
  Packed y;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 2)
      y.at[i] = device::pack<T>(x[2 * i], x[2 * i + 1]);
    else
      y.at[i] = __float_as_uint(x[i]);
  }
  return y;
}

// A row as vectors of N elements, each aligned to 16 bytes. Vector i holds columns [i * N - phase, (i + 1) * N -
// phase). Only the first and last vectors may reach outside the row.
template <class T> struct Row {
  static constexpr int N = 16 / sizeof(T);
  T* base;  // address of column 0
  int phase;
  int columns;

  __device__ __forceinline__ Row(const void* tensor, int64_t offset, int columns)
      : base(const_cast<T*>(static_cast<const T*>(tensor)) + offset),
        phase(static_cast<int>(reinterpret_cast<uintptr_t>(base) % 16 / sizeof(T))),
        columns(columns) {}

  __device__ __forceinline__ int vectors() const { return (phase + columns + N - 1) / N; }
  // Vectors [first_whole, end_whole) lie inside the row.
  __device__ __forceinline__ int first_whole() const { return phase != 0; }
  __device__ __forceinline__ int end_whole() const { return (phase + columns) / N; }
  __device__ __forceinline__ int first_column(int vector) const { return vector * N - phase; }
  __device__ __forceinline__ bool has(int column) const {
    return static_cast<unsigned>(column) < static_cast<unsigned>(columns);
  }
  __device__ __forceinline__ bool whole(int column) const { return column >= 0 && column + N <= columns; }

  // Loads one vector. Elements outside the row are `outside`.
  __device__ __forceinline__ Packed load(int vector, float outside = kMinusInfinity) const {
    const int column = first_column(vector);
    if (whole(column)) return device::load(reinterpret_cast<const Packed*>(base + column));
    Packed x = {};
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const T element = has(column + n) ? device::load(base + column + n) : device::from_float<T>(outside);
      if constexpr (sizeof(T) == 2)
        x.at[n / 2] |= static_cast<uint32_t>(element.bits) << n % 2 * 16;
      else
        x.at[n] = __float_as_uint(element);
    }
    return x;
  }

  // Stores one vector whose first element is `column`. Its alignment may be that of another row, with another phase.
  __device__ __forceinline__ void store(int column, const Packed& y) const {
    if (whole(column) && (column + phase) % N == 0) {
      device::store(reinterpret_cast<Packed*>(base + column), y);
      return;
    }
#pragma unroll
    for (int n = 0; n < N; ++n)
      if (has(column + n)) {
        if constexpr (sizeof(T) == 2)
          device::store(base + column + n, T{static_cast<uint16_t>(y.at[n / 2] >> n % 2 * 16)});
        else
          device::store(base + column + n, __uint_as_float(y.at[n]));
      }
  }
};

// The next float away from zero, or towards zero.
__device__ __forceinline__ float neighbour(float x, bool away) {
  return __uint_as_float(__float_as_uint(x) + (away ? 1u : ~0u));
}

// e^(z - m) for a row's elements z and their maximum m. Gives 0 for z = -inf, also if m is -inf.
//
// float32 elements subtract first. 16-bit ones, where kPlain, use 2^(scale z + offset): one fused multiply-add. The
// offset is rounded so that m itself gives at most 1. The rounding multiplies all exponentials of a row by the same
// factor, unit(m).
template <class T, bool kPlain> struct Exponential {
  static constexpr bool kFused = sizeof(T) == 2 && kPlain;
  static constexpr float kUnits = kFused ? kLn2 : 1.f;  // unit of argument()
  float scale, offset;

  __device__ __forceinline__ explicit Exponential(float m) {
    if (m == kMinusInfinity) m = 0.f;
    scale = kLog2E;
    offset = m;
    if constexpr (kFused) {
      const float product = m * kLog2E;
      offset = -(fmaf(m, kLog2E, -product) > 0.f ? neighbour(product, product > 0.f) : product);
    }
    // Beyond 65,536 bfloat16 numbers are 256 and more apart, so only elements equal to m count. The scale becomes a
    // power of two: nothing overflows, and m gives exactly 1.
    if constexpr (kFused && std::is_same_v<T, bfloat16>)
      if (fabsf(m) >= 65536.f && fabsf(m) < -kMinusInfinity) {
        scale = __uint_as_float((270u << 23) - (__float_as_uint(m) & 0x7f800000u));
        offset = -(m * scale);
      }
  }
  __device__ __forceinline__ float argument(float z) const { return kFused ? fmaf(z, scale, offset) : z - offset; }
  __device__ __forceinline__ static float of_argument(float x) {
    if constexpr (kFused) return device::exp2(x);
    if constexpr (sizeof(T) == 2) return device::exp(x);
    return expf(x);
  }
  __device__ __forceinline__ float operator()(float z) const { return of_argument(argument(z)); }
  // e^0 as computed: the value for z = m.
  __device__ __forceinline__ float unit(float m) const {
    if constexpr (kFused) return m == kMinusInfinity ? 1.f : (*this)(m);
    return 1.f;
  }
};

// The largest element of some vectors. 16-bit elements in pairs.
template <class T> struct Largest {
  static constexpr bool kPairs = sizeof(T) == 2;
  Packed held;

  __device__ __forceinline__ Largest() {
    uint32_t none = __float_as_uint(kMinusInfinity);
    if constexpr (kPairs) none = device::pack<T>(kMinusInfinity, kMinusInfinity);
#pragma unroll
    for (int n = 0; n < 4; ++n) held.at[n] = none;
  }
  __device__ __forceinline__ void add(const Packed& x) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if constexpr (kPairs)
        held.at[n] = device::max_halves<T>(held.at[n], x.at[n]);
      else
        held.at[n] = __float_as_uint(fmaxf(__uint_as_float(held.at[n]), __uint_as_float(x.at[n])));
    }
  }
  __device__ __forceinline__ float value() const {
    float m = element<T>(held, 0);
#pragma unroll
    for (int n = 1; n < Row<T>::N; ++n) m = fmaxf(m, element<T>(held, n));
    return m;
  }
};

template <class T> __device__ __forceinline__ float max_of(const Packed& x) {
  Largest<T> largest;
  largest.add(x);
  return largest.value();
}

}  // namespace warpsmith::tiles
