#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "harness.h"
#include "kernels/optim/gradient.h"
#include "kernels/optim/optim.h"
#include "kernels/optim/optim_config.h"
#include "optim_formulas.h"
#include "optim_rounding.h"

// Tensors of any storage with gradients in another dtype.
namespace warpsmith::test {

constexpr uint64_t kSeed = 0x123456789abcdull;

inline OptimGroup group_of(double lr) {
  OptimGroup g{};
  g.lr = lr;
  g.values[0] = 0.9, g.values[1] = 0.5, g.values[2] = 1e-3, g.values[3] = 0.125;
  return g;
}

template <class T> constexpr Dtype kDtype = std::is_same_v<T, float>     ? Dtype::float32
                                            : std::is_same_v<T, float16> ? Dtype::float16
                                                                         : Dtype::bfloat16;

template <class G> const void* entry_of(const Buffer<G>& grad) {
  return reinterpret_cast<const void*>(reinterpret_cast<int64_t>(grad.data()) | gradient_mark(kDtype<G>));
}

// What a launch over one tensor takes.
struct Launch {
  std::vector<int64_t> words;
  const void* entry;
  OptimParams p{};

  Launch(const OptimTensor& record, const void* gradient, Optimizer optimizer, Storage storage, const OptimGroup& group)
      : entry(gradient) {
    std::vector<OptimTensor> records{record};
    words = tensor_list_words(records, kOptimTileElems);
    constexpr int64_t kRecordWords = sizeof(OptimTensor) / sizeof(int64_t);
    p.tensors = reinterpret_cast<OptimTensor*>(words.data());
    p.chunks = reinterpret_cast<const ListChunk*>(words.data() + kRecordWords);
    p.grads = &entry;
    p.tensor_count = p.group_count = 1;
    p.chunk_count = static_cast<int64_t>(words.size()) - kRecordWords;
    p.optimizer = optimizer;
    p.storage = storage;
    p.mixed_grads = true;
    p.most = record.has;
    p.groups[0] = group;
    p.seeds[0] = kSeed;
  }
};

// One tensor as after six steps: parameters in P, states in S, gradients in G.
template <class P, class S, class G, Storage kStorage> struct Mixed {
  static constexpr float kSteps = 6;
  static constexpr bool kMaster = has_master(kStorage);
  static constexpr Refinement kRefinement = refinement_of(kStorage);
  Optimizer optimizer;
  uint32_t has;
  uint64_t first_elem;
  Buffer<P> param;
  Buffer<G> grad;
  Buffer<float> master, step{1}, found_inf{1}, scale{1};
  Buffer<bfloat16> dropped;
  std::vector<Buffer<S>> states;

  Mixed(Optimizer of, uint32_t mask, size_t elems, const Offsets& offset, uint64_t first = 0)
      : optimizer(of),
        has(mask),
        first_elem(first),
        param(elems, offset[0]),
        grad(elems, offset[1]),
        master(kMaster ? elems : 0, offset[2]),
        dropped(keeps_dropped(kRefinement) ? elems : 0, offset[2]) {
    for (int s = 0; s < kOptimMaxStates; ++s) states.emplace_back((has >> s) & 1 ? elems : 0, offset[3 + s]);
    reset();
  }

  void reset() {
    fill_normal(param, 1);
    fill_normal(grad, 2);
    fill_normal(master, 3);
    for (size_t i = 0; i < dropped.size(); ++i)
      if (kRefinement == Refinement::compensated)
        dropped[i] = from_float<bfloat16>(to_float(param[i]) * 0x1p-10f * static_cast<float>(i % 4));
      else
        dropped[i] = {static_cast<uint16_t>(i * 2654435761u >> 8)};
    for (int s = 0; s < kOptimMaxStates; ++s) fill_normal(states[s], 4 + s, 0.05f, 0.5f);  // positive
    step[0] = kSteps;
    found_inf[0] = 0;
    scale[0] = 4;
  }

  double value(size_t i) const {
    if constexpr (kMaster) return master[i];
    if constexpr (kRefinement == Refinement::remainder) {
      const uint32_t high = uint32_t{param[i].bits} << 16;
      return std::bit_cast<float>(high + static_cast<uint32_t>(int{static_cast<int16_t>(dropped[i].bits)}));
    }
    return double{to_float(param[i])} + (dropped.size() ? double{to_float(dropped[i])} : 0.0);
  }

  OptimTensor record() {
    OptimTensor r{};
    r.param = param.data();
    if (kMaster)
      r.extra = master.data();
    else if (keeps_dropped(kRefinement))
      r.extra = dropped.data();
    else if (kRefinement == Refinement::stochastic)
      r.first_elem = first_elem;
    for (int s = 0; s < kOptimMaxStates; ++s) r.states[s] = (has >> s) & 1 ? states[s].data() : nullptr;
    r.step = step.data();
    r.numel = static_cast<int64_t>(param.size());
    r.has = has;
    return r;
  }

  void check(const OptimGroup& group) {
    const size_t count = param.size();
    reset();
    std::vector<double> want_value, want_states[kOptimMaxStates];
    for (size_t i = 0; i < count; ++i) {
      OptimElement e{value(i), {}, has};
      for (int s = 0; s < kOptimMaxStates; ++s)
        if (e.holds(s)) e.x[s] = to_float(states[s][i]);
      formula_of(optimizer, group, double{to_float(grad[i])} / 4, kSteps + 1, e);
      want_value.push_back(e.p);
      for (int s = 0; s < kOptimMaxStates; ++s)
        if (e.holds(s)) want_states[s].push_back(e.x[s]);
    }
    under_every_seed([&] {
      reset();
      Launch launch(record(), entry_of(grad), optimizer, kStorage, group);
      launch.p.grad_scale = scale.data();
      expect_ok(optim_runtime_dtypes_cuda(launch.p, nullptr));
      expect_equal("step", step[0], kSteps + 1);
      check_values(want_value, want_states);
      same_bits_for_every_seed("param", param);
      same_bits_for_every_seed("dropped", dropped);
      // Masters stand for the parameters, which are only written.
      const auto n = static_cast<int64_t>(count);
      const int64_t kept = std::popcount(has) * static_cast<int64_t>(sizeof(S)) + (keeps_dropped(kRefinement) ? 2 : 0);
      const auto own = static_cast<int64_t>(sizeof(P));
      expect_bytes({.read = n * (kept + (kMaster ? 4 : own) + static_cast<int64_t>(sizeof(G))),
                    .written = n * (kept + own + (kMaster ? 4 : 0))});
    });
  }

  void check_values(const std::vector<double>& want_value, const std::vector<double> (&want_states)[kOptimMaxStates]) {
    for (size_t i = 0; i < param.size(); ++i) {
      const double size = std::abs(want_value[i]), error = std::abs(value(i) - want_value[i]);
      if constexpr (kRefinement == Refinement::stochastic) {
        expect_drawn("param", param[i], want_value[i], kSeed, 7, first_elem + i, 0);
        for (int s = 0; s < kOptimMaxStates; ++s)
          if ((has >> s) & 1) expect_drawn("state", states[s][i], want_states[s][i], kSeed, 7, first_elem + i, 1 + s);
      } else if constexpr (keeps_dropped(kRefinement)) {
        expect(error <= (kRefinement == Refinement::remainder ? 0x1p-22 : 0x1p-16) * size + 2e-6, "value");
      }
      if (kMaster || keeps_dropped(kRefinement))
        expect(std::abs(value(i) - to_float(param[i])) <=
                   std::ldexp(0.5001, std::ilogb(value(i)) - kMantissaBits<P>) + 0x1p-25,
               "rounded");
    }
    if (kRefinement == Refinement::stochastic) return;
    const Tolerance two_ulps{.ulps = 2, .absolute = 2e-6}, rounded{.ulps = 0.51, .absolute = 2e-6};
    if (kMaster)
      expect_close("master", master, want_value, two_ulps);
    else if (kRefinement == Refinement::none)
      expect_close("param", param, want_value, sizeof(P) == 2 ? rounded : two_ulps);
    for (int s = 0; s < kOptimMaxStates; ++s)
      expect_close("state " + std::to_string(s), states[s], want_states[s], sizeof(S) == 2 ? rounded : two_ulps);
  }
};

}  // namespace warpsmith::test
