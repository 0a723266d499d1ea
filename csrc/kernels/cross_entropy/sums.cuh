#pragma once
#include <cstdint>

#include "tiles/row_vectors.cuh"

// The sums of a row's elements, and how to combine them.
namespace warpsmith::cross_entropy {

using namespace tiles;

// Which terms a kernel computes: the loss of plain logits; also the entropy and its gradient; or all of these with
// softcap and label smoothing. Each step costs instructions per element.
enum class Terms : uint8_t { plain, entropy, general };

constexpr int kNowhere = 0x7fffffff;

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

// The sums of a row, as tiles::Exchange wants them. `places`: `at` is wanted. If x.m is the same in the whole warp
// (kShared), x.at is set only in the lane that holds it.
template <class T, Terms kTerms> struct SumsOfRow {
  using Sums = cross_entropy::Sums;
  static constexpr int kPieces = Sums::kPieces<T, kTerms>;
  bool places;

  __device__ __forceinline__ static Sums none() { return no_elements(); }
  __device__ __forceinline__ static Packed piece(const Sums& x, int i) { return x.piece<T, kTerms>(i); }
  __device__ __forceinline__ static void take(Sums& x, int i, const Packed& y) { x.take<T, kTerms>(i, y); }
  template <bool kShared> __device__ __forceinline__ Sums combine(const Sums& x, int lanes) const {
    return cross_entropy::combine<T, kTerms, kShared>(x, lanes, places);
  }
};

}  // namespace warpsmith::cross_entropy
