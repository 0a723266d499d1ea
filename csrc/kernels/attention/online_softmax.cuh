#pragma once
#include <cmath>
#include <type_traits>

#include "device/convert.h"
#include "device/halves.h"
#include "device/math.h"
#include "device/reduce.h"

// An online softmax with lazy rescaling, for rows whose scores arrive block by block in the registers of a wgmma
// warpgroup.
namespace warpsmith::attention {

// A row's probabilities are p = 2^(scale * s - base). Any base gives the same quotient o / sum as long as nothing
// overflows. So the base need not follow the row's maximum: it is raised only when a sum of probabilities shows that it
// lags far behind. The exponentials then wait neither for the maximum nor for the rescaling of o. Measured on an H200
// at head dimension 128: 838 instead of 712 TFLOP/s (docs/design/2026-11-22-attention-sm90.md).
//
// A raised base is maximum + kHeadroom. If a thread's part of a row's sum reaches kLargestSum, the base is raised and
// the block's exponentials are computed again.
//   bfloat16: p has the exponent range of float. It starts at 2^-30 and may grow by 2^90.
//   float16:  p starts at 2^6 or less, 20 binary orders of magnitude above the rounding of subnormals. A sum below
//             61440 keeps every p finite.
template <class T> constexpr float kHeadroom = std::is_same_v<T, bfloat16> ? 30.0f : -6.0f;
template <class T> constexpr float kLargestSum = std::is_same_v<T, bfloat16> ? 0x1p60f : 61440.0f;

constexpr float kLog2e = 1.44269504088896341f, kLn2 = 0.693147180559945309f;

// The state of a thread's two rows: lane / 4 and lane / 4 + 8 of its warp's 16. The four lanes of a quad share them.
template <class T, int kBlockKeys> struct OnlineSoftmax {
  static constexpr int kScores = kBlockKeys / 2;
  using Scores = float[kScores];
  using Probabilities = uint32_t[kBlockKeys / 16][4];  // A operands of one wgmma each

  float base[2], sum[2];  // `sum`: this thread's partial sum, until total()

  __device__ __forceinline__ void begin() {
    base[0] = base[1] = -INFINITY;
    sum[0] = sum[1] = 0.0f;
  }

  // Rows that have seen no key get a base under which their probabilities are 0 and not NaN.
  __device__ __forceinline__ void give_base() {
#pragma unroll
    for (float& b : base)
      if (b == -INFINITY) b = 0.0f;
  }

  // Raises the base to this block's maximum. Everything summed under the old base must be multiplied by `factor`.
  __device__ __forceinline__ void raise_base(const Scores& s, float scale, float (&factor)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = s[2 * r];
#pragma unroll
      for (int i = 0; i < kScores; i += 4) largest = fmaxf(largest, fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      const float raised = fmaxf(base[r], largest * scale + kHeadroom<T>);
      factor[r] = raised == -INFINITY ? 1.0f : device::exp2(base[r] - raised);
      base[r] = raised;
      sum[r] *= factor[r];
    }
  }

  // Raises the base if the block's maximum in some row of the warp exceeds the maximum that the base was raised for by
  // more than kSlack. Returns false if not; `factor` is then not set. p stays below 2^14 in float16 and below 2^-22 in
  // bfloat16.
  static constexpr float kSlack = 8.0f;
  __device__ __forceinline__ bool follow_maxima(const Scores& s, float scale, float (&factor)[2]) {
    bool lags = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = s[2 * r];
#pragma unroll
      for (int i = 0; i < kScores; i += 4) largest = fmaxf(largest, fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
      lags |= largest * scale + (kHeadroom<T> - kSlack) > base[r];
    }
    if (!__any_sync(0xffffffffu, lags)) return false;
    raise_base(s, scale, factor);
    return true;
  }

  // Turns s into p in place and adds p to the sums. A row that has seen no key keeps a sum of 0.
  __device__ __forceinline__ void exponentials_in_place(Scores& s, float scale) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float b = base[r] == -INFINITY ? 0.0f : base[r];  // -inf - -inf would be NaN
      float partial[2] = {0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < kScores; i += 4)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[i + 2 * r + e];
          x = device::exp2(x * scale - b);
          partial[e] += x;
        }
      sum[r] += partial[0] + partial[1];
    }
  }
  static __device__ __forceinline__ void pack(const Scores& s, Probabilities& out) {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) out[i / 4][i % 4] = device::pack<T>(s[2 * i], s[2 * i + 1]);
  }

  // Writes packed p to `out` and the block's sums to `sums`, and changes neither s nor `sum`. kGated: `out` holds
  // gates of the pairs on entry (device/halves.h). They apply to p and not to the sums.
  template <bool kGated = false>
  __device__ __forceinline__ void exponentials(const Scores& s, float scale, Probabilities& out, float (&sums)[2]) {
    float partial[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
      float x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[e] = device::exp2(s[i + e] * scale - base[e / 2]);
        partial[e] += x[e];
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
  // Recovers the gates from gated p, so that p can be computed again under a higher base. A p that is 0 under the old
  // base is also 0 under a higher one.
  static __device__ __forceinline__ void gates_again(Probabilities& p) {
#pragma unroll
    for (auto& four : p)
#pragma unroll
      for (uint32_t& pair : four) pair = device::gates_again<T>(pair);
  }
  // A row without a base has infinite p. NaN compares false, so it counts as outgrown.
  static __device__ __forceinline__ bool outgrown(const float (&sums)[2]) {
    return !(sums[0] < kLargestSum<T> && sums[1] < kLargestSum<T>);
  }

  // Makes `sum` the sum of the whole row, in every lane of the quad.
  __device__ __forceinline__ void total() {
    sum[0] = device::group_sum<4>(sum[0]);
    sum[1] = device::group_sum<4>(sum[1]);
  }
  // The natural logarithm of row r's sum of exponentials, after total().
  __device__ __forceinline__ float lse(int r) const {
    return sum[r] != 0.0f ? (base[r] + device::log2(sum[r])) * kLn2 : -INFINITY;
  }
};

}  // namespace warpsmith::attention
