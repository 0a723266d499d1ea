#pragma once
#include <cstdint>
#include <type_traits>

#include "device/convert.h"
#include "device/math.h"
#include "kernels/cross_entropy/cross_entropy.h"
#include "kernels/cross_entropy/sums.cuh"

// What the cross_entropy kernels share: options, the sums of an element and its gradient.
namespace warpsmith::cross_entropy {

template <class T> __device__ __forceinline__ float tanh_of(float x) {
  if constexpr (sizeof(T) == 4) return tanhf(x);
  return device::tanh(x);
}

// Softcap and entropies need the exponent itself, so that only plain terms may be fused.
template <class T, Terms kTerms> using Exponential = tiles::Exponential<T, kTerms == Terms::plain>;

__device__ __forceinline__ float real_at(const void* p, int64_t i, float otherwise) {
  return p ? device::load(static_cast<const float*>(p) + i) : otherwise;
}

enum class Label : uint8_t { counts, ignored, bad };

__device__ __forceinline__ Label label_of(int64_t target, int64_t classes, int64_t ignore_index) {
  if (target == ignore_index) return Label::ignored;
  return static_cast<uint64_t>(target) < static_cast<uint64_t>(classes) ? Label::counts : Label::bad;
}

// The options in the form in which the kernels use them.
struct Options {
  float cap, inverse_cap;  // 0: no softcap
  float keep;              // 1 - label_smoothing
  float spread;            // label_smoothing / classes
  float z_loss;

  explicit Options(const CrossEntropyParams& p)
      : cap(static_cast<float>(p.softcap)),
        inverse_cap(p.softcap != 0 ? static_cast<float>(1 / p.softcap) : 0.f),
        keep(static_cast<float>(1 - p.label_smoothing)),
        spread(static_cast<float>(p.label_smoothing / static_cast<double>(p.classes))),
        z_loss(static_cast<float>(p.z_loss)) {}

  template <class T, Terms kTerms> __device__ __forceinline__ float capped(float u) const {
    if constexpr (kTerms == Terms::general) return cap != 0.f ? cap * tanh_of<T>(u * inverse_cap) : u;
    return u;
  }
  // The derivative of the softcap at a capped element z: 1 - (z / cap)^2. It is computed from the distance to the cap,
  // which is an exact difference. Near the cap, 1 minus a square would be mostly rounding error.
  __device__ __forceinline__ float slope(float z) const {
    const float left = (cap - fabsf(z)) * inverse_cap;
    return left * (2.f - left);
  }
};

// Adds vector i of a row to its sums. z: the vector's capped elements, none larger than x.m. `exponential` is that of
// x.m. `sum` is stored to x.s later and is in the units of `exponential`.
template <class T, Terms kTerms>
__device__ __forceinline__ void add(Sums& x, ExponentialSum<T>& sum, const Exponential<T, kTerms>& exponential,
                                    const float (&z)[Row<T>::N], int i, const Row<T>& row, const Options& o,
                                    const void* class_weight) {
  constexpr int N = Row<T>::N;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float e = exponential(z[n]);
    sum.add(e, n);
    if constexpr (kTerms == Terms::general) {
      if (e != 0.f) x.e += e * (z[n] - exponential.offset);
      if (o.spread != 0.f && row.has(row.first_column(i) + n)) {
        const float w = real_at(class_weight, row.first_column(i) + n, 1.f);
        x.w += w;
        x.a += w * (z[n] - x.m);
      }
    }
  }
}

// The same sums as add() if no option but the entropy is wanted, in a quarter of the instructions. Elements outside the
// row are -inf.
template <class T> struct EntropySums {
  static constexpr float kLowest = -3e38f;  // finite stand-in for -inf: its product with an exponential of 0 is 0
  Exponential<T, Terms::plain> exponential;
  ExponentialSum<T> sum;
  float weighted[2] = {};  // sums of exponential times argument

  __device__ __forceinline__ explicit EntropySums(float m) : exponential(m) {}

  // kFinite: assumes that no element is -inf, as is usual inside a row. If one is, the sums are undefined().
  template <bool kFinite> __device__ __forceinline__ void add(const Packed& held) {
#pragma unroll
    for (int n = 0; n < Row<T>::N; ++n) {
      const float x = exponential.argument(element<T>(held, n)), e = exponential.of_argument(x);
      sum.add(e, n);
      weighted[n % 2] = fmaf(e, kFinite ? x : fmaxf(x, kLowest), weighted[n % 2]);
    }
  }
  __device__ __forceinline__ bool undefined() const { return isnan(weighted[0] + weighted[1]); }

  // x.m must be the maximum with which these sums were made.
  __device__ __forceinline__ void store(Sums& x) const {
    x.set(sum);
    const float unit = exponential.unit(x.m), zero = x.m == kMinusInfinity ? 0.f : exponential.argument(x.m);
    const float all = weighted[0] + weighted[1], shift = __fmul_rn(zero, x.s);  // one class: the entropy is exactly 0
    x.e = (all - shift) * exponential.kUnits / unit;
    x.s /= unit;
  }
};

// The capped elements of vector i. Elements outside the row are -inf.
template <class T, Terms kTerms> __device__ __forceinline__ void unpack(const Packed& x, int i, const Row<T>& row,
                                                                        const Options& o, float (&z)[Row<T>::N]) {
#pragma unroll
  for (int n = 0; n < Row<T>::N; ++n) {
    z[n] = o.capped<T, kTerms>(element<T>(x, n));
    if (kTerms == Terms::general && !row.has(row.first_column(i) + n)) z[n] = kMinusInfinity;
  }
}

// dlogits[j] = (k * e_j + q * e_j * log p_j - s * w_j - onehot_j * t) * cap'(logit_j), where e_j is the row's
// exponential of z_j.
template <class T, Terms kTerms> struct Gradient {
  static constexpr float kLeast = -128.f;  // finite stand-in for -inf: its product with an exponential of 0 is 0
  Exponential<T, kTerms> exponential;
  float k;     // factor of e_j
  float s;     // factor of the class weights, from label smoothing
  float t;     // subtracted at the target
  float q;     // factor of e_j * log p_j; with Terms::entropy of e_j * (z_j - m), and k contains the rest
  float rest;  // log p_j = (z_j - m) - rest
  int hot;     // index of the target's vector, or -1
  int place;   // the target's element in that vector
  bool zero;   // the row is ignored

  __device__ __forceinline__ explicit Gradient(float m) : exponential(m) {}

  // Adds the entropy's gradient. factor: of e^(z_j - m) * (log p_j + entropy).
  __device__ __forceinline__ void add_entropy(float factor, float entropy) {
    q = factor;
    k += q * (kTerms == Terms::entropy ? entropy - rest : entropy);
  }

  // Sets k so that the exponential of the maximum times k is exactly `factor` (float16 logits beyond 10,000: within one
  // ulp). The gradient of a row with one class is then exactly 0.
  __device__ __forceinline__ void set_factor(float factor, float m) {
    const float unit = exponential.unit(m);
    k = factor / unit;
    const float product = k * unit;
    if (product != factor) k = neighbour(k, fabsf(product) < fabsf(factor));
  }

  // Returns the row's logsumexp. Sets `rest`, which not every thread needs.
  __device__ __forceinline__ float find_lse(bool read, float m, float sum) {
    rest = logf(sum);
    return !read ? 0.f : m == -kMinusInfinity ? m : m + rest;
  }

  // The gradient of vector i of a row with capped elements z. `aimed`: the vector may contain the target.
  template <bool aimed = true> __device__ __forceinline__ Packed of(const float (&z)[Row<T>::N], int i,
                                                                    const Row<T>& row, const Options& o,
                                                                    const void* class_weight) const {
    constexpr int N = Row<T>::N;
    float g[N] = {};
    if (!aimed || !zero) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float x = exponential.argument(z[n]), e = exponential.of_argument(x);
        g[n] = (kTerms == Terms::entropy ? fmaf(q, fmaxf(x, kLeast), k) : k) * e;
        if constexpr (kTerms == Terms::general) {
          if (q != 0.f && e != 0.f) g[n] += q * e * (x - rest);
          const int column = row.first_column(i) + n;
          if (s != 0.f && row.has(column)) g[n] -= s * real_at(class_weight, column, 1.f);
        }
      }
      if (aimed && i == hot)
#pragma unroll
        for (int n = 0; n < N; ++n) g[n] -= n == place ? t : 0.f;
      if constexpr (kTerms == Terms::general) {
        if (o.cap != 0.f)
#pragma unroll
          for (int n = 0; n < N; ++n) g[n] *= o.slope(z[n]);
      }
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
