#pragma once
#include <cstdint>

#include "common/vector_math.h"
#include "device/convert.h"
#include "device/math.h"
#include "device/reduce.h"
#include "device/vector.h"
#include "kernels/cross_entropy/cross_entropy.h"

// What the kernels of cross_entropy share: rows as aligned vectors, sums that can be combined, the gradient of an
// element.
namespace warpsmith::cross_entropy {

using device::Vector;

constexpr float kLog2e = 1.44269504f, kLn2 = 0.69314718f;
constexpr float kMinusInfinity = -__builtin_huge_valf();
constexpr int kNowhere = 0x7fffffff;

// A row as vectors of N elements that begin on 16 bytes. Vector i holds columns [i * N - phase, (i + 1) * N - phase);
// only the first and the last may reach outside the row.
template <class T> struct Row {
  static constexpr int N = 16 / sizeof(T);
  T* base;  // of column 0
  int phase;
  int64_t columns;

  __device__ __forceinline__ Row(const void* tensor, int64_t offset, int64_t columns)
      : base(const_cast<T*>(static_cast<const T*>(tensor)) + offset),
        phase(static_cast<int>(reinterpret_cast<uintptr_t>(base) % 16 / sizeof(T))),
        columns(columns) {}

  __device__ __forceinline__ int64_t vectors() const { return (phase + columns + N - 1) / N; }
  __device__ __forceinline__ int64_t first_column(int64_t vector) const { return vector * N - phase; }
  __device__ __forceinline__ int64_t vector_of(int64_t column) const { return (column + phase) / N; }
  __device__ __forceinline__ bool has(int64_t column) const {
    return static_cast<uint64_t>(column) < static_cast<uint64_t>(columns);
  }
  __device__ __forceinline__ bool whole(int64_t column) const { return column >= 0 && column + N <= columns; }

  // Elements outside the row are -inf.
  __device__ __forceinline__ Vector<T, N> load(int64_t vector) const {
    const int64_t column = first_column(vector);
    if (whole(column)) return device::load_vector<N>(base + column);
    Vector<T, N> x;
#pragma unroll
    for (int k = 0; k < N; ++k)
      x.at[k] = has(column + k) ? device::load(base + column + k) : device::from_float<T>(kMinusInfinity);
    return x;
  }

  // `column`: of the vector's first element, which may be that of another row with another phase.
  __device__ __forceinline__ void store(int64_t column, const Vector<T, N>& y) const {
    if (whole(column) && (column + phase) % N == 0) {
      device::store_vector(base + column, y);
      return;
    }
#pragma unroll
    for (int k = 0; k < N; ++k)
      if (has(column + k)) device::store(base + column + k, y.at[k]);
  }
};

// Softcap and its derivative. 16-bit logits take tanh from one exponential and one reciprocal, good to 2^-21.
template <class T> __device__ __forceinline__ float tanh_of(float x) {
  if constexpr (sizeof(T) == 4) return math::tanh(x);
  return 1.f - 2.f * device::reciprocal(1.f + device::exp2(x * (2 * kLog2e)));
}

// c = round(m * log2(e)), the reference of exponentials 2^(z log2(e) - c). 0 where m is -inf, so that -inf gives 0.
__device__ __forceinline__ float reference_of(float m) { return m == kMinusInfinity ? 0.f : m * kLog2e; }

__device__ __forceinline__ float exp2_of(float z, float c) { return device::exp2(fmaf(z, kLog2e, -c)); }

// What is known of some elements z of a row. `s` and `e` are relative to reference_of(m), `a` to m.
struct Sums {
  float m;  // max z
  float s;  // sum of 2^(z L - c)
  int at;   // the first vector that holds m
  // kGeneral only:
  float w;  // sum of class weights
  float a;  // sum of weight * (z - m)
  float e;  // sum of 2^(z L - c) * (z L - c)

  // The same elements, relative to a larger maximum.
  template <bool kGeneral> __device__ __forceinline__ void rebase(float largest) {
    if (m != largest) {
      at = kNowhere;
      const float c = reference_of(m), d = c - reference_of(largest);
      const float f = m == kMinusInfinity ? 0.f : device::exp2(d);
      if constexpr (kGeneral) {
        e = f == 0.f ? 0.f : f * (e + d * s);
        if (w != 0.f) a += (m - largest) * w;
      }
      s *= f;
      m = largest;
    }
  }
};

__device__ __forceinline__ Sums no_elements() { return {kMinusInfinity, 0.f, kNowhere, 0.f, 0.f, 0.f}; }

// Combines the sums of aligned groups of `lanes` threads, a power of two; every one of them gets the result. Called by
// the whole warp.
template <bool kGeneral> __device__ __forceinline__ Sums combine(Sums x, int lanes) {
  float m = x.m;
  for (int d = lanes / 2; d > 0; d /= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, d));
  x.rebase<kGeneral>(m);
  for (int d = lanes / 2; d > 0; d /= 2) {
    const int other = __shfl_xor_sync(0xffffffffu, x.at, d);
    x.at = other < x.at ? other : x.at;
    x.s += __shfl_xor_sync(0xffffffffu, x.s, d);
    if constexpr (kGeneral) {
      x.w += __shfl_xor_sync(0xffffffffu, x.w, d);
      x.a += __shfl_xor_sync(0xffffffffu, x.a, d);
      x.e += __shfl_xor_sync(0xffffffffu, x.e, d);
    }
  }
  return x;
}

__device__ __forceinline__ float real_at(const void* p, int64_t i, float otherwise) {
  return p ? device::load(static_cast<const float*>(p) + i) : otherwise;
}

enum class Label : uint8_t { counts, ignored, bad };

__device__ __forceinline__ Label label_of(int64_t target, int64_t classes, int64_t ignore_index) {
  if (target == ignore_index) return Label::ignored;
  return static_cast<uint64_t>(target) < static_cast<uint64_t>(classes) ? Label::counts : Label::bad;
}

// The options as the kernels use them.
struct Options {
  float cap, inverse_cap;  // 0: no softcap
  float keep;              // 1 - label_smoothing
  float spread;            // label_smoothing / classes
  float z_loss;

  __device__ __forceinline__ explicit Options(const CrossEntropyParams& p)
      : cap(static_cast<float>(p.softcap)),
        inverse_cap(p.softcap != 0 ? static_cast<float>(1 / p.softcap) : 0.f),
        keep(static_cast<float>(1 - p.label_smoothing)),
        spread(static_cast<float>(p.label_smoothing / static_cast<double>(p.classes))),
        z_loss(static_cast<float>(p.z_loss)) {}

  template <class T, bool kGeneral> __device__ __forceinline__ float capped(T x) const {
    const float u = device::to_float(x);
    if constexpr (kGeneral) return cap != 0.f ? cap * tanh_of<T>(u * inverse_cap) : u;
    return u;
  }
};

// dlogits[j] = (k * e_j + q * e_j * log p_j - s * w_j - onehot_j * t) * cap'(logit_j), where e_j = 2^(z_j L - c).
struct Gradient {
  float c;      // reference of the exponentials
  float k;      // factor of e_j
  float s;      // of class weights, from label smoothing
  float t;      // at the target
  int64_t hot;  // the target's vector
  int place;    // its element there
  bool zero;    // the row is ignored
  float q;      // of e_j * log p_j
  float log_p_offset;  // log p_j = z_j - log_p_offset

  // The gradient of vector i of a row, whose elements are x.
  template <class T, bool kGeneral>
  __device__ __forceinline__ Vector<T, Row<T>::N> of(const Vector<T, Row<T>::N>& x, int64_t i, const Row<T>& row,
                                                     const Options& o, const void* class_weight) const {
    constexpr int N = Row<T>::N;
    float g[N];
    if (zero) {
#pragma unroll
      for (int n = 0; n < N; ++n) g[n] = 0.f;
    } else {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        if constexpr (kGeneral) {
          const float z = o.capped<T, true>(x.at[n]), e = exp2_of(z, c);
          const int64_t column = row.first_column(i) + n;
          const float w = s != 0.f && row.has(column) ? real_at(class_weight, column, 1.f) : 1.f;
          g[n] = k * e - s * w;
          if (q != 0.f && e != 0.f) g[n] += q * e * (z - log_p_offset);
        } else {
          g[n] = k * exp2_of(device::to_float(x.at[n]), c);
        }
      }
      if (i == hot)
#pragma unroll
        for (int n = 0; n < N; ++n) g[n] -= n == place ? t : 0.f;
      if constexpr (kGeneral)
        if (o.cap != 0.f)
#pragma unroll
          for (int n = 0; n < N; ++n) {
            const float h = tanh_of<T>(device::to_float(x.at[n]) * o.inverse_cap);
            g[n] *= 1.f - h * h;
          }
    }
    Vector<T, N> y;
#pragma unroll
    for (int n = 0; n < N; ++n) y.at[n] = device::from_float<T>(g[n]);
    return y;
  }
};

}  // namespace warpsmith::cross_entropy
