#include <algorithm>
#include <type_traits>

#include "common/vectorize.h"
#include "cpu/optim_loops.h"
#include "kernels/optim/layerwise.h"

// Layerwise optimizers (kernels/optim/layerwise.h): two passes, with the ratios of the tensors between them.
namespace warpsmith {
namespace cpu::optim {
namespace {

constexpr int64_t kSumLanes = 16;  // sums side by side, whatever the processor's vectors: the order is fixed

// Free functions, for target_clones. `u`: the directions of a block of at most kWideElems elements.
#define WARPSMITH_LOOPS(F, T)                                                                                          \
  WARPSMITH_VECTORIZE void moments(F*, const F::Scalars<T>& s, int64_t count, const T* __restrict__ grad,              \
                                   const T* __restrict__ p, T* __restrict__ m, T* __restrict__ v, T* __restrict__ u) { \
    WARPSMITH_IVDEP                                                                                                    \
    for (int64_t i = 0; i < count; ++i) {                                                                              \
      T first = m[i], second = v[i];                                                                                   \
      F::moments<T>(s, grad[i], first, second);                                                                        \
      m[i] = first;                                                                                                    \
      v[i] = second;                                                                                                   \
      u[i] = F::direction<T>(s, p[i], first, second);                                                                  \
    }                                                                                                                  \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void apply(F*, const F::Scalars<T>& s, T step, int64_t count, T* __restrict__ p,                 \
                                 const T* __restrict__ m, const T* __restrict__ v) {                                   \
    WARPSMITH_IVDEP                                                                                                    \
    for (int64_t i = 0; i < count; ++i) p[i] -= step * F::direction<T>(s, p[i], m[i], v[i]);                           \
  }
WARPSMITH_LOOPS(LAMB, float)
WARPSMITH_LOOPS(LAMB, double)
#undef WARPSMITH_LOOPS

#define WARPSMITH_DTYPE(T)                                                                                  \
  WARPSMITH_VECTORIZE void add_squares(const T* __restrict__ x, int64_t count, double* __restrict__ sums) { \
    const int64_t whole = count / kSumLanes * kSumLanes;                                                    \
    for (int64_t i = 0; i < whole; i += kSumLanes)                                                          \
      for (int64_t lane = 0; lane < kSumLanes; ++lane)                                                      \
        sums[lane] += static_cast<double>(x[i + lane]) * static_cast<double>(x[i + lane]);                  \
    for (int64_t lane = 0; lane < count - whole; ++lane)                                                    \
      sums[lane] += static_cast<double>(x[whole + lane]) * static_cast<double>(x[whole + lane]);            \
  }
WARPSMITH_DTYPE(float)
WARPSMITH_DTYPE(double)
#undef WARPSMITH_DTYPE

double sum_of(const double* lanes) {
  double sum = 0;
  for (int64_t lane = 0; lane < kSumLanes; ++lane) sum += lanes[lane];
  return sum;
}

// Calls chunk(number, tensor, gradient, first element, elements) for every chunk that is updated, on all threads.
template <class Chunk> void for_numbered_chunks(const OptimParams& p, const Parallel& parallel, Chunk&& chunk) {
  parallel(p.chunk_count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const ListChunk c = p.chunks[i];
      if (!takes_part(p, c.tensor)) continue;
      const OptimTensor& t = p.tensors[c.tensor];
      const int64_t first = int64_t{c.chunk} * t.chunk_elems;
      chunk(i, t, gradient_of(p.grads[c.tensor], param_dtype(p.storage)), first,
            std::min<int64_t>(t.chunk_elems, t.numel - first));
    }
  });
}

// T: type of arithmetic, states and master. P: type of the parameters.
template <class F, class T, class P> void step_layerwise(const LayerwiseParams& params, const Parallel& parallel) {
  constexpr bool kMaster = !std::is_same_v<T, P>;
  const OptimParams& p = params.step;
  F* const row = nullptr;
  const auto value_of = [](const OptimTensor& t) { return static_cast<T*>(kMaster ? t.extra : t.param); };
  for_numbered_chunks(p, parallel,
                      [&](int64_t chunk, const OptimTensor& t, const Gradient& grad, int64_t begin, int64_t count) {
                        const auto scalars = scalars_of<F, T>(p, t);
                        double params_squared[kSumLanes] = {}, directions_squared[kSumLanes] = {};
                        T wide[kWideElems], u[kWideElems];
                        for (int64_t at = begin; at < begin + count; at += kWideElems) {
                          const int64_t elems = std::min(kWideElems, begin + count - at);
                          const T* g = wide;
                          if constexpr (std::is_same_v<T, float>)
                            if (grad.dtype != Dtype::float32) widen(grad, at, wide, elems);
                          if (sizeof(T) == static_cast<size_t>(size_bytes(grad.dtype)))
                            g = static_cast<const T*>(grad.at) + at;
                          const T* value = value_of(t) + at;
                          moments(row, scalars, elems, g, value, static_cast<T*>(t.states[0]) + at,
                                  static_cast<T*>(t.states[1]) + at, u);
                          add_squares(value, elems, params_squared);
                          add_squares(u, elems, directions_squared);
                        }
                        params.partials[2 * chunk] = sum_of(params_squared);
                        params.partials[2 * chunk + 1] = sum_of(directions_squared);
                      });

  for (int64_t i = 0; i < p.chunk_count; ++i) {
    const ListChunk c = p.chunks[i];
    if (c.chunk != 0 || !takes_part(p, c.tensor)) continue;
    const OptimTensor& t = p.tensors[c.tensor];
    double sums[2] = {};
    for (int64_t chunk = i; chunk < i + t.chunks; ++chunk)
      for (int k = 0; k < 2; ++k) sums[k] += params.partials[2 * chunk + k];
    params.ratios[c.tensor] = trust_ratio(F::adapts(values_of(p.groups[t.group - p.first_group])), sums[0], sums[1]);
  }

  for_numbered_chunks(
      p, parallel, [&](int64_t chunk, const OptimTensor& t, const Gradient&, int64_t begin, int64_t count) {
        const auto scalars = scalars_of<F, T>(p, t);
        const T step = static_cast<T>(static_cast<double>(scalars.lr) * params.ratios[p.chunks[chunk].tensor]);
        T* value = value_of(t) + begin;
        apply(row, scalars, step, count, value, static_cast<const T*>(t.states[0]) + begin,
              static_cast<const T*>(t.states[1]) + begin);
        if constexpr (kMaster) narrow(value, static_cast<P*>(t.param) + begin, count);
      });
  for (int64_t i = 0; i < p.tensor_count; ++i)
    if (takes_part(p, i)) *p.tensors[i].step += 1;
}

template <class F> Status step_as(const LayerwiseParams& p, const Parallel& parallel) {
  switch (p.step.storage) {
    case Storage::float32: step_layerwise<F, float, float>(p, parallel); break;
    case Storage::float64: step_layerwise<F, double, double>(p, parallel); break;
    case Storage::bfloat16_master: step_layerwise<F, float, bfloat16>(p, parallel); break;
    case Storage::float16_master: step_layerwise<F, float, float16>(p, parallel); break;
    default: return Status::unsupported("a storage other than float32, float64 and masters");
  }
  return {};
}

}  // namespace
}  // namespace cpu::optim

Status layerwise_cpu(const LayerwiseParams& p, const Parallel& parallel) {
  if (p.step.found_inf && *p.step.found_inf != 0) return {};
  if (!is_layerwise(p.step.optimizer)) return Status::unsupported("an optimizer that is not layerwise");
  return cpu::optim::step_as<LAMB>(p, parallel);
}

}  // namespace warpsmith
