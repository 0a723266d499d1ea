#pragma once
#include <cstdint>
#include <iterator>
#include <type_traits>

#include "device/stochastic_rounding.h"
#include "device/vector.h"
#include "kernels/optim/optim.h"
#include "kernels/optim/optim_config.h"

// One step of an optimizer over any number of tensors; one block a chunk. Reads the gradient, the parameter (or its
// master) and each state once and writes all but the gradient, and some 90 bytes a chunk. AdamW: 28 bytes an element in
// float32, 14 in 16 bits, 28 with 16-bit parameters and masters; SGD with momentum and Lion: 20 in float32. All
// arithmetic is elementwise, so the result does not depend on the chunks. The last block of a tensor to have read its
// step counter advances it.
namespace warpsmith::optim {

using device::Vector;

constexpr int kScalars = 2;  // in flight where an address is not a multiple of 16

// The types of a table's arrays. kLanes: elements a thread takes at a time, 16 bytes of the widest.
template <class P, class S, bool kHasMaster> struct Stored {
  using Param = P;  // and gradient
  using State = S;
  using Extra = float;
  static constexpr bool kMaster = kHasMaster;
  static constexpr Refinement kRefinement = Refinement::none;
  static constexpr int kLanes = kMaster || sizeof(P) == 4 || sizeof(S) == 4 ? 4 : 8;
};

// A bfloat16 parameter with a refinement.
template <class S, Refinement kRefinement_> struct Refined {
  using Param = bfloat16;
  using State = S;
  using Extra = bfloat16;
  static constexpr bool kMaster = false;
  static constexpr Refinement kRefinement = kRefinement_;
  static constexpr int kLanes = sizeof(S) == 4 ? 4 : 8;
};

template <class In> constexpr bool kHasExtra = In::kMaster || keeps_dropped(In::kRefinement);
template <class In> constexpr bool kIsStochastic = In::kRefinement == Refinement::stochastic;

// What all elements of a chunk share in this step.
template <class F, class In, bool = kIsStochastic<In>> struct Constants {
  typename F::template Scalars<float> scalars;
};
template <class F, class In> struct Constants<F, In, true> {
  typename F::template Scalars<float> scalars;
  uint32_t step;  // the number of this step
};

// The number of a chunk's first element among the elements of all tensors.
template <bool kThere> struct Numbered {};
template <> struct Numbered<true> {
  uint64_t first_elem;
};

// A chunk of one tensor. Positions in it are 32-bit; only the addresses know how far into the tensor it lies.
// States outside of kMost are not there.
template <class In, unsigned kMost> struct Chunk : Numbered<kIsStochastic<In>> {
  using Param = typename In::Param;
  using State = typename In::State;
  using Extra = typename In::Extra;
  const Param* grad;
  Param* param;
  Extra* extra;
  State* states[kOptimMaxStates];
  int elems;

  __device__ __forceinline__ Chunk(const OptimTensor& t, const void* tensor_grad, int64_t begin)
      : grad(static_cast<const Param*>(tensor_grad) + begin),
        param(static_cast<Param*>(t.param) + begin),
        extra(kHasExtra<In> ? static_cast<Extra*>(t.extra) + begin : nullptr),
        elems(static_cast<int>(t.numel - begin < t.chunk_elems ? t.numel - begin : t.chunk_elems)) {
    if constexpr (kIsStochastic<In>) this->first_elem = t.first_elem + static_cast<uint64_t>(begin);
#pragma unroll
    for (int i = 0; i < kOptimMaxStates; ++i)
      states[i] = (kMost >> i) & 1 && t.states[i] ? static_cast<State*>(t.states[i]) + begin : nullptr;
  }

  __device__ __forceinline__ bool aligned() const {
    uintptr_t bits = reinterpret_cast<uintptr_t>(grad) | reinterpret_cast<uintptr_t>(param);
    if constexpr (kHasExtra<In>) bits |= reinterpret_cast<uintptr_t>(extra);
#pragma unroll
    for (int i = 0; i < kOptimMaxStates; ++i) bits |= reinterpret_cast<uintptr_t>(states[i]);
    return bits % 16 == 0;
  }
};

// What a refinement keeps of the elements that a thread has in flight.
template <bool kThere, int N, int kVectors> struct Dropped {};
template <int N, int kVectors> struct Dropped<true, N, kVectors> {
  Vector<bfloat16, N> dropped[kVectors];
};

// What one thread has in flight: kVectors groups of N adjacent elements, a block's width apart. The states and the
// gradient are not read again before the next step, the parameters by the next forward pass.
template <class F, class In, unsigned kMost, unsigned kHas, int N, int kVectors> struct Tile
    : Dropped<kHasExtra<In> && !In::kMaster, N, kVectors> {
  using Param = typename In::Param;
  using State = typename In::State;
  using Value = std::conditional_t<In::kMaster, float, Param>;  // in which the parameter is kept
  Vector<Param, N> grad[kVectors];
  Vector<Value, N> value[kVectors];
  Vector<State, N> states[kVectors][kOptimMaxStates];

  static constexpr int kElems = kOptimThreads * kVectors * N;

  __device__ __forceinline__ static int place(int begin, int k) {
    return begin + (k * kOptimThreads + static_cast<int>(threadIdx.x)) * N;
  }

  __device__ __forceinline__ void load(const Chunk<In, kMost>& c, int begin, int end) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int i = place(begin, k);
      if (i >= end) continue;
      grad[k] = device::load_vector<N>(c.grad + i);
      if constexpr (In::kMaster)
        value[k] = device::load_vector<N>(c.extra + i);
      else
        value[k] = device::load_vector<N>(c.param + i);
      if constexpr (kHasExtra<In> && !In::kMaster) this->dropped[k] = device::load_vector<N>(c.extra + i);
#pragma unroll
      for (int s = 0; s < kOptimMaxStates; ++s)
        if ((kHas >> s) & 1) states[k][s] = device::load_vector<N>(c.states[s] + i);
    }
  }

  // `seed`: the group's, where rounding is stochastic.
  __device__ __forceinline__ void update_and_store(const Constants<F, In>& constants, uint64_t seed,
                                                   const Chunk<In, kMost>& c, int begin, int end) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int i = place(begin, k);
      if (i >= end) continue;
#pragma unroll
      for (int e = 0; e < N; ++e) {
        float p = device::to_float(value[k].at[e]), x[kOptimMaxStates];
        if constexpr (In::kRefinement == Refinement::compensated) p += device::to_float(this->dropped[k].at[e]);
        if constexpr (In::kRefinement == Refinement::remainder) p = join_float(value[k].at[e], this->dropped[k].at[e]);
#pragma unroll
        for (int s = 0; s < kOptimMaxStates; ++s)
          if ((kHas >> s) & 1) x[s] = device::to_float(states[k][s].at[e]);
        F::template element<kHas, float>(constants.scalars, device::to_float(grad[k].at[e]), p, x);
        if constexpr (kIsStochastic<In>) {
          const auto words = rounding_words(seed, constants.step, c.first_elem + static_cast<uint64_t>(i + e));
          value[k].at[e] = device::round_stochastic(p, words.word[0]);
#pragma unroll
          for (int s = 0; s < kOptimMaxStates; ++s)
            if ((kHas >> s) & 1) states[k][s].at[e] = device::round_stochastic(x[s], words.word[1 + s]);
          continue;
        }
        if constexpr (In::kRefinement == Refinement::remainder) {
          const SplitFloat split = split_float(p);
          value[k].at[e] = split.rounded;
          this->dropped[k].at[e] = split.remainder;
        } else {
          value[k].at[e] = device::from_float<Value>(p);
        }
        if constexpr (In::kRefinement == Refinement::compensated)
          this->dropped[k].at[e] = device::from_float<bfloat16>(compensation_of(p, device::to_float(value[k].at[e])));
#pragma unroll
        for (int s = 0; s < kOptimMaxStates; ++s)
          if ((kHas >> s) & 1) states[k][s].at[e] = device::from_float<State>(x[s]);
      }
      if constexpr (In::kMaster) {
        device::store_vector(c.extra + i, value[k]);
        Vector<Param, N> rounded;
#pragma unroll
        for (int e = 0; e < N; ++e) rounded.at[e] = device::from_float<Param>(value[k].at[e]);
        device::store_vector(c.param + i, rounded);
      } else {
        device::store_vector(c.param + i, value[k]);
        if constexpr (kHasExtra<In>) device::store_vector(c.extra + i, this->dropped[k]);
      }
#pragma unroll
      for (int s = 0; s < kOptimMaxStates; ++s)
        if ((kHas >> s) & 1) device::store_vector(c.states[s] + i, states[k][s]);
    }
  }
};

// The tensor's constants of this step, from device memory; and the step is counted. Called by warp 0, converged.
template <class F, class In>
__device__ __forceinline__ void prepare(const OptimParams& p, OptimTensor* t, Constants<F, In>* shared) {
  const OptimGroup& group = p.groups[t->group - p.first_group];
  // Whoever corrects a bias counts steps.
  const bool counts = F::kPowers > 0 || t->step;
  // Lane 0 alone reads the counter: its fences then order all reads of it before the write.
  const float taken = __shfl_sync(0xffffffffu, threadIdx.x == 0 && counts ? *t->step : 0.0f, 0);
  double corrections[F::kPowers > 0 ? F::kPowers : 1];
  if constexpr (F::kPowers > 0) {  // each by a lane of its own
    const int mine = static_cast<int>(threadIdx.x) < F::kPowers ? static_cast<int>(threadIdx.x) : 0;
    const double correction = bias_correction(values_of(group)[mine], taken);
#pragma unroll
    for (int i = 0; i < F::kPowers; ++i) corrections[i] = __shfl_sync(0xffffffffu, correction, i);
  }
  if (threadIdx.x != 0) return;
  shared->scalars =
      optim_scalars<F, float>(group, p.grad_scale, corrections, counts ? static_cast<double>(taken) + 1 : 0.0);
  if constexpr (kIsStochastic<In>) shared->step = static_cast<uint32_t>(taken) + 1;
  if (!counts) return;
  if (t->chunks > 1) {
    __threadfence();  // the counter is read before this block is counted
    if (atomicAdd(&t->chunks_done, 1u) + 1 != static_cast<uint32_t>(t->chunks)) return;
    __threadfence();  // and written after every block has been
    atomicExch(&t->chunks_done, 0u);
  }
  *t->step = taken + 1;
}

// One chunk; its first tile is on its way while warp 0 computes the constants.
template <class F, class In, unsigned kMost, unsigned kHas, int N, int kVectors>
__device__ __forceinline__ void update(const OptimParams& p, OptimTensor* t, const Chunk<In, kMost>& c,
                                       Constants<F, In>* shared) {
  Tile<F, In, kMost, kHas, N, kVectors> tile;
  const int whole = c.elems / N * N;
  tile.load(c, 0, whole);
  if (threadIdx.x < 32) prepare(p, t, shared);
  __syncthreads();
  const auto s = *shared;
  const uint64_t seed = kIsStochastic<In> ? p.seeds[t->group - p.first_group] : 0;
  for (int begin = 0; begin < whole; begin += tile.kElems) {
    if (begin != 0) tile.load(c, begin, whole);
    tile.update_and_store(s, seed, c, begin, whole);
  }
  if constexpr (N > 1) {
    Tile<F, In, kMost, kHas, 1, 1> rest{};
    rest.load(c, whole, c.elems);
    rest.update_and_store(s, seed, c, whole, c.elems);
  }
}

// The functor's only variant that is part of kMost; all bits where there are several.
template <class F, unsigned kMost> constexpr unsigned only_variant() {
  unsigned found = 0, count = 0;
  for (const unsigned has : F::kVariants)
    if ((has & ~kMost) == 0) found = has, ++count;
  return count == 1 ? found : ~0u;
}

// `update` of the variant whose states the tensor has, among those that are part of kMost.
template <class F, class In, unsigned kMost, size_t kFirst = 0>
__device__ __forceinline__ void of_variant(const OptimParams& p, OptimTensor* t, const Chunk<In, kMost>& c,
                                           Constants<F, In>* shared) {
  constexpr unsigned kHas = F::kVariants[kFirst], kOnly = only_variant<F, kMost>();
  if constexpr ((kHas & ~kMost) == 0) {
    if (kHas == kOnly || t->has == kHas) {
      if (c.aligned())
        update<F, In, kMost, kHas, In::kLanes, kOptimVectors>(p, t, c, shared);
      else
        update<F, In, kMost, kHas, 1, kScalars>(p, t, c, shared);
      return;
    }
  }
  if constexpr (kFirst + 1 < std::size(F::kVariants)) of_variant<F, In, kMost, kFirst + 1>(p, t, c, shared);
}

// Blocks for which registers are kept free: fewer where 64 registers a thread would spill, by what ptxas says: on
// sm_80, with three states, with eight elements a thread and several states, with a master and two states.
template <class In, unsigned kMost> constexpr int resident_blocks() {
  constexpr bool kKeepsDropped = keeps_dropped(In::kRefinement);
  constexpr int kStates =
      (kMost & 1) + (kMost >> 1 & 1) + (kMost >> 2 & 1) + (kKeepsDropped && In::kLanes == 8);  // or as much as one
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  return kOptimBlocksAMultiprocessor - 1 - (In::kLanes == 8 && kStates >= 3);
#else
  return kOptimBlocksAMultiprocessor - (kStates >= 3) - (In::kLanes == 8 && kStates >= 2) -
         ((In::kMaster || kKeepsDropped) && In::kLanes == 4 && kStates == 2);
#endif
}

// kMost: the states that some tensor may have. A tensor has those of one of the functor's variants.
template <class F, class In, unsigned kMost>
__global__ void __launch_bounds__(kOptimThreads, (resident_blocks<In, kMost>()))
    step(const __grid_constant__ OptimParams p) {
  using Shared = Constants<F, In>;
  WARPSMITH_SHARED(Shared, constants, 1);
  if (p.found_inf && *p.found_inf != 0.0f) return;
  const ListChunk at = p.chunks[blockIdx.x];
  OptimTensor* t = p.tensors + at.tensor;
  const void* grad = p.grads[at.tensor];
  const int group = t->group - p.first_group;
  if (!grad || group < 0 || group >= p.group_count) return;

  const Chunk<In, kMost> c(*t, grad, int64_t{at.chunk} * t->chunk_elems);
  of_variant<F, In, kMost>(p, t, c, constants);
}

}  // namespace warpsmith::optim
