#pragma once
#include <cstdint>
#include <type_traits>

#include "device/reduce.h"
#include "device/vector.h"
#include "kernels/optim/layerwise.h"
#include "kernels/optim/optim_config.h"
#include "kernels/optim/runtime_dtypes.cuh"

// A step of a layerwise optimizer: two launches, with one block per chunk each. `layerwise_moments` reads gradient,
// parameter and states, and writes the states and its chunk's sums of squares. The last block of a tensor adds these
// sums in their order, so that the ratio has the same bits whichever block is last, and counts the step.
// `layerwise_apply` reads parameter and states and writes the parameter. LAMB: 24 + 16 bytes per element in float32, 22
// + 18 with 16-bit parameters and masters, and 36 bytes per chunk.
namespace warpsmith::layerwise {

using device::Vector;

constexpr int kThreads = kOptimThreads;
constexpr int kLanes = 4;  // elements per thread at a time: 16 bytes of float32

// A chunk of one tensor. P: of the parameter, which with a master is its rounded copy; kRuntimeDtype: gradients of any
// dtype.
template <class P, bool kMaster, bool kRuntimeDtype> struct Chunk {
  optim::ChunkGradient<P, kRuntimeDtype> grad;
  P* param;
  float *value, *m, *v;
  int elems;

  __device__ __forceinline__ Chunk(const OptimTensor& t, const void* tensor_grad, int64_t begin)
      : grad(optim::chunk_gradient<P, kRuntimeDtype>(tensor_grad, begin)),
        param(static_cast<P*>(t.param) + begin),
        value(static_cast<float*>(kMaster ? t.extra : t.param) + begin),
        m(static_cast<float*>(t.states[0]) + begin),
        v(static_cast<float*>(t.states[1]) + begin),
        elems(static_cast<int>(t.numel - begin < t.chunk_elems ? t.numel - begin : t.chunk_elems)) {}

  // Whether vectors of kLanes elements are aligned in all arrays.
  __device__ __forceinline__ bool aligned() const {
    const auto misaligned = [](const void* p, size_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes != 0; };
    return optim::address_of(grad) % (kRuntimeDtype ? 16 : kLanes * sizeof(P)) == 0 &&
           !misaligned(param, kLanes * sizeof(P)) && !misaligned(value, 16) && !misaligned(m, 16) && !misaligned(v, 16);
  }

  // Calls body.template operator()<N>(first element) for all elements of the chunk, N adjacent elements at a time.
  template <class Body> __device__ __forceinline__ void for_elements(Body&& body) const {
    const int whole = aligned() ? elems / kLanes * kLanes : 0;
    for (int i = static_cast<int>(threadIdx.x) * kLanes; i < whole; i += kThreads * kLanes)
      body.template operator()<kLanes>(i);
    for (int i = whole + static_cast<int>(threadIdx.x); i < elems; i += kThreads) body.template operator()<1>(i);
  }
};

// Computes the scalars that all elements of a tensor share, in the step after `taken` steps. Called by warp 0,
// converged; lane 0 writes.
template <class F> __device__ __forceinline__ void prepare(const OptimParams& p, const OptimTensor& t, float taken,
                                                           typename F::template Scalars<float>* shared) {
  const OptimGroup& group = p.groups[t.group - p.first_group];
  const int mine = static_cast<int>(threadIdx.x) < F::kPowers ? static_cast<int>(threadIdx.x) : 0;
  const double correction = bias_correction(values_of(group)[mine], taken);  // one lane per correction
  double corrections[F::kPowers];
#pragma unroll
  for (int i = 0; i < F::kPowers; ++i) corrections[i] = __shfl_sync(0xffffffffu, correction, i);
  if (threadIdx.x == 0)
    *shared = optim_scalars<F, float>(group, p.grad_scale, corrections, static_cast<double>(taken) + 1);
}

// Whether this launch steps the tensor of a chunk.
__device__ __forceinline__ bool takes_part(const OptimParams& p, const ListChunk& at) {
  if (p.found_inf && *p.found_inf != 0.0f) return false;
  const int group = p.tensors[at.tensor].group - p.first_group;
  return p.grads[at.tensor] && group >= 0 && group < p.group_count;
}

template <class F, class P, bool kMaster, bool kRuntimeDtype>
__global__ void __launch_bounds__(kThreads, kOptimBlocksAMultiprocessor)
    layerwise_moments(const __grid_constant__ LayerwiseParams params) {
  using Scalars = typename F::template Scalars<float>;
  WARPSMITH_SHARED(Scalars, scalars, 1);
  WARPSMITH_SHARED(float, scratch, 2 * kThreads / 32);
  WARPSMITH_SHARED(double, totals, 2 * kThreads);
  WARPSMITH_SHARED(int, is_last, 1);
  const OptimParams& p = params.step;
  const ListChunk at = p.chunks[blockIdx.x];
  if (!takes_part(p, at)) return;
  OptimTensor* t = p.tensors + at.tensor;
  const Chunk<P, kMaster, kRuntimeDtype> c(*t, p.grads[at.tensor], int64_t{at.chunk} * t->chunk_elems);
  // Warp 0 alone reads the counter: thread 0's fence below then orders the reads before the write of the last block.
  float taken = 0;
  if (threadIdx.x < 32) {
    taken = __shfl_sync(0xffffffffu, threadIdx.x == 0 ? *t->step : 0.0f, 0);
    prepare<F>(p, *t, taken, scalars);
  }
  __syncthreads();
  const Scalars s = *scalars;

  float sums[2] = {};  // sums of squares of parameters and of directions
  c.for_elements([&]<int N>(int i) {
    const auto grad = optim::load_gradient<N>(c.grad, i);
    const auto value = device::load_vector<N>(c.value + i);
    auto m = device::load_vector<N>(c.m + i), v = device::load_vector<N>(c.v + i);
#pragma unroll
    for (int e = 0; e < N; ++e) {
      F::template moments<float>(s, optim::gradient_value(c.grad, grad, e), m.at[e], v.at[e]);
      const float u = F::template direction<float>(s, value.at[e], m.at[e], v.at[e]);
      sums[0] += value.at[e] * value.at[e];
      sums[1] += u * u;
    }
    device::store_vector(c.m + i, m);
    device::store_vector(c.v + i, v);
  });
  device::block_reduce<kThreads>(sums, scratch, device::Sum());
  if (threadIdx.x == 0) {
    device::store(params.partials + 2 * int64_t{blockIdx.x}, static_cast<double>(sums[0]));
    device::store(params.partials + 2 * int64_t{blockIdx.x} + 1, static_cast<double>(sums[1]));
    __threadfence();  // the sums are written and the counter is read before this block is counted
    *is_last = atomicAdd(&t->chunks_done, 1u) + 1 == static_cast<uint32_t>(t->chunks);
    __threadfence();  // the sums of all blocks are read after all blocks have been counted
  }
  __syncthreads();
  if (!*is_last) return;

  const double* of_tensor = params.partials + 2 * (int64_t{blockIdx.x} - at.chunk);
  double sum[2] = {};
  for (int i = static_cast<int>(threadIdx.x); i < t->chunks; i += kThreads) {
    sum[0] += device::load(of_tensor + 2 * int64_t{i});
    sum[1] += device::load(of_tensor + 2 * int64_t{i} + 1);
  }
  totals[threadIdx.x] = sum[0], totals[kThreads + threadIdx.x] = sum[1];
  __syncthreads();
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) {
      totals[threadIdx.x] += totals[threadIdx.x + half];
      totals[kThreads + threadIdx.x] += totals[kThreads + threadIdx.x + half];
    }
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  const bool adapts = F::adapts(values_of(p.groups[t->group - p.first_group]));
  device::store(params.ratios + at.tensor, trust_ratio(adapts, totals[0], totals[kThreads]));
  atomicExch(&t->chunks_done, 0u);
  *t->step = taken + 1;
}

template <class F, class P, bool kMaster, bool kRuntimeDtype>
__global__ void __launch_bounds__(kThreads, kOptimBlocksAMultiprocessor)
    layerwise_apply(const __grid_constant__ LayerwiseParams params) {
  using Scalars = typename F::template Scalars<float>;
  WARPSMITH_SHARED(Scalars, scalars, 1);
  const OptimParams& p = params.step;
  const ListChunk at = p.chunks[blockIdx.x];
  if (!takes_part(p, at)) return;
  const OptimTensor& t = p.tensors[at.tensor];
  const Chunk<P, kMaster, kRuntimeDtype> c(t, p.grads[at.tensor], int64_t{at.chunk} * t.chunk_elems);
  if (threadIdx.x < 32) prepare<F>(p, t, *t.step - 1, scalars);
  __syncthreads();
  const Scalars s = *scalars;
  const float step = static_cast<float>(static_cast<double>(s.lr) * device::load(params.ratios + at.tensor));
  c.for_elements([&]<int N>(int i) {
    auto value = device::load_vector<N>(c.value + i);
    const auto m = device::load_vector<N>(c.m + i), v = device::load_vector<N>(c.v + i);
    Vector<P, N> rounded;
#pragma unroll
    for (int e = 0; e < N; ++e) {
      value.at[e] -= step * F::template direction<float>(s, value.at[e], m.at[e], v.at[e]);
      if constexpr (kMaster) rounded.at[e] = device::from_float<P>(value.at[e]);
    }
    device::store_vector(c.value + i, value);
    if constexpr (kMaster) device::store_vector(c.param + i, rounded);
  });
}

}  // namespace warpsmith::layerwise
