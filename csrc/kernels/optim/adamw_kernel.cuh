#pragma once
#include <cstdint>

#include "device/vector.h"
#include "kernels/optim/adamw.h"
#include "kernels/optim/adamw_config.h"

// The AdamW step of any number of float tensors; one block a chunk. Reads param, grad, exp_avg, exp_avg_sq (and
// max_exp_avg_sq) once and writes all but grad once: 28 (36) bytes an element, and some 80 bytes a chunk. All
// arithmetic is elementwise, so the result does not depend on the chunks. The last block of a tensor to have read its
// step counter advances it.
namespace warpsmith::adamw {

using device::Vector;

constexpr int kLanes = 4;    // floats of a 16-byte vector
constexpr int kScalars = 2;  // in flight where an address is not a multiple of 16

// A chunk of one tensor. Positions in it are 32-bit; only the addresses know how far into the tensor it lies.
struct Chunk {
  const float* grad;
  float *param, *exp_avg, *exp_avg_sq, *max_exp_avg_sq;
  int elems;

  __device__ __forceinline__ Chunk(const AdamWTensor& t, const float* tensor_grad, int64_t begin)
      : grad(tensor_grad + begin),
        param(static_cast<float*>(t.param) + begin),
        exp_avg(static_cast<float*>(t.exp_avg) + begin),
        exp_avg_sq(static_cast<float*>(t.exp_avg_sq) + begin),
        max_exp_avg_sq(t.max_exp_avg_sq ? static_cast<float*>(t.max_exp_avg_sq) + begin : nullptr),
        elems(static_cast<int>(t.numel - begin < t.chunk_elems ? t.numel - begin : t.chunk_elems)) {}

  __device__ __forceinline__ bool aligned() const {
    return (reinterpret_cast<uintptr_t>(grad) | reinterpret_cast<uintptr_t>(param) |
            reinterpret_cast<uintptr_t>(exp_avg) | reinterpret_cast<uintptr_t>(exp_avg_sq) |
            reinterpret_cast<uintptr_t>(max_exp_avg_sq)) %
               16 ==
           0;
  }
};

// What one thread has in flight: kVectors groups of N adjacent elements, a block's width apart. The moments and the
// gradient are not read again before the next step, the parameters by the next forward pass.
template <int N, int kVectors, bool kMax> struct Tile {
  using V = Vector<float, N>;
  V grad[kVectors], param[kVectors], exp_avg[kVectors], exp_avg_sq[kVectors], max_exp_avg_sq[kMax ? kVectors : 1];

  static constexpr int kElems = kAdamWThreads * kVectors * N;

  __device__ __forceinline__ static int place(int begin, int k) {
    return begin + (k * kAdamWThreads + static_cast<int>(threadIdx.x)) * N;
  }

  __device__ __forceinline__ void load(const Chunk& c, int begin, int end) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int i = place(begin, k);
      if (i >= end) continue;
      grad[k] = device::load_vector<N>(c.grad + i);
      param[k] = device::load_vector<N>(c.param + i);
      exp_avg[k] = device::load_vector<N>(c.exp_avg + i);
      exp_avg_sq[k] = device::load_vector<N>(c.exp_avg_sq + i);
      if constexpr (kMax) max_exp_avg_sq[k] = device::load_vector<N>(c.max_exp_avg_sq + i);
    }
  }

  __device__ __forceinline__ void update_and_store(const AdamWScalars<float>& s, const Chunk& c, int begin, int end) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int i = place(begin, k);
      if (i >= end) continue;
#pragma unroll
      for (int e = 0; e < N; ++e)
        adamw_element<float>(s, grad[k].at[e], param[k].at[e], exp_avg[k].at[e], exp_avg_sq[k].at[e],
                             kMax ? &max_exp_avg_sq[kMax ? k : 0].at[e] : nullptr);
      device::store_vector(c.param + i, param[k]);
      device::store_vector(c.exp_avg + i, exp_avg[k]);
      device::store_vector(c.exp_avg_sq + i, exp_avg_sq[k]);
      if constexpr (kMax) device::store_vector(c.max_exp_avg_sq + i, max_exp_avg_sq[k]);
    }
  }
};

// The tensor's constants of this step, from device memory; and the step is counted. Called by warp 0, converged.
__device__ __forceinline__ void prepare(const AdamWParams& p, AdamWTensor* t, AdamWScalars<float>* shared) {
  const AdamWGroup& group = p.groups[t->group - p.first_group];
  // Lane 0 alone reads the counter: its fences then order all reads of it before the write.
  const float taken = __shfl_sync(0xffffffffu, threadIdx.x == 0 ? *t->step : 0.0f, 0);
  const double correction = adamw_bias_correction(threadIdx.x == 1 ? group.beta2 : group.beta1, taken);
  const double correction1 = __shfl_sync(0xffffffffu, correction, 0);
  const double correction2 = __shfl_sync(0xffffffffu, correction, 1);
  if (threadIdx.x != 0) return;
  *shared = adamw_scalars<float>(group, p.grad_scale, correction1, correction2);
  if (t->chunks > 1) {
    __threadfence();  // the counter is read before this block is counted
    if (atomicAdd(&t->chunks_done, 1u) + 1 != static_cast<uint32_t>(t->chunks)) return;
    __threadfence();  // and written after every block has been
    atomicExch(&t->chunks_done, 0u);
  }
  *t->step = taken + 1;
}

// One chunk; its first tile is on its way while warp 0 computes the constants.
template <int N, int kVectors, bool kMax> __device__ __forceinline__ void update(const AdamWParams& p, AdamWTensor* t,
                                                                                 const Chunk& c,
                                                                                 AdamWScalars<float>* shared) {
  Tile<N, kVectors, kMax> tile;
  const int whole = c.elems / N * N;
  tile.load(c, 0, whole);
  if (threadIdx.x < 32) prepare(p, t, shared);
  __syncthreads();
  const AdamWScalars<float> s = *shared;
  for (int begin = 0; begin < whole; begin += tile.kElems) {
    if (begin != 0) tile.load(c, begin, whole);
    tile.update_and_store(s, c, begin, whole);
  }
  if constexpr (N > 1) {
    Tile<1, 1, kMax> rest{};
    rest.load(c, whole, c.elems);
    rest.update_and_store(s, c, whole, c.elems);
  }
}

// Blocks for which registers are kept free: one less where 64 registers a thread would spill, on sm_80 and with
// amsgrad.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
template <bool kAnyMax> constexpr int kResidentBlocks = kAdamWBlocksAMultiprocessor - 1;
#else
template <bool kAnyMax> constexpr int kResidentBlocks = kAdamWBlocksAMultiprocessor - kAnyMax;
#endif

// kAnyMax: some tensor may have max_exp_avg_sq.
template <bool kAnyMax> __global__ void __launch_bounds__(kAdamWThreads, kResidentBlocks<kAnyMax>)
    step(const __grid_constant__ AdamWParams p) {
  WARPSMITH_SHARED(AdamWScalars<float>, scalars, 1);
  if (p.found_inf && *p.found_inf != 0.0f) return;
  const ListChunk at = p.chunks[blockIdx.x];
  AdamWTensor* t = p.tensors + at.tensor;
  const auto* grad = static_cast<const float*>(p.grads[at.tensor]);
  const int group = t->group - p.first_group;
  if (!grad || group < 0 || group >= p.group_count) return;

  const Chunk c(*t, grad, int64_t{at.chunk} * t->chunk_elems);
  const bool aligned = c.aligned();
  if (kAnyMax && c.max_exp_avg_sq) {
    if (aligned)
      update<kLanes, 1, true>(p, t, c, scalars);
    else
      update<1, kScalars, true>(p, t, c, scalars);
  } else {
    if (aligned)
      update<kLanes, kAdamWVectors, false>(p, t, c, scalars);
    else
      update<1, kScalars, false>(p, t, c, scalars);
  }
}

}  // namespace warpsmith::adamw
