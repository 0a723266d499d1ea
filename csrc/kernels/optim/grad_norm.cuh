#pragma once
#include <cstdint>
#include <type_traits>

#include "device/reduce.h"
#include "device/vector.h"
#include "kernels/optim/grad_norm.h"

// The norm of any number of tensors of any mix of dtypes. One block per chunk writes a partial sum, then one block adds
// them. Reads every element once, and 8 bytes per chunk twice.
//
//   clip:    one block per chunk multiplies in place (reads and writes every element); factor 1: returns at once.
//   check:   the norm; only if it is not finite, one block per chunk counts the elements that are not (reads them all).
//            Of chunks with a known sum it reads the sum, and elements only if the sum is not finite.
//   unscale: multiplies in place, and counts elements that are not finite.
namespace warpsmith::grad_norm {

constexpr int kThreads = 256;
constexpr int kFinishThreads = 512;
constexpr int kVectors = 4;  // 16-byte vectors per thread in flight

struct LargestOrNan {
  __device__ __forceinline__ float operator()(float a, float b) const { return largest(a, b); }
  static constexpr float identity = 0.0f;
};

template <NormOrder order> __device__ __forceinline__ float add(float sum, float x) {
  if constexpr (order == NormOrder::infinity) return largest(fabsf(x), sum);
  return order == NormOrder::two ? sum + x * x : sum + fabsf(x);
}

// A thread's sum over a chunk, of elements times `factor`. It takes vectors a block's width apart, and sums each of its
// kVectors vectors separately.
template <class T, int N, NormOrder order>
__device__ __forceinline__ float sum_of(const T* x, int elems, float factor) {
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
        for (int i = 0; i < N; ++i) sums[k] = add<order>(sums[k], device::to_float(v[k].at[i]) * factor);
      }
  }
  if (const int rest = whole + static_cast<int>(threadIdx.x); rest < elems)  // fewer than N
    sums[0] = add<order>(sums[0], device::to_float(device::load(x + rest)) * factor);
  if constexpr (order == NormOrder::infinity)
    return largest(largest(sums[0], sums[1]), largest(sums[2], sums[3]));
  else
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Calls visit.template operator()<T>(data, elems) for a chunk of the block.
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
  if (p.known) {
    const double known = device::load(p.known + blockIdx.x);
    if (is_finite(known)) {
      if (threadIdx.x == 0) device::store(p.partials + blockIdx.x, known);
      return;
    }
  }
  float sums[1] = {};
  // The largest element needs no factor.
  const float factor = order != NormOrder::infinity && p.scale ? inverse_power_of_two(device::load(p.scale)) : 1.0f;
  visit_chunk(p.tensors, p.chunks, [&](const auto* x, int elems) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(x)>>;
    sums[0] = aligned(x) ? sum_of<T, device::kElementsPer16Bytes<T>, order>(x, elems, factor)
                         : sum_of<T, 1, order>(x, elems, factor);
  });
  if constexpr (order == NormOrder::infinity)
    device::block_reduce<kThreads>(sums, scratch, LargestOrNan());
  else
    device::block_reduce<kThreads>(sums, scratch, device::Sum());
  if (threadIdx.x == 0)
    device::store(p.partials + blockIdx.x, without_factor(static_cast<double>(sums[0]), factor, order));
}

// The sum over all chunks by one block, for all its threads.
static __device__ __forceinline__ double sum_of_chunks(const GradNormParams& p, double* sums) {
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
  return sums[0];
}

static __global__ void __launch_bounds__(kFinishThreads) finish(const __grid_constant__ GradNormParams p) {
  WARPSMITH_SHARED(double, sums, kFinishThreads);
  const double sum = sum_of_chunks(p, sums);
  if (threadIdx.x != 0) return;
  device::store(p.power_sum, sum);
  device::store(static_cast<float*>(p.norm), static_cast<float>(norm_of(sum, p.order)));
}

static __global__ void __launch_bounds__(kFinishThreads) finish_check(const __grid_constant__ GradCheckParams p) {
  WARPSMITH_SHARED(double, sums, kFinishThreads);
  const double sum = sum_of_chunks(p.norm, sums);
  const auto checked = check_norm<float>(sum, p.norm.order, device::load(p.scale), p.max_norm);
  if (!checked.finite)
    for (int64_t i = threadIdx.x; i < p.tensor_count; i += kFinishThreads) device::store(p.bad_counts + i, int64_t{0});
  if (threadIdx.x != 0) return;
  device::store(p.norm.power_sum, sum);
  device::store(static_cast<float*>(p.norm.norm), checked.norm);
  device::store(p.grad_scale, checked.grad_scale);
  device::store(p.found_inf, checked.finite ? 0.0f : 1.0f);
}

// Replaces each element by function(element).
template <class T, int N, class Function>
__device__ __forceinline__ void transform(T* x, int elems, Function&& function) {
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
        for (int i = 0; i < N; ++i) v[k].at[i] = function(v[k].at[i]);
        device::store_vector(x + begin + k * kWidth, v[k]);
      }
  }
  if (const int rest = whole + static_cast<int>(threadIdx.x); rest < elems)
    device::store(x + rest, function(device::load(x + rest)));
}

static __global__ void __launch_bounds__(kThreads) clip(const __grid_constant__ ClipParams p) {
  const float factor = clip_factor(device::load(static_cast<const float*>(p.norm)), p.max_norm);
  if (factor == 1.0f) return;
  visit_chunk(p.tensors, p.chunks, [&](auto* x, int elems) {
    using T = std::remove_pointer_t<decltype(x)>;
    const auto scaled = [&](T v) { return device::from_float<T>(device::to_float(v) * factor); };
    if (aligned(x))
      transform<T, device::kElementsPer16Bytes<T>>(x, elems, scaled);
    else
      transform<T, 1>(x, elems, scaled);
  });
}

// Adds the counts of a block's threads to the count of their tensor. A chunk's count is exact in float32.
static __device__ __forceinline__ bool add_bad(const ListChunk* chunks, int bad, float* scratch, int64_t* bad_counts) {
  const float all = device::block_sum<kThreads>(static_cast<float>(bad), scratch);
  if (threadIdx.x != 0 || all == 0.0f) return false;
  atomicAdd(reinterpret_cast<unsigned long long*>(bad_counts + chunks[blockIdx.x].tensor),
            static_cast<unsigned long long>(all));
  return true;
}

static __global__ void __launch_bounds__(kThreads) count_bad(const __grid_constant__ GradCheckParams p) {
  WARPSMITH_SHARED(float, scratch, kThreads / 32);
  if (device::load(p.found_inf) == 0.0f) return;
  const float factor = inverse<float>(device::load(p.scale));
  int bad = 0;
  visit_chunk(p.norm.tensors, p.norm.chunks, [&](const auto* x, int elems) {
    for (int i = static_cast<int>(threadIdx.x); i < elems; i += kThreads)
      bad += !is_finite(device::to_float(device::load(x + i)) * factor);
  });
  add_bad(p.norm.chunks, bad, scratch, p.bad_counts);
}

static __global__ void __launch_bounds__(kThreads) unscale(const __grid_constant__ UnscaleParams p) {
  WARPSMITH_SHARED(float, scratch, kThreads / 32);
  const float factor = device::load(p.inv_scale);
  int bad = 0;
  visit_chunk(p.tensors, p.chunks, [&](auto* x, int elems) {
    using T = std::remove_pointer_t<decltype(x)>;
    const auto unscaled = [&](T v) {
      const T stored = device::from_float<T>(device::to_float(v) * factor);
      bad += !is_finite(device::to_float(stored));
      return stored;
    };
    if (aligned(x))
      transform<T, device::kElementsPer16Bytes<T>>(x, elems, unscaled);
    else
      transform<T, 1>(x, elems, unscaled);
  });
  if (add_bad(p.chunks, bad, scratch, p.bad_counts)) atomicExch(p.found_inf, 1.0f);
}

}  // namespace warpsmith::grad_norm
