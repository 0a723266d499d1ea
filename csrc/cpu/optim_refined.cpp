#include <algorithm>

#include "common/vectorize.h"
#include "cpu/optim_loops.h"

// bfloat16 parameters with a refinement (Refinement in kernels/optim/optim.h).
namespace warpsmith::cpu::optim {
namespace {

// What rounding a chunk at random needs. `words`: random bits of kWideElems elements, [0] for the parameter, [1 + i]
// for state i.
struct Rounding {
  uint64_t seed;
  uint32_t step;
  uint32_t words[1 + kOptimMaxStates][kWideElems];
};

WARPSMITH_VECTORIZE void draw_words(Rounding* __restrict__ rounding, uint64_t first_elem, int64_t count) {
  const uint64_t seed = rounding->seed;
  const uint32_t step = rounding->step;
  WARPSMITH_IVDEP
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t element = first_elem + static_cast<uint64_t>(i);
    PhiloxCounter words[1];
    rounding_words(words, seed, step, element / 2);
    for (int w = 0; w <= kOptimMaxStates; ++w) rounding->words[w][i] = rounding_bits(words[0], element % 2 != 0, w);
  }
}

WARPSMITH_VECTORIZE void narrow_at_random(const float* __restrict__ from, bfloat16* __restrict__ to,
                                          const uint32_t* __restrict__ random, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = round_stochastic(from[i], random[i]);
}

// A parameter's value is the sum of the parameter and its compensation.
WARPSMITH_VECTORIZE void widen_sums(const bfloat16* __restrict__ param, const bfloat16* __restrict__ dropped,
                                    float* __restrict__ to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = to_float(param[i]) + to_float(dropped[i]);
}
WARPSMITH_VECTORIZE void narrow_sums(const float* __restrict__ from, bfloat16* __restrict__ param,
                                     bfloat16* __restrict__ dropped, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const bfloat16 rounded = from_float<bfloat16>(from[i]);
    param[i] = rounded;
    dropped[i] = from_float<bfloat16>(compensation_of(from[i], to_float(rounded)));
  }
}

// A parameter's value is the float32 that parameter and remainder form together.
WARPSMITH_VECTORIZE void widen_halves(const bfloat16* __restrict__ param, const bfloat16* __restrict__ remainder,
                                      float* __restrict__ to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = join_float(param[i], remainder[i]);
}
WARPSMITH_VECTORIZE void narrow_halves(const float* __restrict__ from, bfloat16* __restrict__ param,
                                       bfloat16* __restrict__ remainder, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const SplitFloat split = split_float(from[i]);
    param[i] = split.rounded;
    remainder[i] = split.remainder;
  }
}

template <class F, class S, Refinement kRefinement>
void update_chunk(const typename F::template Scalars<float>& scalars, Rounding* rounding, const OptimTensor& t,
                  const Gradient& grad, int64_t begin, int64_t count) {
  float g[kWideElems] = {}, p[kWideElems] = {}, x[kOptimMaxStates][kWideElems] = {};
  const auto each_state = [&](int64_t at, auto&& visit) {
    for (int s = 0; s < kOptimMaxStates; ++s)
      if ((t.has >> s) & 1) visit(s, static_cast<S*>(t.states[s]) + at);
  };
  for (int64_t at = begin; at < begin + count; at += kWideElems) {
    const int64_t elems = std::min(kWideElems, begin + count - at);
    bfloat16* param = static_cast<bfloat16*>(t.param) + at;
    bfloat16* dropped = keeps_dropped(kRefinement) ? static_cast<bfloat16*>(t.extra) + at : nullptr;
    widen(grad, at, g, elems);
    if constexpr (kRefinement == Refinement::compensated)
      widen_sums(param, dropped, p, elems);
    else if constexpr (kRefinement == Refinement::remainder)
      widen_halves(param, dropped, p, elems);
    else
      widen(param, p, elems);
    each_state(at, [&](int s, const S* from) { widen(from, x[s], elems); });
    update(static_cast<F*>(nullptr), scalars, Piece<float>{whole_blocks(elems), g, p, {x[0], x[1], x[2]}, t.has});
    if constexpr (kRefinement == Refinement::stochastic) {
      draw_words(rounding, t.first_elem + static_cast<uint64_t>(at), elems);
      narrow_at_random(p, param, rounding->words[0], elems);
      each_state(at, [&](int s, S* to) { narrow_at_random(x[s], to, rounding->words[1 + s], elems); });
    } else {
      if constexpr (kRefinement == Refinement::compensated)
        narrow_sums(p, param, dropped, elems);
      else
        narrow_halves(p, param, dropped, elems);
      each_state(at, [&](int s, S* to) { narrow(x[s], to, elems); });
    }
  }
}

template <class F, class S, Refinement kRefinement> void step_as(const OptimParams& p, const Parallel& parallel) {
  for_chunks(p, parallel, [&](const OptimTensor& t, const Gradient& grad, int64_t first, int64_t count) {
    Rounding rounding;
    if constexpr (kRefinement == Refinement::stochastic) {
      rounding.seed = p.seeds[t.group - p.first_group];
      rounding.step = static_cast<uint32_t>(*t.step) + 1;
    }
    update_chunk<F, S, kRefinement>(scalars_of<F, float>(p, t), &rounding, t, grad, first, count);
  });
}

}  // namespace

void step_refined(const OptimParams& p, const Parallel& parallel) {
  visit_optimizer(p.optimizer, [&]<class F>() {
    switch (refinement_of(p.storage)) {
      case Refinement::stochastic: step_as<F, bfloat16, Refinement::stochastic>(p, parallel); break;
      case Refinement::compensated: step_as<F, bfloat16, Refinement::compensated>(p, parallel); break;
      default: step_as<F, float, Refinement::remainder>(p, parallel);
    }
  });
}

}  // namespace warpsmith::cpu::optim
