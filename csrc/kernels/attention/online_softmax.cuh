#pragma once
#include <cmath>
#include <type_traits>

#include "device/convert.h"
#include "device/halves.h"
#include "device/math.h"
#include "device/reduce.h"
#include "kernels/attention/attention.h"

// An online softmax with lazy rescaling, for rows whose scores arrive block by block in the registers of a wgmma
// warpgroup.
namespace warpsmith::attention {

// A row's probabilities are p = 2^(scale * s - base). Any base gives the same quotient o / sum as long as nothing
// overflows. So the base need not follow the row's maximum: it is raised only when a sum of probabilities shows that it
// lags far behind. The exponentials then wait neither for the maximum nor for the rescaling of o. Measured on an H200
// at head dimension 128: 838 instead of 712 TFLOP/s (docs/design/attention.md).
//
// A raised base is maximum + kHeadroom. If a thread's part of a row's sum reaches kLargestSum, the base is raised and
// the block's exponentials are computed again.
//   bfloat16: p has the exponent range of float. It starts at 2^-30 and may grow by 2^90.
//   float16:  p starts at 2^6 or less, 20 binary orders of magnitude above the rounding of subnormals. A sum below
//             61440 keeps every p finite.
template <class T> constexpr float kHeadroom = std::is_same_v<T, bfloat16> ? 30.0f : -6.0f;
template <class T> constexpr float kLargestSum = std::is_same_v<T, bfloat16> ? 0x1p60f : 61440.0f;

constexpr float kLog2e = 1.44269504088896341f, kLn2 = 0.693147180559945309f;

// A warp is far where the base of one of its rows is not within this, in units of log2. A float cannot hold such a base
// beside a sum, and a product that is scaled where the base is subtracted would not come out as 0 at the maximum. So a
// far warp rounds its logits, subtracts the maximum, and takes exponentials of what is left. |lse| of other rows is
// below kFarLse: bases are behind maxima by less than 100.
template <class T> constexpr float kFarBase = sizeof(T) == 2 ? 1024.0f : 128.0f;
static_assert((kFarBase<bfloat16> + 200.0f) * kLn2 < kFarLse<bfloat16>);
static_assert((kFarBase<float> + 40.0f) * kLn2 < kFarLse<float>);  // its bases are not behind maxima

// Whether a row's base is far. `maximum`: -inf where the row has seen no key. Without branches, as hot steps ask.
template <class T> __device__ __forceinline__ bool is_far(float base, float maximum, float near = kFarBase<T>) {
  return static_cast<bool>(static_cast<int>(maximum != -INFINITY) & static_cast<int>(!(fabsf(base) < near)));
}

// Bases of a warp that is far, or will be. `base`: the maximum of a row's logits if the warp is far, else that in units
// of log2 plus `headroom`; -inf: no key.
struct FarBase {
  float to_logits, headroom;  // to_logits: what turns scores into logits
  bool far;

  // The maximum of the logits, with that of a block's scores.
  __device__ __forceinline__ float raised(float base, float maximum) const {
    const float old = far || base == -INFINITY ? base : (base - headroom) * kLn2;
    return fmaxf(old, device::rounded_product(maximum, to_logits));
  }
  __device__ __forceinline__ float log2_base(float logit) const { return logit * kLog2e + headroom; }
  // The factor of what is summed under `base` if the maximum becomes `logit`.
  __device__ __forceinline__ float factor(float base, float logit) const {
    if (logit == -INFINITY) return 1.0f;
    if (base == -INFINITY) return 0.0f;
    return device::exp2(far ? (base - logit) * kLog2e : base - log2_base(logit));
  }
  // Whether the warp is far afterwards. It is no longer once all of its maxima are ordinary: the first blocks of a row
  // may hold nothing but the least number there is.
  template <class T>
  __device__ __forceinline__ bool remains_far(const float (&base)[2], const float (&maxima)[2]) const {
    const float first = raised(base[0], maxima[0]), second = raised(base[1], maxima[1]);
    return __any_sync(0xffffffffu, is_far<T>(log2_base(first), first) || is_far<T>(log2_base(second), second));
  }
};

// What a row ends with: the factor of its output, the logarithm of its sum, and what rounding took from that.
struct RowEnd {
  float factor, lse, rest;
};
// The end of a row in natural units: exponentials of the row sum to `sum` * 2^`headroom` relative to e^`maximum`.
// `sink`: one more logit; -inf: none.
__device__ __forceinline__ RowEnd far_end(float maximum, float sum, float headroom, float sink) {
  const float most = fmaxf(maximum, sink);
  if (most == -INFINITY) return {sum == 0.0f ? 0.0f : sum, sum == 0.0f ? -INFINITY : sum, 0.0f};
  if (most == INFINITY) return {NAN, INFINITY, 0.0f};
  const float factor = device::exp2((maximum - most) * kLog2e + headroom);
  const float whole = sum * factor + device::exp2((sink - most) * kLog2e);
  const float log_sum = device::log2(whole) * kLn2, lse = most + log_sum;
  return {factor / whole, lse, (most - lse) + log_sum};
}

// What the exponentials of a block are: 2^(scale * s - base).
struct Exponent {
  float scale, base[2];
};

// The state of a thread's two rows: lane / 4 and lane / 4 + 8 of its warp's 16. The four lanes of a quad share them.
template <class T, int kBlockKeys> struct OnlineSoftmax {
  static constexpr int kScores = kBlockKeys / 2;
  using Scores = float[kScores];
  using Probabilities = uint32_t[kBlockKeys / 16][4];  // A operands of one wgmma each
  // The base of a row that has seen no key. It is finite, so steps need no case for it: a masked score gives 0, and the
  // factor is 0 or 1. A visible score gives infinity, which outgrown() finds.
  static constexpr float kNoBase = -0x1p126f;

  float base[2], sum[2];  // base: where far(), the maximum of the logits. sum: this thread's part, until total()
  float near;             // bases of a warp that is not far are within this; negative: the warp is far

  __device__ __forceinline__ bool far() const { return near < 0.0f; }
  __device__ __forceinline__ void begin() {
    base[0] = base[1] = kNoBase;
    sum[0] = sum[1] = 0.0f;
    near = kFarBase<T>;
  }

  // The exponent of scores under the base, of a warp that is not far.
  __device__ __forceinline__ Exponent exponent(float scale) const { return {scale, {base[0], base[1]}}; }

  // Raises the base to this block's maximum and returns the exponent of the block. Everything summed under the old base
  // must be multiplied by `factor`. `to_logits`: what turns scores into logits; scale = to_logits * log2(e). Where the
  // warp is far afterwards, the scores become differences of logits from the maximum.
  //
  // A warp leaves for raise_far() by the maxima of its threads, not by those of rows: the vote then takes no longer
  // than the shuffles.
  __device__ __forceinline__ Exponent raise_base(Scores& s, float scale, float to_logits, float (&factor)[2]) {
    float maxima[2], raised[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      maxima[r] = own_maximum(s, r);
      raised[r] = maxima[r] * scale + kHeadroom<T>;
    }
    const int first = is_far<T>(raised[0], maxima[0], near), second = is_far<T>(raised[1], maxima[1], near);
    const bool leaves = __any_sync(0xffffffffu, first | second);
#pragma unroll
    for (int r = 0; r < 2; ++r) raised[r] = fmaxf(base[r], device::group_max<4>(raised[r]));
    if (leaves) [[unlikely]]
      return raise_far(s, scale, to_logits, maxima, factor);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      factor[r] = device::exp2(base[r] - raised[r]);
      base[r] = raised[r];
      sum[r] *= factor[r];
    }
    return exponent(scale);
  }
  // raise_base() of a warp that is far, or may be. `maxima`: of the thread's scores.
  __device__ __forceinline__ Exponent raise_far(Scores& s, float scale, float to_logits, const float (&maxima)[2],
                                                float (&factor)[2]) {
    const FarBase bases{to_logits, kHeadroom<T>, far()};
    float most[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!far() && base[r] == kNoBase) base[r] = -INFINITY;
      most[r] = device::group_max<4>(maxima[r]);
    }
    near = bases.template remains_far<T>(base, most) ? -1.0f : kFarBase<T>;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float logit = bases.raised(base[r], most[r]);
      factor[r] = bases.factor(base[r], logit);
      sum[r] *= factor[r];
      base[r] = far() ? logit : fmaxf(bases.log2_base(logit), kNoBase);
    }
    if (!far()) return exponent(scale);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float subtract = base[r] == -INFINITY ? 0.0f : base[r];  // -inf - -inf would be NaN
#pragma unroll
      for (int i = 2 * r; i < kScores; i += 4)
#pragma unroll
        for (int e = 0; e < 2; ++e) s[i + e] = device::rounded_product(s[i + e], to_logits) - subtract;
    }
    return {kLog2e, {kHeadroom<T>, kHeadroom<T>}};
  }
  // The maximum of a thread's scores of row r.
  static __device__ __forceinline__ float own_maximum(const Scores& s, int r) {
    float largest = s[2 * r];
#pragma unroll
    for (int i = 0; i < kScores; i += 4) largest = fmaxf(largest, fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
    return largest;
  }

  // Raises the base if the block's maximum in some row of the warp exceeds the maximum that the base was raised for by
  // more than kSlack. Returns false if not; `factor` is then not set. Else sets `exponent`. p stays below 2^14 in
  // float16 and below 2^-22 in bfloat16.
  static constexpr float kSlack = 8.0f;
  __device__ __forceinline__ bool follow_maxima(Scores& s, Exponent& exponent, float to_logits, float (&factor)[2]) {
    bool lags = far();
#pragma unroll
    for (int r = 0; r < 2; ++r) lags |= own_maximum(s, r) * exponent.scale + (kHeadroom<T> - kSlack) > base[r];
    if (!__any_sync(0xffffffffu, lags)) return false;
    exponent = raise_base(s, exponent.scale, to_logits, factor);
    return true;
  }

  // Turns s into p in place and adds p to the sums. A row that has seen no key keeps a sum of 0.
  __device__ __forceinline__ void exponentials_in_place(Scores& s, const Exponent& of) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float partial[2];
#pragma unroll
      for (int i = 0; i < kScores; i += 4)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[i + 2 * r + e];
          x = device::exp2(x * of.scale - of.base[r]);
          partial[e] = i == 0 ? x : partial[e] + x;
        }
      sum[r] += partial[0] + partial[1];
    }
  }
  static __device__ __forceinline__ void pack(const Scores& s, Probabilities& out) {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) out[i / 4][i % 4] = device::pack<T>(s[2 * i], s[2 * i + 1]);
  }

  // Writes packed p to `out` and the block's sums to `sums`, and does not change s. kGated: `out` holds gates of the
  // pairs on entry (device/halves.h). They apply to p and not to the sums.
  template <bool kGated = false>
  static __device__ __forceinline__ void exponentials(const Scores& s, const Exponent& of, Probabilities& out,
                                                      float (&sums)[2]) {
    float partial[4];
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
      float x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[e] = device::exp2(s[i + e] * of.scale - of.base[e / 2]);
        partial[e] = i == 0 ? x[e] : partial[e] + x[e];
      }
      uint32_t* pairs = out[i / 8] + i / 2 % 4;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t two = device::pack<T>(x[2 * r], x[2 * r + 1]);
        pairs[r] = kGated ? device::multiply_halves<T>(two, pairs[r]) : two;
      }
    }
    sums[0] = partial[0] + partial[1];
    sums[1] = partial[2] + partial[3];
  }
  // A row without a base has infinite p, if it sees a key. NaN compares false, so it counts as outgrown. A far warp has
  // no base in the units that exponentials() takes: it must raise its base in every step.
  __device__ __forceinline__ bool outgrown(const float (&sums)[2]) const {
    return far() || !(sums[0] < kLargestSum<T> && sums[1] < kLargestSum<T>);
  }

  // Makes `sum` the sum of the whole row, in every lane of the quad.
  __device__ __forceinline__ void total() {
    sum[0] = device::group_sum<4>(sum[0]);
    sum[1] = device::group_sum<4>(sum[1]);
  }
  // The natural logarithm of row r's sum of exponentials, after total(), of a warp that is not far.
  __device__ __forceinline__ float lse(int r) const {
    return sum[r] != 0.0f ? (base[r] + device::log2(sum[r])) * kLn2 : -INFINITY;
  }
};

}  // namespace warpsmith::attention
