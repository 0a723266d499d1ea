#pragma once
#include <algorithm>
#include <cstdint>

#include "common/half_host.h"
#include "kernels/optim/optim.h"

// What the optimizers' CPU loops share: the update of adjacent elements in float32 or float64, and the walk over
// chunks.
namespace warpsmith::cpu::optim {

// Loops take a multiple of this many elements, which is a multiple of every vector length, so they never have a scalar
// tail. In a tail the compiler would contract other products than in the vectorised loop.
constexpr int64_t kBlock = 64;
// Elements of 16-bit arrays that are widened at a time: their float32 values stay in the first cache.
constexpr int64_t kWideElems = 512;
constexpr int64_t whole_blocks(int64_t elems) { return (elems + kBlock - 1) / kBlock * kBlock; }

// Converts `count` elements of a gradient, from element `first` on, to float32.
void widen(const Gradient& from, int64_t first, float* to, int64_t count);

// Moves `count` adjacent averages towards their values (average.h). `dtype`: of the values. Averages are float32, for
// float64 values float64.
void average_values(void* averages, const void* values, Dtype dtype, int64_t count, double weight);

// Moves averages, writes copies and zeroes gradients of elements [first, first + count) of a tensor, as the step asks.
// `skips`: only zeroes gradients.
void do_extras(const OptimParams& p, int64_t tensor, int64_t first, int64_t count, bool skips);

// Casts the weights that p.casts names and the step has written to 8-bit floats.
Status cast_weights(const OptimParams& p, const Parallel& parallel);

// Adjacent elements of one tensor; `update` takes a multiple of kBlock. State pointers are null where the tensor lacks
// the state.
template <class T> struct Piece {
  int64_t count;
  const T* grad;
  T* param;
  T* states[kOptimMaxStates];
  uint32_t has;
};

// One step of every element of a piece. The first argument only chooses the optimizer.
#define WARPSMITH_ROW(optimizer, F)                                       \
  void update(F*, const F::Scalars<float>& s, const Piece<float>& piece); \
  void update(F*, const F::Scalars<double>& s, const Piece<double>& piece);
WARPSMITH_OPTIMIZERS(WARPSMITH_ROW)
#undef WARPSMITH_ROW

// widen converts `count` elements to float32; narrow rounds them to nearest.
#define WARPSMITH_DTYPE(T)                                                       \
  void widen(const T* __restrict__ from, float* __restrict__ to, int64_t count); \
  void narrow(const float* __restrict__ from, T* __restrict__ to, int64_t count);
WARPSMITH_DTYPE(bfloat16)
WARPSMITH_DTYPE(float16)
WARPSMITH_DTYPE(float)
#undef WARPSMITH_DTYPE

inline bool is_launched(const OptimParams& p, int64_t tensor) {
  const int32_t group = p.tensors[tensor].group - p.first_group;
  return group >= 0 && group < p.group_count;
}
inline bool takes_part(const OptimParams& p, int64_t tensor) { return p.grads[tensor] && is_launched(p, tensor); }

template <class F, class T> typename F::template Scalars<T> scalars_of(const OptimParams& p, const OptimTensor& t) {
  const OptimGroup& group = p.groups[t.group - p.first_group];
  double corrections[F::kPowers + 1];
  const float taken = t.step ? *t.step : 0;
  for (int i = 0; i < F::kPowers; ++i) corrections[i] = bias_correction(values_of(group)[i], taken);
  return optim_scalars<F, T>(group, p.grad_scale, corrections, t.step ? static_cast<double>(taken) + 1 : 0.0);
}

// Calls chunk(tensor, its gradient, first element, elements) on all threads, then counts the steps.
template <class Chunk> void for_chunks(const OptimParams& p, const Parallel& parallel, Chunk&& chunk) {
  parallel(p.chunk_count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const ListChunk c = p.chunks[i];
      if (!is_launched(p, c.tensor)) continue;
      const OptimTensor& t = p.tensors[c.tensor];
      const int64_t first = static_cast<int64_t>(c.chunk) * t.chunk_elems;
      const int64_t count = std::min<int64_t>(t.chunk_elems, t.numel - first);
      if (p.grads[c.tensor]) chunk(t, gradient_of(p.grads[c.tensor], param_dtype(p.storage)), first, count);
      if (does_more(p)) do_extras(p, c.tensor, first, count, false);
    }
  });
  for (int64_t i = 0; i < p.tensor_count; ++i)
    if (takes_part(p, i) && p.tensors[i].step) *p.tensors[i].step += 1;
}

// The storages of optim_refined.cpp and optim_8bit.cpp.
void step_refined(const OptimParams& p, const Parallel& parallel);
void step_8bit(const OptimParams& p, const Parallel& parallel);

}  // namespace warpsmith::cpu::optim
