#pragma once
#include "device/platform.h"

// Reductions in a fixed order: the same inputs give the same bits on every run. Every result is in all participating
// lanes.
namespace warpsmith::device {

struct Sum {
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
  static constexpr float identity = 0.0f;
};

// max(NaN, number) is the number (fmaxf).
struct Max {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
  static constexpr float identity = -__builtin_huge_valf();
};

// Over aligned groups of `Lanes` consecutive lanes. Called by the whole warp, converged. A butterfly: every lane
// combines the same pairs, so all lanes of a group hold the same bits. Bits 0..log2(Lanes) from the widest distance
// down.
template <int Lanes, class Op> __device__ __forceinline__ float group_reduce(float v, Op op WARPSMITH_SITE) {
  static_assert(Lanes >= 1 && Lanes <= 32 && (Lanes & (Lanes - 1)) == 0, "a power of two of lanes");
#pragma unroll
  for (int distance = Lanes / 2; distance > 0; distance /= 2)
    v = op(v, __shfl_xor_sync(0xffffffffu, v, distance, 32 WARPSMITH_PASS_SITE));
  return v;
}

template <int Lanes> __device__ __forceinline__ float group_sum(float v WARPSMITH_SITE) {
  return group_reduce<Lanes>(v, Sum() WARPSMITH_PASS_SITE);
}
template <int Lanes> __device__ __forceinline__ float group_max(float v WARPSMITH_SITE) {
  return group_reduce<Lanes>(v, Max() WARPSMITH_PASS_SITE);
}
__device__ __forceinline__ float warp_sum(float v WARPSMITH_SITE) { return group_sum<32>(v WARPSMITH_PASS_SITE); }

// Over all `Threads` threads of a one-dimensional block (a multiple of 32), `N` values at once. `scratch` is shared
// memory of N * Threads / 32 floats. One barrier inside: what was written before the call is visible after it. The same
// scratch must not serve two calls in a row: loops alternate between two (the barrier of the call in between protects
// the first).
template <int Threads, int N, class Op>
__device__ __forceinline__ void block_reduce(float (&values)[N], float* scratch, Op op WARPSMITH_SITE) {
  static_assert(Threads % 32 == 0 && Threads <= 1024, "whole warps");
  constexpr int kWarps = Threads / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = group_reduce<32>(values[i], op WARPSMITH_PASS_SITE);
  if constexpr (kWarps == 1) {
    __syncwarp(0xffffffffu WARPSMITH_PASS_SITE);
  } else {
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < N; ++i) scratch[i * kWarps + warp] = values[i];
    }
    __syncthreads(WARPSMITH_PASS_ONLY_SITE);
    constexpr int kLanes = kWarps <= 2 ? 2 : kWarps <= 4 ? 4 : kWarps <= 8 ? 8 : kWarps <= 16 ? 16 : 32;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int from = lane % kLanes;
      const float v = from < kWarps ? scratch[i * kWarps + from] : Op::identity;
      values[i] = group_reduce<kLanes>(v, op WARPSMITH_PASS_SITE);
    }
  }
}

template <int Threads> __device__ __forceinline__ float block_sum(float v, float* scratch WARPSMITH_SITE) {
  float values[1] = {v};
  block_reduce<Threads>(values, scratch, Sum() WARPSMITH_PASS_SITE);
  return values[0];
}
template <int Threads> __device__ __forceinline__ float block_max(float v, float* scratch WARPSMITH_SITE) {
  float values[1] = {v};
  block_reduce<Threads>(values, scratch, Max() WARPSMITH_PASS_SITE);
  return values[0];
}

// group_sum for a number of lanes known only at run time: a power of two up to 32, equal in all lanes of the
// warp.
__device__ __forceinline__ float group_sum(float v, int lanes WARPSMITH_SITE) {
  for (int distance = lanes / 2; distance > 0; distance /= 2)
    v += __shfl_xor_sync(0xffffffffu, v, distance, 32 WARPSMITH_PASS_SITE);
  return v;
}

// Over a one-dimensional block of any number of whole warps. `scratch` is shared memory of 32 floats; barrier and reuse
// as for block_reduce.
__device__ __forceinline__ float block_sum(float v, float* scratch WARPSMITH_SITE) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  v = warp_sum(v WARPSMITH_PASS_SITE);
  if (lane == 0) scratch[warp] = v;
  __syncthreads(WARPSMITH_PASS_ONLY_SITE);
  return warp_sum(lane < warps ? scratch[lane] : 0.0f WARPSMITH_PASS_SITE);
}

}  // namespace warpsmith::device
