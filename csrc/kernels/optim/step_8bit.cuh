#pragma once
#include <cstdint>

#include "device/reduce.h"
#include "kernels/optim/quantize.h"
#include "kernels/optim/step.cuh"

// One step of an optimizer with 8-bit states; one block of threads a chunk, one warp for each 256 elements. Reads the
// gradient, the parameter, the codes and the scales once and writes all but the gradient: AdamW 16 bytes an element
// with float32 parameters, 10 with 16-bit ones. A tensor without scales has float32 states, in the same launch.
namespace warpsmith::optim {

// The values of all codes and the borders between them; [1]: of signed states.
struct Maps {
  float values[2][kCodes], borders[2][kCodes];
};

template <class F> constexpr bool is_signed(int state) { return !((F::kNotNegative >> state) & 1); }

// By all threads of a block; a barrier must follow.
template <class F, unsigned kHas> __device__ __forceinline__ void fill(Maps& maps) {
  static_assert(kOptimThreads == kCodes);
  const int code = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int with_sign = 0; with_sign < 2; ++with_sign) {
    const unsigned of_kind = with_sign ? kHas & ~F::kNotNegative : kHas & F::kNotNegative;
    if (of_kind == 0) continue;
    maps.values[with_sign][code] = dynamic_value(code, with_sign);
    maps.borders[with_sign][code] = dynamic_border(code, with_sign);
  }
}

struct LargerOrNan {
  __device__ __forceinline__ float operator()(float a, float b) const { return larger_or_nan(a, b); }
};

// What of a chunk the 256 elements from `begin` on are; `block`: their number in the tensor.
template <class P> struct QuantBlock {
  const P* grad;
  P* param;
  uint8_t* codes[kOptimMaxStates];
  float* scales[kOptimMaxStates];
  int elems;
};

// Loads or stores of four adjacent elements: at once, or by those that there are.
template <class T> __device__ __forceinline__ Vector<T, 4> load_four(const T* from, int count, bool aligned) {
  if (aligned) return device::load_vector<4>(from);
  Vector<T, 4> v{};
#pragma unroll
  for (int e = 0; e < 4; ++e)
    if (e < count) v.at[e] = device::load(from + e);
  return v;
}
template <class T> __device__ __forceinline__ void store_four(T* to, const Vector<T, 4>& v, int count, bool aligned) {
  if (aligned) return device::store_vector(to, v);
#pragma unroll
  for (int e = 0; e < 4; ++e)
    if (e < count) device::store(to + e, v.at[e]);
}

// One block by one warp, converged: each lane has four adjacent elements at a time. `aligned`: all 256 elements are
// there, at addresses for vectors.
template <class F, class P, unsigned kHas>
__device__ __forceinline__ void update_block(const QuantBlock<P>& b, bool aligned, const Maps& maps,
                                             const typename F::template Scalars<float>& scalars) {
  constexpr int kLanes = 4, kGroups = kQuantBlock / 32 / kLanes;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const auto place = [&](int k) { return (k * 32 + lane) * kLanes; };
  Vector<P, kLanes> grad[kGroups], param[kGroups];
  Vector<uint8_t, kLanes> codes[kGroups][kOptimMaxStates];
  float scales[kOptimMaxStates], largest[kOptimMaxStates] = {}, x[kGroups][kLanes][kOptimMaxStates];
#pragma unroll
  for (int s = 0; s < kOptimMaxStates; ++s)
    if ((kHas >> s) & 1) scales[s] = __shfl_sync(0xffffffffu, lane == 0 ? device::load(b.scales[s]) : 0.0f, 0);
#pragma unroll
  for (int k = 0; k < kGroups; ++k) {
    grad[k] = load_four(b.grad + place(k), b.elems - place(k), aligned);
    param[k] = load_four(b.param + place(k), b.elems - place(k), aligned);
#pragma unroll
    for (int s = 0; s < kOptimMaxStates; ++s)
      if ((kHas >> s) & 1) codes[k][s] = load_four(b.codes[s] + place(k), b.elems - place(k), aligned);
  }
#pragma unroll
  for (int k = 0; k < kGroups; ++k) {
#pragma unroll
    for (int e = 0; e < kLanes; ++e) {
      float p = device::to_float(param[k].at[e]);
#pragma unroll
      for (int s = 0; s < kOptimMaxStates; ++s)
        if ((kHas >> s) & 1) x[k][e][s] = maps.values[is_signed<F>(s)][codes[k][s].at[e]] * scales[s];
      F::template element<kHas, float>(scalars, device::to_float(grad[k].at[e]), p, x[k][e]);
      param[k].at[e] = device::from_float<P>(p);
#pragma unroll
      for (int s = 0; s < kOptimMaxStates; ++s)
        if (((kHas >> s) & 1) && place(k) + e < b.elems) largest[s] = larger_or_nan(largest[s], fabsf(x[k][e][s]));
    }
    store_four(b.param + place(k), param[k], b.elems - place(k), aligned);
  }
#pragma unroll
  for (int s = 0; s < kOptimMaxStates; ++s) {
    if (!((kHas >> s) & 1)) continue;
    const float scale = device::group_reduce<32>(largest[s], LargerOrNan());
    if (lane == 0) device::store(b.scales[s], scale);
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
#pragma unroll
      for (int e = 0; e < kLanes; ++e)
        codes[k][s].at[e] = static_cast<uint8_t>(
            dynamic_code(maps.borders[is_signed<F>(s)], scaled(x[k][e][s], scale), is_signed<F>(s)));
      store_four(b.codes[s] + place(k), codes[k][s], b.elems - place(k), aligned);
    }
  }
}

// One chunk of a tensor with scales: its blocks, in turn to the warps.
template <class F, class P, unsigned kHas>
__device__ __forceinline__ void update_quantized(const OptimTensor& t, const void* grad, int64_t begin,
                                                 const Maps& maps, const typename F::template Scalars<float>& scalars) {
  constexpr int kWarps = kOptimThreads / 32;
  const int elems = static_cast<int>(t.numel - begin < t.chunk_elems ? t.numel - begin : t.chunk_elems);
  const int64_t blocks = quant_blocks(t.numel);
  for (int at = static_cast<int>(threadIdx.x) / 32 * kQuantBlock; at < elems; at += kWarps * kQuantBlock) {
    QuantBlock<P> b;
    b.grad = static_cast<const P*>(grad) + begin + at;
    b.param = static_cast<P*>(t.param) + begin + at;
    b.elems = elems - at < kQuantBlock ? elems - at : kQuantBlock;
    uintptr_t bits = reinterpret_cast<uintptr_t>(b.grad) | reinterpret_cast<uintptr_t>(b.param);
    uintptr_t code_bits = 0;
#pragma unroll
    for (int s = 0; s < kOptimMaxStates; ++s)
      if ((kHas >> s) & 1) {
        b.codes[s] = static_cast<uint8_t*>(t.states[s]) + begin + at;
        b.scales[s] = static_cast<float*>(t.extra) + s * blocks + (begin + at) / kQuantBlock;
        code_bits |= reinterpret_cast<uintptr_t>(b.codes[s]);
      }
    const bool aligned = b.elems == kQuantBlock && bits % (4 * sizeof(P)) == 0 && code_bits % 4 == 0;
    update_block<F, P, kHas>(b, aligned, maps, scalars);
  }
}

// kMost: the states of a tensor with scales, and those that one without may have.
template <class F, class P, unsigned kMost> __global__ void __launch_bounds__(kOptimThreads, 2)
    step_8bit(const __grid_constant__ OptimParams p) {
  using In = Stored<P, float, false>;
  using Shared = Constants<F, In>;
  WARPSMITH_SHARED(Shared, constants, 1);
  WARPSMITH_SHARED(Maps, maps, 1);
  if (p.found_inf && *p.found_inf != 0.0f) return;
  const ListChunk at = p.chunks[blockIdx.x];
  OptimTensor* t = p.tensors + at.tensor;
  const void* grad = p.grads[at.tensor];
  const int group = t->group - p.first_group;
  if (!grad || group < 0 || group >= p.group_count) return;

  const int64_t begin = int64_t{at.chunk} * t->chunk_elems;
  if (!t->extra) {
    of_variant<F, In, kMost>(p, t, Chunk<In, kMost>(*t, grad, begin), constants);
    return;
  }
  fill<F, kMost>(maps[0]);
  if (threadIdx.x < 32) prepare(p, t, constants);
  __syncthreads();
  update_quantized<F, P, kMost>(*t, grad, begin, maps[0], constants[0].scalars);
}

}  // namespace warpsmith::optim
