#pragma once
#include "kernels/activation/activation.h"
#include "kernels/activation/elementwise.cuh"

// dropout_add as an elementwise op. Every thread also reads the seed: 16 bytes, from the L1 cache.
namespace warpsmith::activation {

struct DropoutScale {
  const int64_t* seed;
  uint32_t threshold;
  float scale;

  // Scales the elements that the mask keeps and zeroes the others. Without a seed nothing changes.
  template <int N> __device__ __forceinline__ void apply_to(float (&x)[N], int64_t element) const {
    static_assert(N <= kDropoutLanes && kDropoutLanes % N == 0, "a vector within one call");
    if (!seed) return;
    const auto key = static_cast<uint64_t>(device::load(seed)), offset = static_cast<uint64_t>(device::load(seed + 1));
    const PhiloxCounter lanes = dropout_lanes(key, offset, static_cast<uint64_t>(element) / kDropoutLanes);
    // Collects the mask as bits: an index that is no constant would move the words to local memory.
    uint32_t keep = 0;
#pragma unroll
    for (int lane = 0; lane < kDropoutLanes; ++lane) keep |= (dropout_keeps(lanes, lane, threshold) ? 1u : 0u) << lane;
    if constexpr (N < kDropoutLanes) keep >>= static_cast<uint32_t>(element) % kDropoutLanes;
#pragma unroll
    for (int k = 0; k < N; ++k) x[k] = keep >> k & 1 ? x[k] * scale : 0.0f;
  }
};

// Reads x and residual, writes y: 3 * sizeof(T) bytes per element.
struct DropoutAddForward {
  static constexpr int I = 2, O = 1;
  DropoutScale dropout;
  template <class T, int N>
  __device__ __forceinline__ void apply(const float (&x)[I][N], float (&y)[O][N], int64_t element) const {
#pragma unroll
    for (int k = 0; k < N; ++k) y[0][k] = x[0][k];
    dropout.apply_to(y[0], element);
#pragma unroll
    for (int k = 0; k < N; ++k) y[0][k] += x[1][k];
  }
};

// Reads dy, writes dx: 2 * sizeof(T) bytes per element.
struct DropoutAddBackward {
  static constexpr int I = 1, O = 1;
  DropoutScale dropout;
  template <class T, int N>
  __device__ __forceinline__ void apply(const float (&x)[I][N], float (&y)[O][N], int64_t element) const {
#pragma unroll
    for (int k = 0; k < N; ++k) y[0][k] = x[0][k];
    dropout.apply_to(y[0], element);
  }
};

inline DropoutScale scale_of(const Dropout& d) { return {d.seed, d.threshold, static_cast<float>(d.scale)}; }

}  // namespace warpsmith::activation
