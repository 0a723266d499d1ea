#pragma once
#include <cstdint>

#include "device/convert.h"
#include "device/math.h"
#include "device/reduce.h"
#include "device/vector.h"
#include "kernels/cross_entropy/cross_entropy.h"

// What the kernels of cross_entropy share: rows as aligned vectors, sums that can be combined, the gradient of an
// element.
namespace warpsmith::cross_entropy {

using device::Vector;

constexpr float kMinusInfinity = -__builtin_huge_valf();
constexpr int kNowhere = 0x7fffffff;

// Sixteen bytes of a row, as they lie in memory: 16-bit elements stay packed in registers.
using Packed = Vector<uint32_t, 4>;

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

// A row as vectors of N elements that begin on 16 bytes. Vector i holds columns [i * N - phase, (i + 1) * N - phase);
// only the first and the last may reach outside the row.
template <class T> struct Row {
  static constexpr int N = 16 / sizeof(T);
  T* base;  // of column 0
  int phase;
  int columns;

  __device__ __forceinline__ Row(const void* tensor, int64_t offset, int columns)
      : base(const_cast<T*>(static_cast<const T*>(tensor)) + offset),
        phase(static_cast<int>(reinterpret_cast<uintptr_t>(base) % 16 / sizeof(T))),
        columns(columns) {}

  __device__ __forceinline__ int vectors() const { return (phase + columns + N - 1) / N; }
  __device__ __forceinline__ int first_column(int vector) const { return vector * N - phase; }
  __device__ __forceinline__ bool has(int column) const {
    return static_cast<unsigned>(column) < static_cast<unsigned>(columns);
  }
  __device__ __forceinline__ bool whole(int column) const { return column >= 0 && column + N <= columns; }

  // Elements outside the row are -inf.
  __device__ __forceinline__ Packed load(int vector) const {
    const int column = first_column(vector);
    if (whole(column)) return device::load(reinterpret_cast<const Packed*>(base + column));
    Packed x = {};
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const T element = has(column + n) ? device::load(base + column + n) : device::from_float<T>(kMinusInfinity);
      if constexpr (sizeof(T) == 2)
        x.at[n / 2] |= static_cast<uint32_t>(element.bits) << n % 2 * 16;
      else
        x.at[n] = __float_as_uint(element);
    }
    return x;
  }

  // `column`: of the vector's first element, which may be that of another row with another phase.
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

template <class T> __device__ __forceinline__ float tanh_of(float x) {
  if constexpr (sizeof(T) == 4) return tanhf(x);
  return device::tanh(x);
}

// What exponentials are relative to: the maximum m, or 0 where that is -inf, so that -inf gives 0. They are taken of
// the difference, which is exact near m, and not of a fused z log2(e) - c: the largest gives exactly 1, at any
// magnitude.
__device__ __forceinline__ float reference_of(float m) { return m == kMinusInfinity ? 0.f : m; }

template <class T> __device__ __forceinline__ float exp_of(float difference) {
  if constexpr (sizeof(T) == 4) return expf(difference);
  return device::exp(difference);
}

// What is known of some elements z of a row, relative to its maximum.
struct Sums {
  float m;  // max z
  float s;  // sum of exp(z - m)
  int at;   // the first vector that holds the largest logit
  // kGeneral only:
  float top;  // the largest logit, before softcap, which may make different logits equal
  float w;    // sum of class weights
  float a;    // sum of weight * (z - m)
  float e;    // sum of 2^(z L - c) * (z L - c)

  // The same elements, relative to a larger maximum.
  template <bool kGeneral> __device__ __forceinline__ void rebase(float largest) {
    if (m == largest) return;
    const float d = m - largest, f = m == kMinusInfinity ? 0.f : expf(d);
    if constexpr (kGeneral) {
      e = f == 0.f ? 0.f : f * (e + d * s);
      if (w != 0.f) a += d * w;
    }
    s *= f;
    m = largest;
  }
};

__device__ __forceinline__ Sums no_elements() { return {kMinusInfinity, 0.f, kNowhere, kMinusInfinity, 0.f, 0.f, 0.f}; }

// Before anything is summed: one maximum for aligned groups of `lanes` threads, so that their sums need no rescaling.
template <bool kGeneral> __device__ __forceinline__ void share_max(Sums& x, int lanes) {
  float m = x.m;
  for (int d = lanes / 2; d > 0; d /= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, d));
  if (!kGeneral && x.m != m) x.at = kNowhere;
  x.m = m;
}

// Combines the sums of aligned groups of `lanes` threads, a power of two; every one of them gets the result. Called by
// the whole warp.
template <bool kGeneral> __device__ __forceinline__ Sums combine(Sums x, int lanes) {
  float m = x.m, top = kGeneral ? x.top : x.m;
  for (int d = lanes / 2; d > 0; d /= 2) {
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, d));
    if constexpr (kGeneral) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, d));
  }
  if ((kGeneral ? x.top : x.m) != (kGeneral ? top : m)) x.at = kNowhere;
  x.top = top;
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

  template <class T, bool kGeneral> __device__ __forceinline__ float capped(float u) const {
    if constexpr (kGeneral) return cap != 0.f ? cap * tanh_of<T>(u * inverse_cap) : u;
    return u;
  }
};

// Adds vector i of a row, whose capped elements are z, to sums whose maximum is no smaller than theirs.
template <class T, bool kGeneral> __device__ __forceinline__ void add(Sums& x, const float (&z)[Row<T>::N], int i,
                                                                      const Row<T>& row, const Options& o,
                                                                      const void* class_weight) {
  constexpr int N = Row<T>::N;
  const float c = reference_of(x.m);
  float s[2] = {0.f, 0.f};  // two chains
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float d = z[n] - c, e = exp_of<T>(d);
    s[n % 2] += e;
    if constexpr (kGeneral) {
      if (e != 0.f) x.e += e * d;
      if (o.spread != 0.f && row.has(row.first_column(i) + n)) {
        const float w = real_at(class_weight, row.first_column(i) + n, 1.f);
        x.w += w;
        x.a += w * (z[n] - x.m);
      }
    }
  }
  x.s += s[0] + s[1];
}

// The maximum of a vector, found before softcap, which keeps the order.
template <class T> __device__ __forceinline__ float max_of(const Packed& x) {
  float m = element<T>(x, 0);
#pragma unroll
  for (int n = 1; n < Row<T>::N; ++n) m = fmaxf(m, element<T>(x, n));
  return m;
}

// The capped elements of vector i; -inf outside the row.
template <class T, bool kGeneral> __device__ __forceinline__ void unpack(const Packed& x, int i, const Row<T>& row,
                                                                         const Options& o, float (&z)[Row<T>::N]) {
#pragma unroll
  for (int n = 0; n < Row<T>::N; ++n) {
    z[n] = o.capped<T, kGeneral>(element<T>(x, n));
    if (kGeneral && !row.has(row.first_column(i) + n)) z[n] = kMinusInfinity;
  }
}

// dlogits[j] = (k * e_j + q * e_j * log p_j - s * w_j - onehot_j * t) * cap'(logit_j), where e_j = exp(z_j - c).
struct Gradient {
  float c;        // reference of the exponentials
  float k;        // factor of e_j
  float s;        // of class weights, from label smoothing
  float t;        // at the target
  float q;        // of e_j * log p_j
  float m, rest;  // log p_j = (z_j - m) - rest
  int hot;        // the target's vector, or -1
  int place;      // its element there
  bool zero;      // the row is ignored

  // The gradient of vector i of a row, whose capped elements are z.
  template <class T, bool kGeneral> __device__ __forceinline__ Packed of(const float (&z)[Row<T>::N], int i,
                                                                         const Row<T>& row, const Options& o,
                                                                         const void* class_weight) const {
    constexpr int N = Row<T>::N;
    float g[N] = {};
    if (!zero) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float d = z[n] - c, e = exp_of<T>(d);
        g[n] = k * e;
        if constexpr (kGeneral) {
          if (q != 0.f && e != 0.f) g[n] += q * e * (d - rest);
          const int column = row.first_column(i) + n;
          if (s != 0.f && row.has(column)) g[n] -= s * real_at(class_weight, column, 1.f);
        }
      }
      if (i == hot)
#pragma unroll
        for (int n = 0; n < N; ++n) g[n] -= n == place ? t : 0.f;
      if constexpr (kGeneral)
        if (o.cap != 0.f)
#pragma unroll
          for (int n = 0; n < N; ++n) g[n] *= 1.f - z[n] * o.inverse_cap * (z[n] * o.inverse_cap);
    }
    return packed<T>(g);
  }

  __device__ __forceinline__ void aim(Label label, int64_t target, int phase, int elements) {
    zero = label == Label::ignored;
    const int column = label == Label::counts ? static_cast<int>(target) + phase : 0;
    hot = label == Label::counts ? column / elements : -1;
    place = column % elements;
  }
};

}  // namespace warpsmith::cross_entropy
