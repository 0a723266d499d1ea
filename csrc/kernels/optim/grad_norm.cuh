#pragma once
#include <cstdint>
#include <type_traits>

#include "device/reduce.h"
#include "device/vector.h"
#include "kernels/optim/grad_norm.h"

// The norm of any number of tensors of any mix of dtypes: one block a chunk writes a partial sum, one block adds them.
// Reads every element once, and 8 bytes a chunk twice over. Clipping: one block a chunk multiplies it in place (reads
// and writes every element), or returns at once where the factor is 1.
namespace warpsmith::grad_norm {

constexpr int kThreads = 256;
constexpr int kFinishThreads = 512;
constexpr int kVectors = 4;  // 16-byte vectors that a thread has in flight

struct LargestOrNan {
  __device__ __forceinline__ float operator()(float a, float b) const { return largest(a, b); }
  static constexpr float identity = 0.0f;
};

template <NormOrder order> __device__ __forceinline__ float add(float sum, float x) {
  if constexpr (order == NormOrder::infinity) return largest(fabsf(x), sum);
  return order == NormOrder::two ? sum + x * x : sum + fabsf(x);
}

// What a thread adds of a chunk: vectors a block's width apart, each of kVectors to a sum of its own.
template <class T, int N, NormOrder order> __device__ __forceinline__ float sum_of(const T* x, int elems) {
  float sums[kVectors] = {};
  constexpr int kWidth = kThreads * N;
  const int whole = elems / N * N;
  for (int begin = static_cast<int>(threadIdx.x) * N; begin < whole; begin += kVectors * kWidth) {
    device::Vector<T, N> v[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k)
      if (begin + k * kWidth < whole) v[k] = device::load_vector<N>(x + begin + k * kWidth);
#pragma unroll
    for (int k = 0; k < kVectors; ++k)
      if (begin + k * kWidth < whole) {
#pragma unroll
        for (int i = 0; i < N; ++i) sums[k] = add<order>(sums[k], device::to_float(v[k].at[i]));
      }
  }
  if (const int rest = whole + static_cast<int>(threadIdx.x); rest < elems)  // fewer than N
    sums[0] = add<order>(sums[0], device::to_float(device::load(x + rest)));
  if constexpr (order == NormOrder::infinity)
    return largest(largest(sums[0], sums[1]), largest(sums[2], sums[3]));
  else
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// A chunk of the block's: visit.template operator()<T>(data, elems).
template <class Visit>
__device__ __forceinline__ void visit_chunk(const NormTensor* tensors, const ListChunk* chunks, Visit&& visit) {
  const ListChunk at = chunks[blockIdx.x];
  const NormTensor& t = tensors[at.tensor];
  const int64_t begin = int64_t{at.chunk} * t.chunk_elems;
  const int elems = static_cast<int>(t.numel - begin < t.chunk_elems ? t.numel - begin : t.chunk_elems);
  switch (t.dtype) {
    case Dtype::float32: visit(static_cast<float*>(t.data) + begin, elems); break;
    case Dtype::float16: visit(static_cast<float16*>(t.data) + begin, elems); break;
    default: visit(static_cast<bfloat16*>(t.data) + begin, elems);
  }
}

template <class T> __device__ __forceinline__ bool aligned(const T* x) {
  return reinterpret_cast<uintptr_t>(x) % 16 == 0;
}

template <NormOrder order> __global__ void __launch_bounds__(kThreads)
    partial_sums(const __grid_constant__ GradNormParams p) {
  WARPSMITH_SHARED(float, scratch, kThreads / 32);
  float sums[1] = {};
  visit_chunk(p.tensors, p.chunks, [&](const auto* x, int elems) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(x)>>;
    sums[0] = aligned(x) ? sum_of<T, device::kElementsPer16Bytes<T>, order>(x, elems) : sum_of<T, 1, order>(x, elems);
  });
  if constexpr (order == NormOrder::infinity)
    device::block_reduce<kThreads>(sums, scratch, LargestOrNan());
  else
    device::block_reduce<kThreads>(sums, scratch, device::Sum());
  if (threadIdx.x == 0) device::store(p.partials + blockIdx.x, static_cast<double>(sums[0]));
}

// One block.
static __global__ void __launch_bounds__(kFinishThreads) finish(const __grid_constant__ GradNormParams p) {
  WARPSMITH_SHARED(double, sums, kFinishThreads);
  const auto combine = [&](double a, double b) { return p.order == NormOrder::infinity ? largest(a, b) : a + b; };
  double sum = 0;
  for (int64_t i = threadIdx.x; i < p.chunk_count; i += kFinishThreads)
    sum = combine(sum, device::load(p.partials + i));
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (unsigned half = kFinishThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) sums[threadIdx.x] = combine(sums[threadIdx.x], sums[threadIdx.x + half]);
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  device::store(p.power_sum, sums[0]);
  device::store(static_cast<float*>(p.norm), static_cast<float>(norm_of(sums[0], p.order)));
}

template <class T, int N> __device__ __forceinline__ void scale(T* x, int elems, float factor) {
  const int whole = elems / N * N;
  constexpr int kWidth = kThreads * N;
  for (int begin = static_cast<int>(threadIdx.x) * N; begin < whole; begin += kVectors * kWidth) {
    device::Vector<T, N> v[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k)
      if (begin + k * kWidth < whole) v[k] = device::load_vector<N>(x + begin + k * kWidth);
#pragma unroll
    for (int k = 0; k < kVectors; ++k)
      if (begin + k * kWidth < whole) {
#pragma unroll
        for (int i = 0; i < N; ++i) v[k].at[i] = device::from_float<T>(device::to_float(v[k].at[i]) * factor);
        device::store_vector(x + begin + k * kWidth, v[k]);
      }
  }
  if (const int rest = whole + static_cast<int>(threadIdx.x); rest < elems)
    device::store(x + rest, device::from_float<T>(device::to_float(device::load(x + rest)) * factor));
}

static __global__ void __launch_bounds__(kThreads) clip(const __grid_constant__ ClipParams p) {
  const float factor = clip_factor(device::load(static_cast<const float*>(p.norm)), p.max_norm);
  if (factor == 1.0f) return;
  visit_chunk(p.tensors, p.chunks, [&](auto* x, int elems) {
    using T = std::remove_pointer_t<decltype(x)>;
    if (aligned(x))
      scale<T, device::kElementsPer16Bytes<T>>(x, elems, factor);
    else
      scale<T, 1>(x, elems, factor);
  });
}

}  // namespace warpsmith::grad_norm
