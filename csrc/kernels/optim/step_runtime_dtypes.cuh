#pragma once
#include <cstdint>
#include <iterator>

#include "kernels/optim/average.h"
#include "kernels/optim/contraction.h"
#include "kernels/optim/runtime_dtypes.cuh"
#include "kernels/optim/step.cuh"

// One step of an optimizer for two cases: gradients may differ from their parameters in dtype, or the step does more
// than update (StepExtras, zero_grads). One kernel per optimizer: dtypes and rounding are known only at run time.
//
// The results have the bits of `step` with the gradients converted to float32. Reads and writes what `step` does, but
// the gradient in its own dtype: AdamW with float32 gradients 30 bytes per element with 16-bit parameters and masters,
// 16 in bfloat16. An average adds 8 bytes, a copy 2, a zeroed gradient the size of its dtype.
namespace warpsmith::optim {

struct RuntimeStorage {
  Dtype param, state;
  bool has_master;
  Refinement refinement;
};

// A chunk of one tensor.
struct RuntimeChunk {
  RuntimeArray grad, param, kept;  // kept: the master or the rounding errors
  RuntimeArray states[kOptimMaxStates];
  Refinement refinement;
  bool has_master;
  uint64_t first_elem;  // only random rounding reads it
  int elems;
  RuntimeArray average{nullptr, Dtype::float32}, copy{nullptr, Dtype::float16};  // StepExtras
  float weight = 0;
  bool averages_param = false, zeroes = false;

  __device__ __forceinline__ RuntimeChunk(const RuntimeStorage& storage, const OptimTensor& t, const Gradient& gradient,
                                          int64_t begin)
      : grad(RuntimeArray::of(const_cast<void*>(gradient.at), gradient.dtype, begin)),
        param(RuntimeArray::of(t.param, storage.param, begin)),
        kept{nullptr, Dtype::float32},
        refinement(storage.refinement),
        has_master(storage.has_master),
        first_elem(0),
        elems(static_cast<int>(t.numel - begin < t.chunk_elems ? t.numel - begin : t.chunk_elems)) {
    if (refinement == Refinement::stochastic)
      first_elem = t.first_elem + static_cast<uint64_t>(begin);
    else if (has_master || refinement != Refinement::none)
      kept = RuntimeArray::of(t.extra, has_master ? Dtype::float32 : Dtype::bfloat16, begin);
#pragma unroll
    for (int s = 0; s < kOptimMaxStates; ++s) states[s] = RuntimeArray::of(t.states[s], storage.state, begin);
  }

  __device__ __forceinline__ void set_extras(const OptimParams& p, int tensor, int64_t begin) {
    zeroes = p.zero_grads;
    if (!p.extras) return;
    const StepExtras& extras = p.extras[tensor];
    average = RuntimeArray::of(extras.average, Dtype::float32, begin);
    copy = RuntimeArray::of(extras.copy, extras.copy_dtype, begin);
    weight = static_cast<float>(p.ema_weight);
    averages_param = extras.averages_param || !has_master;
  }

  // What is known of a chunk when the code is compiled. `as` makes it known: the rest of the code then has no branch
  // for it. With branches AdamW and an average moved 3.13 TB/s of the copy's 4.29 (H200, 2026-11-23).
  enum class Known { nothing, floats, masters };
  __device__ __forceinline__ Known known() const {
    bool floats = refinement == Refinement::none;
#pragma unroll
    for (int s = 0; s < kOptimMaxStates; ++s) floats &= !states[s].at || states[s].dtype == Dtype::float32;
    if (!floats) return Known::nothing;
    if (has_master) return Known::masters;
    return grad.dtype == Dtype::float32 && param.dtype == Dtype::float32 ? Known::floats : Known::nothing;
  }
  template <Known what> __device__ __forceinline__ RuntimeChunk as() const {
    RuntimeChunk c = *this;
    if constexpr (what == Known::nothing) return c;
    c.refinement = Refinement::none;
    c.first_elem = 0;
#pragma unroll
    for (int s = 0; s < kOptimMaxStates; ++s) c.states[s].dtype = Dtype::float32;
    c.has_master = what == Known::masters;
    if constexpr (what == Known::floats) {
      c.grad.dtype = c.param.dtype = Dtype::float32;
      c.kept.at = nullptr;
      c.averages_param = true;
    }
    return c;
  }

  // Whether vectors are aligned. With random rounding the chunk must also begin a pair.
  __device__ __forceinline__ bool aligned() const {
    uintptr_t bits = reinterpret_cast<uintptr_t>(grad.at) | reinterpret_cast<uintptr_t>(param.at) |
                     reinterpret_cast<uintptr_t>(kept.at) | reinterpret_cast<uintptr_t>(average.at) |
                     reinterpret_cast<uintptr_t>(copy.at);
#pragma unroll
    for (int s = 0; s < kOptimMaxStates; ++s) bits |= reinterpret_cast<uintptr_t>(states[s].at);
    return bits % 16 == 0 && first_elem % 2 == 0;
  }
};

using RuntimeDtypes =
    Refined<bfloat16, Refinement::stochastic>;  // its Constants hold the number of the step, for random rounding

// What one thread has in flight.
template <class F, unsigned kHas, int N> struct RuntimeTile {
  RuntimeLanes<N> grad, param, kept, average, states[kOptimMaxStates];

  __device__ __forceinline__ void load(const RuntimeChunk& c, int i) {
    grad.load(c.grad, i);
    if (!c.has_master) param.load(c.param, i);
    if (c.kept.at) kept.load(c.kept, i);
    if (c.average.at) average.load(c.average, i);
#pragma unroll
    for (int s = 0; s < kOptimMaxStates; ++s)
      if ((kHas >> s) & 1) states[s].load(c.states[s], i);
  }

  template <class Math> __device__ __forceinline__ void element(int e, const Constants<F, RuntimeDtypes>& constants,
                                                                const RuntimeChunk& c, float& p,
                                                                float (&x)[kOptimMaxStates]) const {
    p = c.has_master ? kept.value(e, Dtype::float32) : param.value(e, c.param.dtype);
    if (c.refinement == Refinement::compensated) p += kept.value(e, Dtype::bfloat16);
    if (c.refinement == Refinement::remainder) p = join_float(param.half(e), kept.half(e));
#pragma unroll
    for (int s = 0; s < kOptimMaxStates; ++s)
      if ((kHas >> s) & 1) x[s] = states[s].value(e, c.states[s].dtype);
    F::template element<kHas, float, Math>(constants.scalars, grad.value(e, c.grad.dtype), p, x);
  }

  // Updates N elements as `step` does. An element whose parameter becomes NaN is repeated with IeeeMath.
  __device__ __forceinline__ void update(const Constants<F, RuntimeDtypes>& constants, uint64_t seed,
                                         const RuntimeChunk& c, int i) {
    constexpr int kPairs = N == 1 ? 1 : N / 2;
    PhiloxCounter words[kPairs] = {};
    const uint64_t first = c.first_elem + static_cast<uint64_t>(i);
    const bool at_random = c.refinement == Refinement::stochastic;
    if (at_random) rounding_words(words, seed, constants.step, first / 2);
#pragma unroll
    for (int e = 0; e < N; ++e) {
      float p, x[kOptimMaxStates];
      element<QuickMath>(e, constants, c, p, x);
      if constexpr (F::kDivides) {
        if (p != p) element<IeeeMath>(e, constants, c, p, x);
      }
      if (at_random) {
        const bool odd = N == 1 ? first % 2 != 0 : e % 2 != 0;
        const PhiloxCounter& random = words[e / 2];
        param.set_half(e, device::round_stochastic(p, rounding_bits(random, odd, 0)).bits);
#pragma unroll
        for (int s = 0; s < kOptimMaxStates; ++s)
          if ((kHas >> s) & 1)
            states[s].set_half(e, device::round_stochastic(x[s], rounding_bits(random, odd, 1 + s)).bits);
      } else {
        round(e, c, p, x);
      }
    }
  }

  __device__ __forceinline__ void round(int e, const RuntimeChunk& c, float p, const float (&x)[kOptimMaxStates]) {
    if (c.refinement == Refinement::remainder) {
      const SplitFloat split = split_float(p);
      param.set_half(e, split.rounded.bits);
      kept.set_half(e, split.remainder.bits);
    } else {
      param.set(e, c.param.dtype, p);
      if (c.has_master) kept.set(e, Dtype::float32, p);
      if (c.refinement == Refinement::compensated)
        kept.set(e, Dtype::bfloat16, compensation_of(p, param.value(e, Dtype::bfloat16)));
    }
#pragma unroll
    for (int s = 0; s < kOptimMaxStates; ++s)
      if ((kHas >> s) & 1) states[s].set(e, c.states[s].dtype, x[s]);
  }

  __device__ __forceinline__ void store(const RuntimeChunk& c, int i) const {
    param.store(c.param, i);
    if (c.kept.at) kept.store(c.kept, i);
#pragma unroll
    for (int s = 0; s < kOptimMaxStates; ++s)
      if ((kHas >> s) & 1) states[s].store(c.states[s], i);
    store_extras(c, i);
  }

  // Writes zeros, average and copy, from the rounded values that `store` has written.
  __device__ __forceinline__ void store_extras(const RuntimeChunk& c, int i) const {
    constexpr Dtype kWide = Dtype::float32;
    if (c.zeroes) RuntimeLanes<N>{}.store(c.grad, i);
    if (c.average.at) {
      RuntimeLanes<N> moved;
#pragma unroll
      for (int e = 0; e < N; ++e) {
        const float value = c.averages_param ? param.value(e, c.param.dtype) : kept.value(e, kWide);
        moved.set(e, kWide, lerp(average.value(e, kWide), value, c.weight));
      }
      moved.store(c.average, i);
    }
    if (c.copy.at) {
      RuntimeLanes<N> rounded{};
#pragma unroll
      for (int e = 0; e < N; ++e) rounded.set(e, c.copy.dtype, param.value(e, kWide));
      rounded.store(c.copy, i);
    }
  }
};

// The extras of a step, for a chunk that is not updated. A skipped step only zeroes the gradient. A tensor
// without a gradient only moves its average.
__device__ __forceinline__ void only_extras(const RuntimeChunk& c, bool skips) {
  constexpr Dtype kWide = Dtype::float32;
  for (int i = static_cast<int>(threadIdx.x); i < c.elems; i += kOptimThreads) {
    if (c.grad.at && c.zeroes) RuntimeLanes<1>{}.store(c.grad, i);
    if (skips || !c.average.at) continue;
    const RuntimeArray of{c.averages_param ? c.param.at : c.kept.at, c.averages_param ? c.param.dtype : kWide};
    RuntimeLanes<1> average, value;
    average.load(c.average, i);
    value.load(of, i);
    average.set(0, kWide, lerp(average.value(0, kWide), value.value(0, of.dtype), c.weight));
    average.store(c.average, i);
  }
}

template <class F, unsigned kHas, int N, RuntimeChunk::Known known = RuntimeChunk::Known::nothing>
__device__ __forceinline__ void update_runtime_dtypes(const OptimParams& p, OptimTensor* t, const RuntimeChunk& given,
                                                      Constants<F, RuntimeDtypes>* shared) {
  const RuntimeChunk c = given.as<known>();
  RuntimeTile<F, kHas, N> tile;
  const int whole = c.elems / N * N, first = static_cast<int>(threadIdx.x) * N;
  if (first < whole) tile.load(c, first);
  if (threadIdx.x < 32) prepare<F, RuntimeDtypes>(p, t, shared);
  __syncthreads();
  const auto constants = *shared;
  const uint64_t seed = p.seeds[t->group - p.first_group];
  for (int i = first; i < whole; i += kOptimThreads * N) {
    if (i != first) tile.load(c, i);
    tile.update(constants, seed, c, i);
    tile.store(c, i);
  }
  if constexpr (N > 1) {
    if (const int i = whole + static_cast<int>(threadIdx.x); i < c.elems) {
      RuntimeTile<F, kHas, 1> rest{};
      rest.load(c, i);
      rest.update(constants, seed, c, i);
      rest.store(c, i);
    }
  }
}

// Calls `update_runtime_dtypes` for the variant whose states the tensor has. Compiles only variants whose states are
// all in kMost.
template <class F, unsigned kMost, size_t kFirst = 0>
__device__ __forceinline__ void update_runtime_dtypes_variant(const OptimParams& p, OptimTensor* t,
                                                              const RuntimeChunk& c,
                                                              Constants<F, RuntimeDtypes>* shared) {
  constexpr unsigned kHas = F::kVariants[kFirst];
  constexpr int kLanes = std::size(F::kVariants) > 2 ? 2 : 4;  // halves the code of RMSprop, which has four variants
  if constexpr ((kHas & ~kMost) == 0) {
    if (t->has == kHas) {
      using enum RuntimeChunk::Known;
      const RuntimeChunk::Known known = kLanes == 4 && c.aligned() ? c.known() : nothing;
      // Not for four variants, whose code would be half as long again.
      if (known == floats)
        update_runtime_dtypes<F, kHas, kLanes, kLanes == 4 ? floats : nothing>(p, t, c, shared);
      else if (known == masters)
        update_runtime_dtypes<F, kHas, kLanes, kLanes == 4 ? masters : nothing>(p, t, c, shared);
      else if (c.aligned())
        update_runtime_dtypes<F, kHas, kLanes>(p, t, c, shared);
      else
        update_runtime_dtypes<F, kHas, 1>(p, t, c, shared);
      return;
    }
  }
  if constexpr (kFirst + 1 < std::size(F::kVariants))
    update_runtime_dtypes_variant<F, kMost, kFirst + 1>(p, t, c, shared);
}

constexpr int kBlocksRuntimeDtypes = 2;  // blocks that the registers allow: 128 per thread

template <class F> __global__ void __launch_bounds__(kOptimThreads, kBlocksRuntimeDtypes)
    step_runtime_dtypes(const __grid_constant__ OptimParams p, const RuntimeStorage storage) {
  using Shared = Constants<F, RuntimeDtypes>;
  WARPSMITH_SHARED(Shared, constants, 1);
  const bool skips = p.found_inf && *p.found_inf != 0.0f;
  if (skips && !p.zero_grads) return;
  const ListChunk at = p.chunks[blockIdx.x];
  OptimTensor* t = p.tensors + at.tensor;
  const void* entry = p.grads[at.tensor];
  const int group = t->group - p.first_group;
  if (group < 0 || group >= p.group_count) return;
  const int64_t begin = int64_t{at.chunk} * t->chunk_elems;
  RuntimeChunk c(storage, *t, gradient_of(entry, storage.param), begin);
  c.set_extras(p, at.tensor, begin);
  if (skips || !entry) return only_extras(c, skips);
  update_runtime_dtypes_variant<F, ~0u>(p, t, c, constants);
}

}  // namespace warpsmith::optim
