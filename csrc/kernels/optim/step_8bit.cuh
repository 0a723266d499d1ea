#pragma once
#include <cstdint>

#include "kernels/optim/code_map.h"
#include "kernels/optim/step_runtime_dtypes.cuh"

// One step of an optimizer with 8-bit states; one block of threads per chunk, one warp per 256 elements.
//
// Reads the gradient, the parameter, the codes and the scales once, and writes all but the gradient: AdamW 16 bytes per
// element with float32 parameters, 10 with 16-bit parameters. A chunk adds 18 KB of code maps. Tensors without scales
// have float32 states and are updated in the same launch.
namespace warpsmith::optim {

constexpr __device__ CodeMap<true> kSignedMap{};
constexpr __device__ CodeMap<false> kUnsignedMap{};

template <class F> constexpr bool is_signed(int state) { return !((F::kNotNegative >> state) & 1); }

// The maps that the states `kHas` of an optimizer need, in shared memory.
template <bool kBoth> struct Maps {
  CodeMap<true> with_sign;
};
template <> struct Maps<true> : Maps<false> {
  CodeMap<false> without_sign;
};
template <class F, unsigned kHas> using MapsOf = Maps<(kHas & F::kNotNegative) != 0>;

// Copies a map to shared memory. Called by all threads of a block; a barrier must follow.
template <class Map> __device__ __forceinline__ void fill(Map& to, const Map& from) {
  static_assert(sizeof(Map) % 16 == 0);
  const auto* source = reinterpret_cast<const Vector<uint32_t, 4>*>(&from);
  auto* target = reinterpret_cast<Vector<uint32_t, 4>*>(&to);
  for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(sizeof(Map) / 16); i += kOptimThreads)
    target[i] = device::load(source + i);
}

// Where the arrays of a chunk begin. Lives in shared memory and is read again at every use: in registers it would take
// a quarter of what a thread has. kRuntimeDtype: the gradient's dtype is known only at run time.
template <class P, bool kRuntimeDtype> struct QuantChunk {
  ChunkGradient<P, kRuntimeDtype> grad;
  P* param;
  uint8_t* codes[kOptimMaxStates];
  float* scales[kOptimMaxStates];
  int elems;
  bool aligned;  // whether a lane may load its eight elements as vectors

  // Leaves codes and scales of states outside of `has` unset.
  __device__ __forceinline__ void set(const OptimTensor& t, const void* tensor_grad, int64_t begin, unsigned has) {
    const int64_t blocks = quant_blocks(t.numel);
    grad = chunk_gradient<P, kRuntimeDtype>(tensor_grad, begin);
    param = static_cast<P*>(t.param) + begin;
    elems = static_cast<int>(t.numel - begin < t.chunk_elems ? t.numel - begin : t.chunk_elems);
    const uintptr_t bits = address_of(grad) | reinterpret_cast<uintptr_t>(param);
    uintptr_t code_bits = 0;
#pragma unroll
    for (int s = 0; s < kOptimMaxStates; ++s)
      if ((has >> s) & 1) {
        codes[s] = static_cast<uint8_t*>(t.states[s]) + begin;
        scales[s] = static_cast<float*>(t.extra) + s * blocks + begin / kQuantBlock;
        code_bits |= reinterpret_cast<uintptr_t>(codes[s]);
      }
    aligned = bits % 16 == 0 && code_bits % 8 == 0;
  }
};

constexpr int kEight = 8;  // adjacent elements per lane of a block of 256
static_assert(kQuantBlock == 32 * kEight);

// Eight adjacent elements, in loads of at most 16 bytes. With `count`, only the first `count` are loaded or stored.
template <class T> struct Eight {
  static constexpr int kLanes = sizeof(T) == 4 ? 4 : 8;
  Lanes<T, kLanes> part[kEight / kLanes];

  __device__ __forceinline__ void load(const T* from) {
#pragma unroll
    for (int k = 0; k < kEight / kLanes; ++k) part[k].load(from + k * kLanes);
  }
  __device__ __forceinline__ void load(const T* from, int count) {
#pragma unroll
    for (int e = 0; e < kEight; ++e) set(e, e < count ? device::load(from + e) : T{});
  }
  __device__ __forceinline__ void store(T* to) const {
#pragma unroll
    for (int k = 0; k < kEight / kLanes; ++k) part[k].store(to + k * kLanes);
  }
  __device__ __forceinline__ void store(T* to, int count) const {
#pragma unroll
    for (int e = 0; e < kEight; ++e)
      if (e < count) device::store(to + e, part[e / kLanes].get(e % kLanes));
  }
  __device__ __forceinline__ void set(int e, T x) { part[e / kLanes].set(e % kLanes, x); }
  __device__ __forceinline__ float value(int e) const { return part[e / kLanes].value(e % kLanes); }
};

// Eight adjacent elements of a gradient whose dtype is known only at run time. Elements from `count` on are 0.
struct RuntimeEight {
  RuntimeLanes<4> part[2];
  Dtype dtype;

  __device__ __forceinline__ void load(const RuntimeArray& from, int first) {
    dtype = from.dtype;
#pragma unroll
    for (int k = 0; k < 2; ++k) part[k].load(from, first + 4 * k);
  }
  __device__ __forceinline__ void load(const RuntimeArray& from, int first, int count) {
    dtype = from.dtype;
#pragma unroll
    for (int e = 0; e < kEight; ++e) {
      RuntimeLanes<1> one{};
      if (e < count) one.load(from, first + e);
      part[e / 4].set(e % 4, dtype, one.value(0, dtype));
    }
  }
  __device__ __forceinline__ float value(int e) const { return part[e / 4].value(e % 4, dtype); }
};

// Eight codes, in two words.
struct EightCodes {
  Vector<uint32_t, 2> v;
  __device__ __forceinline__ void load(const uint8_t* from) {
    v = device::load_vector<2>(reinterpret_cast<const uint32_t*>(from));
  }
  // Codes from `count` on become `zero`, the code of 0.
  __device__ __forceinline__ void load(const uint8_t* from, int count, uint32_t zero) {
    v = {};
#pragma unroll
    for (int e = 0; e < kEight; ++e)
      v.at[e / 4] |= (e < count ? uint32_t{device::load(from + e)} : zero) << (e % 4 * 8);
  }
  __device__ __forceinline__ void store(uint8_t* to) const { device::store_vector(reinterpret_cast<uint32_t*>(to), v); }
  __device__ __forceinline__ void store(uint8_t* to, int count) const {
#pragma unroll
    for (int e = 0; e < kEight; ++e)
      if (e < count) device::store(to + e, static_cast<uint8_t>(get(e)));
  }
  __device__ __forceinline__ uint32_t get(int e) const { return __byte_perm(v.at[e / 4], 0, 0x4440 + e % 4); }
  // Takes the lowest byte of each word.
  __device__ __forceinline__ void set(const uint32_t (&codes)[kEight]) {
#pragma unroll
    for (int w = 0; w < 2; ++w)
      v.at[w] = __byte_perm(__byte_perm(codes[4 * w], codes[4 * w + 1], 0x0040),
                            __byte_perm(codes[4 * w + 2], codes[4 * w + 3], 0x0040), 0x5410);
  }
};

// A lane's part of a block of 256 elements, as stored.
template <class F, class P, unsigned kHas, bool kRuntimeDtype> struct Raw {
  std::conditional_t<kRuntimeDtype, RuntimeEight, Eight<P>> grad;
  Eight<P> param;
  EightCodes codes[kOptimMaxStates];
  float scales[kOptimMaxStates];  // lane 0's

  // Loads the block that begins with element `at` of the chunk. No load depends on another one. `aligned`: all 256
  // elements exist, at addresses that allow vectors. Elements beyond the chunk are 0 and stay 0, so no scale depends on
  // them.
  __device__ __forceinline__ void load(const QuantChunk<P, kRuntimeDtype>& c, int at, bool aligned) {
    const int lane = static_cast<int>(threadIdx.x % 32), first = at + lane * kEight, count = c.elems - first;
    if (aligned) {
      if constexpr (kRuntimeDtype)
        grad.load(c.grad, first);
      else
        grad.load(c.grad + first);
      param.load(c.param + first);
#pragma unroll
      for (int s = 0; s < kOptimMaxStates; ++s)
        if ((kHas >> s) & 1) codes[s].load(c.codes[s] + first);
    } else {
      if constexpr (kRuntimeDtype)
        grad.load(c.grad, first, count);
      else
        grad.load(c.grad + first, count);
      param.load(c.param + first, count);
#pragma unroll
      for (int s = 0; s < kOptimMaxStates; ++s)
        if ((kHas >> s) & 1) codes[s].load(c.codes[s] + first, count, is_signed<F>(s) ? 127 : 0);
    }
#pragma unroll
    for (int s = 0; s < kOptimMaxStates; ++s)
      if ((kHas >> s) & 1) scales[s] = lane == 0 ? device::load(c.scales[s] + at / kQuantBlock) : 0.0f;
  }
  __device__ __forceinline__ void share_scales() {
#pragma unroll
    for (int s = 0; s < kOptimMaxStates; ++s)
      if ((kHas >> s) & 1) scales[s] = __shfl_sync(0xffffffffu, scales[s], 0);
  }
};

// The code of any x, by a binary search through the values of all codes in a rolled loop.
__device__ __forceinline__ uint32_t searched_code(const float* values, float x, bool with_sign) {
  int code = 0;
#pragma unroll 1
  for (int half = kCodes / 2; half > 0; half /= 2) {
    const int below = code + half - 1;
    if ((values[below] + values[below + 1]) * 0.5f < x) code += half;
  }
  return !with_sign && code == 0 && x > 0.0f ? 1 : static_cast<uint32_t>(code);
}

// The codes of x / scale. Every lane of a warp has the same scale.
template <bool kSigned>
__device__ __forceinline__ EightCodes encode(const CodeMap<kSigned>& map, const float (&x)[kEight], float scale) {
  uint32_t codes[kEight];
  // In this range the correction of the quotient is exact, except for x far below the lowest border.
  if (scale >= 0x1p-80f && scale <= 0x1p80f) {
    const float inverse = 1.0f / scale;
#pragma unroll
    for (int e = 0; e < kEight; ++e) {
      const float guess = x[e] * inverse;
      codes[e] = mapped_code(map, fmaf(fmaf(-scale, guess, x[e]), inverse, guess));
    }
  } else {
#pragma unroll 1
    for (int n = 0; n < kEight; ++n) {
      float mine = x[0];
#pragma unroll
      for (int e = 1; e < kEight; ++e) mine = e == n ? x[e] : mine;
      const uint32_t code = searched_code(map.values, scaled(mine, scale), kSigned);
#pragma unroll
      for (int e = 0; e < kEight; ++e) codes[e] = e == n ? code : codes[e];
    }
  }
  EightCodes packed;
  packed.set(codes);
  return packed;
}

// Updates one block of 256 elements from what `raw` has loaded. Called by one warp, converged.
template <class F, class P, unsigned kHas, bool kRuntimeDtype>
__device__ __forceinline__ void update_block(const QuantChunk<P, kRuntimeDtype>& c, int at, bool aligned,
                                             Raw<F, P, kHas, kRuntimeDtype>& raw, const MapsOf<F, kHas>& maps,
                                             const typename F::template Scalars<float>& scalars) {
  const int lane = static_cast<int>(threadIdx.x % 32), first = at + lane * kEight;
  auto& [grad, param, codes, scales] = raw;
  float x[kOptimMaxStates][kEight];
  raw.share_scales();
  const auto decoded = [&](int s, uint32_t code) {
    if constexpr ((kHas & F::kNotNegative) != 0)
      return (is_signed<F>(s) ? maps.with_sign.values : maps.without_sign.values)[code] * scales[s];
    else
      return maps.with_sign.values[code] * scales[s];
  };
  bool is_nan = false;
#pragma unroll
  for (int e = 0; e < kEight; ++e) {
    float one[kOptimMaxStates], p = param.value(e);
#pragma unroll
    for (int s = 0; s < kOptimMaxStates; ++s)
      if ((kHas >> s) & 1) one[s] = decoded(s, codes[s].get(e));
    F::template element<kHas, float, QuickMath>(scalars, grad.value(e), p, one);
    is_nan |= p != p;
    param.set(e, device::from_float<P>(p));
#pragma unroll
    for (int s = 0; s < kOptimMaxStates; ++s)
      if ((kHas >> s) & 1) x[s][e] = one[s];
  }
  if (F::kDivides && is_nan) {
#pragma unroll 1
    for (int n = 0; n < kEight && n < c.elems - first; ++n) {
      float one[kOptimMaxStates], mine = device::to_float(device::load(c.param + first + n));
      const auto own = load_gradient<1>(c.grad, first + n);
      const float before = mine, g = gradient_value(c.grad, own, 0);
      const auto decode_all = [&] {
#pragma unroll
        for (int s = 0; s < kOptimMaxStates; ++s)
          if ((kHas >> s) & 1) one[s] = decoded(s, device::load(c.codes[s] + first + n));
      };
      decode_all();
      F::template element<kHas, float, QuickMath>(scalars, g, mine, one);
      if (mine == mine) continue;  // the NaN is at another one of the eight
      mine = before;
      decode_all();
      F::template element<kHas, float, IeeeMath>(scalars, g, mine, one);
#pragma unroll
      for (int e = 0; e < kEight; ++e) {
        if (e != n) continue;
        param.set(e, device::from_float<P>(mine));
#pragma unroll
        for (int s = 0; s < kOptimMaxStates; ++s)
          if ((kHas >> s) & 1) x[s][e] = one[s];
      }
    }
  }
  __syncwarp(0xffffffffu);  // makes the compiler read `c` from shared memory again
  const int count = c.elems - first;
  if (aligned)
    param.store(c.param + first);
  else
    param.store(c.param + first, count);
#pragma unroll
  for (int s = 0; s < kOptimMaxStates; ++s) {
    if (!((kHas >> s) & 1)) continue;
    uint32_t largest = 0;  // as bits: a NaN is larger than all numbers
#pragma unroll
    for (int e = 0; e < kEight; ++e) {
      const uint32_t bits = __float_as_uint(x[s][e]) & 0x7fffffffu;
      largest = bits > largest ? bits : largest;
    }
    const float scale = __uint_as_float(__reduce_max_sync(0xffffffffu, largest));
    if (lane == 0) device::store(c.scales[s] + at / kQuantBlock, scale);
    if constexpr ((kHas & F::kNotNegative) != 0)
      codes[s] = is_signed<F>(s) ? encode(maps.with_sign, x[s], scale) : encode(maps.without_sign, x[s], scale);
    else
      codes[s] = encode(maps.with_sign, x[s], scale);
    if (aligned)
      codes[s].store(c.codes[s] + first);
    else
      codes[s].store(c.codes[s] + first, count);
  }
}

// Updates one chunk of a tensor with scales. Warps take its blocks in turn; a warp loads its next block before it
// updates the one it has.
template <class F, class P, unsigned kHas, bool kRuntimeDtype>
__device__ __forceinline__ void update_quantized(const QuantChunk<P, kRuntimeDtype>& c, const MapsOf<F, kHas>& maps,
                                                 const typename F::template Scalars<float>& scalars) {
  constexpr int kStride = kOptimThreads / 32 * kQuantBlock;
  int at = static_cast<int>(threadIdx.x) / 32 * kQuantBlock;
  const auto aligned = [&] { return c.aligned && c.elems - at >= kQuantBlock; };
  if (at >= c.elems) return;
  Raw<F, P, kHas, kRuntimeDtype> next;
  next.load(c, at, aligned());
  while (at < c.elems) {
    Raw<F, P, kHas, kRuntimeDtype> raw = next;
    const int here = at;
    const bool here_aligned = aligned();
    at += kStride;
    if (at < c.elems) next.load(c, at, aligned());
    update_block<F, P, kHas, kRuntimeDtype>(c, here, here_aligned, raw, maps, scalars);
  }
}

// Blocks per multiprocessor that the launch bounds ask for. float32 parameters and gradients, or gradients of any
// dtype, take the registers that a third block would need.
template <class P, bool kRuntimeDtype> constexpr int kBlocks8Bit =
    sizeof(P) == 4 || kRuntimeDtype ? 2 : kOptimBlocks8Bit;

// kMost: the states of a tensor with scales. A tensor without scales may have fewer.
template <class F, class P, unsigned kMost, bool kRuntimeDtype>
__global__ void __launch_bounds__(kOptimThreads, (kBlocks8Bit<P, kRuntimeDtype>))
    step_8bit(const __grid_constant__ OptimParams p) {
  using In = std::conditional_t<kRuntimeDtype, RuntimeDtypes, Stored<P, float, false>>;
  using Shared = Constants<F, In>;
  WARPSMITH_SHARED(Shared, constants, 1);
  using Tables = MapsOf<F, kMost>;
  WARPSMITH_SHARED(Tables, maps, 1);
  using Quantized = QuantChunk<P, kRuntimeDtype>;
  WARPSMITH_SHARED(Quantized, quantized, 1);
  if (p.found_inf && *p.found_inf != 0.0f) return;
  const ListChunk at = p.chunks[blockIdx.x];
  OptimTensor* t = p.tensors + at.tensor;
  const void* grad = p.grads[at.tensor];
  const int group = t->group - p.first_group;
  if (!grad || group < 0 || group >= p.group_count) return;

  const int64_t begin = int64_t{at.chunk} * t->chunk_elems;
  if (!t->extra) {
    if constexpr (kRuntimeDtype) {
      const RuntimeStorage storage{kDtypeOf<P>, Dtype::float32, false, Refinement::none};
      update_runtime_dtypes_variant<F, kMost>(p, t, RuntimeChunk(storage, *t, gradient_of(grad, storage.param), begin),
                                              constants);
    } else {
      of_variant<F, In, kMost>(p, t, Chunk<In, kMost>(*t, grad, begin), constants);
    }
    return;
  }
  fill(maps[0].with_sign, kSignedMap);
  if constexpr ((kMost & F::kNotNegative) != 0) fill(maps[0].without_sign, kUnsignedMap);
  if (threadIdx.x < 32) prepare<F, In>(p, t, constants);
  if (threadIdx.x == 32) quantized[0].set(*t, grad, begin, kMost);
  __syncthreads();
  update_quantized<F, P, kMost, kRuntimeDtype>(quantized[0], maps[0], constants[0].scalars);
}

}  // namespace warpsmith::optim
