#pragma once
#include <cstdint>

#include "device/vector.h"
#include "kernels/optim/rank_mean.h"

// The mean of the ranks' parts, in rank order. Reads each part once and writes each output once; an output may lie in
// the memory of another GPU. One block a tile of kThreads * kVectors * N elements; no thread waits for another.
namespace warpsmith::rank_mean {

constexpr int kThreads = 256;
constexpr int kVectors = 2;  // of N elements, that a thread has in flight

// N elements as floats, by loads of at most 16 bytes.
template <int N, class S> __device__ __forceinline__ void load_floats(const S* from, float (&x)[N]) {
  constexpr int kPiece = N < device::kElementsPer16Bytes<S> ? N : device::kElementsPer16Bytes<S>;
#pragma unroll
  for (int piece = 0; piece < N; piece += kPiece) {
    const auto v = device::load_vector<kPiece, device::Cache::streaming>(from + piece);
#pragma unroll
    for (int i = 0; i < kPiece; ++i) x[piece + i] = device::to_float(v.at[i]);
  }
}

template <int N, class S> __device__ __forceinline__ void store_floats(S* to, const float (&x)[N]) {
  constexpr int kPiece = N < device::kElementsPer16Bytes<S> ? N : device::kElementsPer16Bytes<S>;
#pragma unroll
  for (int piece = 0; piece < N; piece += kPiece) {
    device::Vector<S, kPiece> v;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) v.at[i] = device::from_float<S>(x[piece + i]);
    device::store_vector(to + piece, v);
  }
}

// What rank s gave of the N elements at `at`, as it travels.
template <class T, int N>
__device__ __forceinline__ void load_part(const RankMeanParams& p, int s, int64_t at, float (&x)[N]) {
  if (s != p.rank || p.own == nullptr) {
    load_floats(static_cast<const T*>(p.parts) + s * p.stride + at, x);
  } else if (p.own_dtype == p.dtype) {
    load_floats(static_cast<const T*>(p.own) + at, x);
  } else {
    load_floats(static_cast<const float*>(p.own) + at, x);
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = device::to_float(device::from_float<T>(x[i]));
  }
}

// The means of V vectors of N elements, kThreads * N apart, the first at `at`.
template <class T, int N, int V> __device__ __forceinline__ void mean_at(const RankMeanParams& p, int64_t at) {
  constexpr int kWidth = kThreads * N;
  float sums[V][N];
#pragma unroll
  for (int v = 0; v < V; ++v)
    if (at + v * kWidth + N <= p.count) load_part<T>(p, 0, at + v * kWidth, sums[v]);
  for (int s = 1; s < p.ranks; ++s) {
    float x[V][N];
#pragma unroll
    for (int v = 0; v < V; ++v)
      if (at + v * kWidth + N <= p.count) load_part<T>(p, s, at + v * kWidth, x[v]);
#pragma unroll
    for (int v = 0; v < V; ++v)
      if (at + v * kWidth + N <= p.count) {
#pragma unroll
        for (int i = 0; i < N; ++i) sums[v][i] += x[v][i];
      }
  }
  const auto ranks = static_cast<float>(p.ranks);
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if (at + v * kWidth + N > p.count) continue;
#pragma unroll
    for (int i = 0; i < N; ++i) sums[v][i] = device::to_float(device::from_float<T>(sums[v][i] / ranks));
    for (int o = 0; o < p.out_count; ++o) {
      if (p.outs[o].dtype == p.dtype)
        store_floats(static_cast<T*>(p.outs[o].data) + at + v * kWidth, sums[v]);
      else
        store_floats(static_cast<float*>(p.outs[o].data) + at + v * kWidth, sums[v]);
    }
  }
}

template <class T, int N> __global__ void __launch_bounds__(kThreads)
    rank_mean(const __grid_constant__ RankMeanParams p) {
  mean_at<T, N, kVectors>(p, (int64_t{blockIdx.x} * kThreads * kVectors + threadIdx.x) * N);
  if constexpr (N > 1) {  // the elements after the last vector
    const int64_t rest = p.count / N * N + threadIdx.x;
    if (blockIdx.x == gridDim.x - 1 && rest < p.count) mean_at<T, 1, 1>(p, rest);
  }
}

}  // namespace warpsmith::rank_mean
