#pragma once
#include <cstdint>
#include <iterator>
#include <type_traits>

#include "device/stochastic_rounding.h"
#include "device/vector.h"
#include "kernels/optim/cast_rows.cuh"
#include "kernels/optim/optim.h"
#include "kernels/optim/optim_config.h"
#include "kernels/optim/quick_math.h"

// One step of an optimizer over any number of tensors; one block per chunk.
// Reads the gradient, the parameter (or its master) and each state once, and writes all but the gradient. Bytes per
// element: AdamW 28 in float32, 14 in 16 bits, 28 with 16-bit parameters and masters; SGD with momentum and Lion 20 in
// float32. A chunk adds about 90 bytes. All arithmetic is elementwise, so the result does not depend on the chunks. The
// last block that reads a tensor's step counter advances it.
namespace warpsmith::optim {

using device::Vector;

constexpr int kScalars = 2;  // elements a thread has in flight if an array is not 16-byte aligned

// The types of a table's arrays. kLanes: elements per vector, 16 bytes of the widest type.
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

// Index of a chunk's first element among the elements of all tensors. Only random rounding needs it.
template <bool kThere> struct Numbered {};
template <> struct Numbered<true> {
  uint64_t first_elem;
};

// A chunk of one tensor. The addresses include the chunk's offset in the tensor, so positions in the chunk are 32-bit.
// Addresses of states outside of kMost are null.
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

  // Whether vectors of In::kLanes elements are aligned. With random rounding the chunk must also begin a pair.
  __device__ __forceinline__ bool aligned() const {
    uintptr_t bits = reinterpret_cast<uintptr_t>(grad) | reinterpret_cast<uintptr_t>(param);
    if constexpr (kHasExtra<In>) bits |= reinterpret_cast<uintptr_t>(extra);
#pragma unroll
    for (int i = 0; i < kOptimMaxStates; ++i) bits |= reinterpret_cast<uintptr_t>(states[i]);
    if constexpr (kIsStochastic<In>) {
      if (this->first_elem % 2 != 0) return false;
    }
    return bits % 16 == 0;
  }
};

// N adjacent elements. 16-bit elements stay packed, two per 32-bit register: unpacked, each element that lives across
// loop iterations would take a register of its own.
template <class T, int N, bool kPairs = sizeof(T) == 2 && N % 2 == 0> struct Lanes {
  Vector<T, N> v;
  __device__ __forceinline__ void load(const T* from) { v = device::load_vector<N>(from); }
  __device__ __forceinline__ void store(T* to) const { device::store_vector(to, v); }
  __device__ __forceinline__ T get(int e) const { return v.at[e]; }
  __device__ __forceinline__ void set(int e, T x) { v.at[e] = x; }
  __device__ __forceinline__ float value(int e) const { return device::to_float(v.at[e]); }
};
template <class T, int N> struct Lanes<T, N, true> {
  Vector<uint32_t, N / 2> v;
  __device__ __forceinline__ void load(const T* from) {
    v = device::load_vector<N / 2>(reinterpret_cast<const uint32_t*>(from));
  }
  __device__ __forceinline__ void store(T* to) const { device::store_vector(reinterpret_cast<uint32_t*>(to), v); }
  __device__ __forceinline__ T get(int e) const { return {static_cast<uint16_t>(v.at[e / 2] >> (e % 2 * 16))}; }
  __device__ __forceinline__ void set(int e, T x) {
    uint32_t& two = v.at[e / 2];
    two = e % 2 ? (two & 0xffffu) | static_cast<uint32_t>(x.bits) << 16 : (two & 0xffff0000u) | x.bits;
  }
  __device__ __forceinline__ void set_pair(int pair, uint32_t two) { v.at[pair] = two; }
  __device__ __forceinline__ float value(int e) const {
    return e % 2 ? device::high_half<T>(v.at[e / 2]) : device::low_half<T>(v.at[e / 2]);
  }
};

// The rounding errors that a refinement keeps, of the elements that a thread has in flight.
template <bool kThere, int N, int kVectors> struct Dropped {};
template <int N, int kVectors> struct Dropped<true, N, kVectors> {
  Lanes<bfloat16, N> dropped[kVectors];
};

// What one thread has in flight: kVectors vectors of N adjacent elements. Adjacent threads have adjacent vectors.
template <class F, class In, unsigned kMost, unsigned kHas, int N, int kVectors> struct Tile
    : Dropped<kHasExtra<In> && !In::kMaster, N, kVectors> {
  using Param = typename In::Param;
  using State = typename In::State;
  using Value = std::conditional_t<In::kMaster, float, Param>;  // master or parameter
  Lanes<Param, N> grad[kVectors];
  Lanes<Value, N> value[kVectors];
  Lanes<State, N> states[kVectors][kOptimMaxStates];

  static constexpr int kElems = kOptimThreads * kVectors * N;

  __device__ __forceinline__ static int place(int begin, int k) {
    return begin + (k * kOptimThreads + static_cast<int>(threadIdx.x)) * N;
  }

  __device__ __forceinline__ void load(const Chunk<In, kMost>& c, int begin, int end) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k)
      if (const int i = place(begin, k); i < end) load_at(k, c, i);
  }

  __device__ __forceinline__ void load_at(int k, const Chunk<In, kMost>& c, int i) {
    grad[k].load(c.grad + i);
    if constexpr (In::kMaster)
      value[k].load(c.extra + i);
    else
      value[k].load(c.param + i);
    if constexpr (kHasExtra<In> && !In::kMaster) this->dropped[k].load(c.extra + i);
#pragma unroll
    for (int s = 0; s < kOptimMaxStates; ++s)
      if ((kHas >> s) & 1) states[k][s].load(c.states[s] + i);
  }

  // `seed`: of the group. Only random rounding reads it.
  __device__ __forceinline__ void update_and_store(const Constants<F, In>& constants, uint64_t seed,
                                                   const Chunk<In, kMost>& c, int begin, int end) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int i = place(begin, k);
      if (i >= end) continue;
      if (update(k, constants, seed, c, i)) {
        store(k, c, i);
      } else if constexpr (N > 1) {  // repeats the vector by single elements; none is stored yet
#pragma unroll 1
        for (int e = 0; e < N; ++e) {
          Tile<F, In, kMost, kHas, 1, 1> one;
          one.load_at(0, c, i + e);
          one.update(0, constants, seed, c, i + e);
          one.store(0, c, i + e);
        }
      }
    }
  }

  // Updates N elements with QuickMath. If a parameter becomes NaN, a tile of one element repeats it with IeeeMath; a
  // tile of several elements returns false, and the caller repeats all of them one by one.
  __device__ __forceinline__ bool update(int k, const Constants<F, In>& constants, uint64_t seed,
                                         const Chunk<In, kMost>& c, int i) {
    if constexpr (kIsStochastic<In>) {
      PhiloxCounter words[N == 1 ? 1 : N / 2];
      const uint64_t element = c.first_elem + static_cast<uint64_t>(i);
      rounding_words(words, seed, constants.step, element / 2);
      if constexpr (N == 1) {
        float p, x[kOptimMaxStates];
        updated(k, 0, constants, p, x);
        round_at_random(k, words[0], element % 2 != 0, p, x);
        return true;
      } else {
        bool is_nan = false;
#pragma unroll
        for (int pair = 0; pair < N / 2; ++pair) is_nan |= !update_pair(k, pair, constants, words[pair]);
        return !is_nan;
      }
    } else {
      bool is_nan = false;
#pragma unroll
      for (int e = 0; e < N; ++e) {
        float p, x[kOptimMaxStates];
        is_nan |= !updated(k, e, constants, p, x);
        round(k, e, p, x);
      }
      return !is_nan;
    }
  }

  // Computes the new values of one element, not yet rounded. Returns as `update` does.
  __device__ __forceinline__ bool updated(int k, int e, const Constants<F, In>& constants, float& p,
                                          float (&x)[kOptimMaxStates]) const {
    element<QuickMath>(k, e, constants, p, x);
    if constexpr (F::kDivides) {
      if constexpr (N > 1) return p == p;
      if (p != p) element<IeeeMath>(k, e, constants, p, x);
    }
    return true;
  }

  template <class Math> __device__ __forceinline__ void element(int k, int e, const Constants<F, In>& constants,
                                                                float& p, float (&x)[kOptimMaxStates]) const {
    p = value[k].value(e);
    if constexpr (In::kRefinement == Refinement::compensated) p += this->dropped[k].value(e);
    if constexpr (In::kRefinement == Refinement::remainder) p = join_float(value[k].get(e), this->dropped[k].get(e));
#pragma unroll
    for (int s = 0; s < kOptimMaxStates; ++s)
      if ((kHas >> s) & 1) x[s] = states[k][s].value(e);
    F::template element<kHas, float, Math>(constants.scalars, grad[k].value(e), p, x);
  }

  __device__ __forceinline__ void round(int k, int e, float p, const float (&x)[kOptimMaxStates]) {
    if constexpr (In::kRefinement == Refinement::remainder) {
      const SplitFloat split = split_float(p);
      value[k].set(e, split.rounded);
      this->dropped[k].set(e, split.remainder);
    } else {
      value[k].set(e, device::from_float<Value>(p));
    }
    if constexpr (In::kRefinement == Refinement::compensated)
      this->dropped[k].set(e, device::from_float<bfloat16>(compensation_of(p, value[k].value(e))));
#pragma unroll
    for (int s = 0; s < kOptimMaxStates; ++s)
      if ((kHas >> s) & 1) states[k][s].set(e, device::from_float<State>(x[s]));
  }

  // Rounds the single element of a tile with N == 1.
  __device__ __forceinline__ void round_at_random(int k, const PhiloxCounter& words, bool odd, float p,
                                                  const float (&x)[kOptimMaxStates]) {
    value[k].set(0, device::round_stochastic(p, rounding_bits(words, odd, 0)));
#pragma unroll
    for (int s = 0; s < kOptimMaxStates; ++s)
      if ((kHas >> s) & 1) states[k][s].set(0, device::round_stochastic(x[s], rounding_bits(words, odd, 1 + s)));
  }

  // Updates two elements and rounds them at random. pack_stochastic takes no NaN. An optimizer that divides may call
  // it: a NaN state makes the parameter NaN, and then the caller repeats the elements one by one.
  __device__ __forceinline__ bool update_pair(int k, int pair, const Constants<F, In>& constants,
                                              const PhiloxCounter& words) {
    float p[2], x[2][kOptimMaxStates];
    const bool both = updated(k, 2 * pair, constants, p[0], x[0]) & updated(k, 2 * pair + 1, constants, p[1], x[1]);
    const auto rounded = [&](float low, float high, int array) {
      const uint32_t random_low = rounding_bits(words, false, array), random_high = rounding_bits(words, true, array);
      if constexpr (F::kDivides) return device::pack_stochastic(low, high, random_low, random_high);
      return device::round_stochastic(low, random_low).bits |
             static_cast<uint32_t>(device::round_stochastic(high, random_high).bits) << 16;
    };
    value[k].set_pair(pair, rounded(p[0], p[1], 0));
#pragma unroll
    for (int s = 0; s < kOptimMaxStates; ++s)
      if ((kHas >> s) & 1) states[k][s].set_pair(pair, rounded(x[0][s], x[1][s], 1 + s));
    return both;
  }

  __device__ __forceinline__ void store(int k, const Chunk<In, kMost>& c, int i) const {
    if constexpr (In::kMaster) {
      value[k].store(c.extra + i);
      Lanes<Param, N> rounded{};
#pragma unroll
      for (int e = 0; e < N; ++e) rounded.set(e, device::from_float<Param>(value[k].value(e)));
      rounded.store(c.param + i);
    } else {
      value[k].store(c.param + i);
      if constexpr (kHasExtra<In>) this->dropped[k].store(c.extra + i);
    }
#pragma unroll
    for (int s = 0; s < kOptimMaxStates; ++s)
      if ((kHas >> s) & 1) states[k][s].store(c.states[s] + i);
  }
};

// Computes the tensor's constants of this step from device memory, and counts the step. Called by warp 0, converged.
template <class F, class In>
__device__ __forceinline__ void prepare(const OptimParams& p, OptimTensor* t, Constants<F, In>* shared) {
  const OptimGroup& group = p.groups[t->group - p.first_group];
  // An optimizer that corrects a bias always has a counter.
  const bool counts = F::kPowers > 0 || t->step;
  // Only lane 0 reads the counter, so its fences order every read before the write.
  const float taken = __shfl_sync(0xffffffffu, threadIdx.x == 0 && counts ? *t->step : 0.0f, 0);
  double corrections[F::kPowers > 0 ? F::kPowers : 1];
  if constexpr (F::kPowers > 0) {  // one lane per correction
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
    __threadfence();  // this block reads the counter before it is counted
    if (atomicAdd(&t->chunks_done, 1u) + 1 != static_cast<uint32_t>(t->chunks)) return;
    __threadfence();  // and the counter is written after all blocks have been counted
    atomicExch(&t->chunks_done, 0u);
  }
  *t->step = taken + 1;
}

// Updates one chunk. Its first tile is in flight while warp 0 computes the constants.
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

// The functor's only variant whose states are all in kMost; ~0u if several are.
template <class F, unsigned kMost> constexpr unsigned only_variant() {
  unsigned found = 0, count = 0;
  for (const unsigned has : F::kVariants)
    if ((has & ~kMost) == 0) found = has, ++count;
  return count == 1 ? found : ~0u;
}

// Calls `update` for the variant whose states the tensor has. Compiles only variants whose states are all in kMost.
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

// Blocks per multiprocessor that the launch bounds ask for. Fewer where ptxas reports spills at 64 registers a thread:
// on sm_80, with three states, with eight elements a thread and several states, with a master and two states.
template <class In, unsigned kMost> constexpr int resident_blocks() {
  constexpr bool kKeepsDropped = keeps_dropped(In::kRefinement);
  constexpr int kStates =
      (kMost & 1) + (kMost >> 1 & 1) + (kMost >> 2 & 1) + (kKeepsDropped && In::kLanes == 8);  // counts as a state
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  return kOptimBlocksAMultiprocessor - 1 - (In::kLanes == 8 && kStates >= 3);
#else
  // Measured on one H200 (2026-11-23): random rounding computes the longest per element and gains from a 4th block.
  if (kIsStochastic<In> && kStates <= 2) return kOptimBlocksAMultiprocessor;
  return kOptimBlocksAMultiprocessor - (kStates >= 3) - (In::kLanes == 8 && kStates >= 2) -
         ((In::kMaster || kKeepsDropped) && In::kLanes == 4 && kStates == 2);
#endif
}

// kMost: the states that some tensor may have. A tensor has those of one of the functor's variants. kCasts: the tensors
// that p.casts names are cast to 8-bit floats, too.
template <class F, class In, unsigned kMost, bool kCasts = false>
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
  if constexpr (kCasts) cast_rows<typename In::Param>(p);
}

}  // namespace warpsmith::optim
