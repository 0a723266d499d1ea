#pragma once
#include <cstdint>

#include "device/vector.h"

// The sums of a row's elements, and how to combine them.
namespace warpsmith::cross_entropy {

using device::Vector;

// Which terms a kernel computes: the loss of plain logits; also the entropy and its gradient; or all of these with
// softcap and label smoothing. Each step costs instructions per element.
enum class Terms : uint8_t { plain, entropy, general };

constexpr float kMinusInfinity = -__builtin_huge_valf();
constexpr int kNowhere = 0x7fffffff;
constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

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

// The sums of some elements z of a row, relative to their maximum. `at` is computed only on request.
struct Sums {
  float m;    // max z
  float s;    // sum of exp(z - m)
  float low;  // float32 rows: the rounding error of s
  int at;     // the first vector that holds the largest logit
  float e;    // with entropy or general terms: sum of exp(z - m) * (z - m)
  // Of general terms only:
  float top;  // the largest logit before softcap; softcap may make different logits equal
  float w;    // sum of class weights
  float a;    // sum of weight * (z - m)

  template <class T> __device__ __forceinline__ void set(const ExponentialSum<T>& sum) {
    s = sizeof(T) == 4 ? sum.s : sum.s + sum.other;
    low = sizeof(T) == 4 ? sum.other : 0.f;
  }

  __device__ __forceinline__ Sums whole() const {
    Sums x = *this;
    x.s += low;
    return x;
  }

  // Stored as one or two pieces of 16 bytes. 16-bit rows have no `low`; with Terms::entropy the entropy takes its
  // place.
  template <class T, Terms kTerms> static constexpr bool kLowIsEntropy = sizeof(T) == 2 && kTerms == Terms::entropy;
  template <class T, Terms kTerms> static constexpr int kPieces =
      kTerms == Terms::plain || kLowIsEntropy<T, kTerms> ? 1 : 2;
  template <class T, Terms kTerms> __device__ __forceinline__ Packed piece(int i) const {
    const float third = kLowIsEntropy<T, kTerms> ? e : low;
    if (i == 0) return {{__float_as_uint(m), __float_as_uint(s), __float_as_uint(third), static_cast<uint32_t>(at)}};
    return {{__float_as_uint(w), __float_as_uint(a), __float_as_uint(e), __float_as_uint(top)}};
  }
  template <class T, Terms kTerms> __device__ __forceinline__ void take(int i, const Packed& x) {
    if (i == 0) {
      m = __uint_as_float(x.at[0]), s = __uint_as_float(x.at[1]);
      (kLowIsEntropy<T, kTerms> ? e : low) = __uint_as_float(x.at[2]);
      at = static_cast<int>(x.at[3]);
    } else {
      w = __uint_as_float(x.at[0]), a = __uint_as_float(x.at[1]), e = __uint_as_float(x.at[2]);
      top = __uint_as_float(x.at[3]);
    }
  }

  // Rescales the sums to a larger maximum.
  template <Terms kTerms> __device__ __forceinline__ void rebase(float largest) {
    if (m == largest) return;
    const float d = m - largest, f = m == kMinusInfinity ? 0.f : expf(d);
    if constexpr (kTerms != Terms::plain) e = f == 0.f ? 0.f : f * (e + d * s);
    if constexpr (kTerms == Terms::general)
      if (w != 0.f) a += d * w;
    s *= f, low *= f;
    m = largest;
  }
};

__device__ __forceinline__ Sums no_elements() {
  return {kMinusInfinity, 0.f, 0.f, kNowhere, 0.f, kMinusInfinity, 0.f, 0.f};
}

// Calls step(d) for the distances of a butterfly exchange among `lanes` adjacent threads (a power of two). Unrolled: a
// loop would cost more than its steps.
template <class Step> __device__ __forceinline__ void for_distances(int lanes, Step&& step) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2)
    if (d < lanes) step(d);
}

// Gives groups of `lanes` threads one maximum before they sum anything, so that their sums need no rescaling.
__device__ __forceinline__ void share_max(Sums& x, int lanes) {
  float m = x.m;
  for_distances(lanes, [&](int d) { m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, d)); });
  x.m = m;
}

// Combines the sums of groups of `lanes` threads. Every thread gets the result. The whole warp must call it. `places`:
// `at` is wanted. kShared: x.m is already the same in all threads.
template <class T, Terms kTerms, bool kShared> __device__ __forceinline__ Sums combine(Sums x, int lanes, bool places) {
  constexpr bool kGeneral = kTerms == Terms::general;
  if constexpr (kGeneral || !kShared) {
    float m = x.m, top = kGeneral ? x.top : x.m;
    for_distances(lanes, [&](int d) {
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, d));
      if constexpr (kGeneral) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, d));
    });
    if ((kGeneral ? x.top : x.m) != (kGeneral ? top : m)) x.at = kNowhere;
    x.top = top;
    x.rebase<kTerms>(m);
  }
  for_distances(lanes, [&](int d) {
    if (places) {
      const int other = __shfl_xor_sync(0xffffffffu, x.at, d);
      x.at = other < x.at ? other : x.at;
    }
    const float lost = add_exactly(x.s, __shfl_xor_sync(0xffffffffu, x.s, d));
    if constexpr (sizeof(T) == 4) x.low = x.low + __shfl_xor_sync(0xffffffffu, x.low, d) + lost;
    if constexpr (kTerms != Terms::plain) x.e += __shfl_xor_sync(0xffffffffu, x.e, d);
    if constexpr (kGeneral) {
      x.w += __shfl_xor_sync(0xffffffffu, x.w, d);
      x.a += __shfl_xor_sync(0xffffffffu, x.a, d);
    }
  });
  return x;
}

}  // namespace warpsmith::cross_entropy
