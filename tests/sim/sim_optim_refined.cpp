// links: csrc/kernels/optim/optim.cu
// links: csrc/kernels/optim/optim_16bit.cu
// links: csrc/kernels/optim/optim_mixed.cu
// links: csrc/kernels/optim/optim_refined.cu
// links: csrc/kernels/optim/optim_8bit.cu
// The optimizers' kernels with bfloat16 parameters that keep more than rounding to nearest does: at random,
// compensated, and with the remainder that makes them float32.
#include <bit>
#include <cmath>

#include "harness.h"
#include "kernels/optim/optim.h"
#include "kernels/optim/optim_config.h"
#include "optim_formulas.h"
#include "optim_rounding.h"

namespace warpsmith::test {
namespace {

constexpr Optimizer kAll[] = {
#define WARPSMITH_ROW(optimizer, F) Optimizer::optimizer,
    WARPSMITH_OPTIMIZERS(WARPSMITH_ROW)
#undef WARPSMITH_ROW
};

constexpr uint64_t kSeed = 0x123456789abcdull;

OptimGroup group_of(double lr) {
  OptimGroup g{};
  g.lr = lr;
  g.values[0] = 0.9, g.values[1] = 0.5, g.values[2] = 1e-3, g.values[3] = 0.125;
  return g;
}

// One tensor as after six steps, its states in S.
template <class S, Storage kStorage> struct Refined {
  static constexpr float kSteps = 6;
  static constexpr Refinement kRefinement = refinement_of(kStorage);
  Optimizer optimizer;
  uint32_t has;
  uint64_t first_elem;
  Buffer<bfloat16> param, grad, dropped;
  Buffer<float> step{1};
  std::vector<Buffer<S>> states;

  Refined(Optimizer of, uint32_t mask, size_t elems, const Offsets& offset, uint64_t first = 0)
      : optimizer(of),
        has(mask),
        first_elem(first),
        param(elems, offset[0]),
        grad(elems, offset[1]),
        dropped(keeps_dropped(kRefinement) ? elems : 0, offset[2]) {
    for (int s = 0; s < kOptimMaxStates; ++s) states.emplace_back((has >> s) & 1 ? elems : 0, offset[3 + s]);
    reset();
  }

  void reset() {
    fill_normal(param, 1);
    fill_normal(grad, 2);
    for (size_t i = 0; i < dropped.size(); ++i)
      if (kRefinement == Refinement::compensated)
        dropped[i] = from_float<bfloat16>(to_float(param[i]) * 0x1p-10f * static_cast<float>(i % 4));
      else
        dropped[i] = {static_cast<uint16_t>(i * 2654435761u >> 8)};
    for (int s = 0; s < kOptimMaxStates; ++s) fill_normal(states[s], 4 + s, 0.05f, 0.5f);  // positive
    step[0] = kSteps;
  }

  double value(size_t i) const {
    const uint32_t high = uint32_t{param[i].bits} << 16;
    if (kRefinement == Refinement::remainder)
      return std::bit_cast<float>(high + static_cast<uint32_t>(int{static_cast<int16_t>(dropped[i].bits)}));
    return double{to_float(param[i])} + (dropped.size() ? double{to_float(dropped[i])} : 0.0);
  }

  // Runs the kernel on a table of this tensor.
  Status run(const OptimGroup& group) {
    std::vector<OptimTensor> records(1);
    records[0].param = param.data();
    if (keeps_dropped(kRefinement))
      records[0].extra = dropped.data();
    else
      records[0].first_elem = first_elem;
    for (int s = 0; s < kOptimMaxStates; ++s) records[0].states[s] = (has >> s) & 1 ? states[s].data() : nullptr;
    records[0].step = step.data();
    records[0].numel = static_cast<int64_t>(param.size());
    records[0].has = has;
    std::vector<int64_t> words = tensor_list_words(records, kOptimTileElems);
    constexpr int64_t kRecordWords = sizeof(OptimTensor) / sizeof(int64_t);
    const void* address = grad.data();
    OptimParams p{};
    p.tensors = reinterpret_cast<OptimTensor*>(words.data());
    p.chunks = reinterpret_cast<const ListChunk*>(words.data() + kRecordWords);
    p.grads = &address;
    p.tensor_count = p.group_count = 1;
    p.chunk_count = static_cast<int64_t>(words.size()) - kRecordWords;
    p.optimizer = optimizer;
    p.storage = kStorage;
    p.most = has;
    p.groups[0] = group;
    p.seeds[0] = kSeed;
    return optim_cuda(p, nullptr);
  }

  void check(const OptimGroup& group) {
    const size_t count = param.size();
    reset();
    std::vector<double> want_param, want_states[kOptimMaxStates];
    for (size_t i = 0; i < count; ++i) {
      OptimElement e{value(i), {}, has};
      for (int s = 0; s < kOptimMaxStates; ++s)
        if (e.holds(s)) e.x[s] = to_float(states[s][i]);
      formula_of(optimizer, group, to_float(grad[i]), kSteps + 1, e);
      want_param.push_back(e.p);
      for (int s = 0; s < kOptimMaxStates; ++s)
        if (e.holds(s)) want_states[s].push_back(e.x[s]);
    }
    under_every_seed([&] {
      reset();
      expect_ok(run(group));
      expect_equal("step", step[0], kSteps + 1);
      for (size_t i = 0; i < count; ++i) {
        if constexpr (kRefinement == Refinement::stochastic) {
          expect_drawn("param", param[i], want_param[i], kSeed, 7, first_elem + i, 0);
          for (int s = 0; s < kOptimMaxStates; ++s)
            if ((has >> s) & 1) expect_drawn("state", states[s][i], want_states[s][i], kSeed, 7, first_elem + i, 1 + s);
          continue;
        }
        const double error = std::abs(value(i) - want_param[i]), size = std::abs(want_param[i]);
        expect(error <= (kRefinement == Refinement::remainder ? 0x1p-22 : 0x1p-16) * size + 2e-6, "value");
        expect(std::abs(value(i) - to_float(param[i])) <= std::ldexp(0.5001, std::ilogb(value(i)) - 7), "rounded");
      }
      if (kRefinement != Refinement::stochastic)
        for (int s = 0; s < kOptimMaxStates; ++s)
          expect_close("state " + std::to_string(s), states[s], want_states[s],
                       {.ulps = sizeof(S) == 2 ? 0.51 : 2, .absolute = 2e-6});
      same_bits_for_every_seed("param", param);
      same_bits_for_every_seed("dropped", dropped);
      const auto n = static_cast<int64_t>(count);
      const int64_t kept = std::popcount(has) * static_cast<int64_t>(sizeof(S)) + (keeps_dropped(kRefinement) ? 4 : 2);
      expect_bytes({.read = n * (kept + 2), .written = n * kept});
    });
  }
};

using Stochastic = Refined<bfloat16, Storage::bfloat16_stochastic>;
using Compensated = Refined<bfloat16, Storage::bfloat16_compensated>;
using Remainder = Refined<float, Storage::bfloat16_remainder>;

template <class Tensor> void check_all(size_t elems) {
  const SeedsAtMost few(2);
  for (const Optimizer optimizer : kAll)
    for (const uint32_t has : variants_of(optimizer)) Tensor(optimizer, has, elems, 0).check(group_of(0x1p-5));
}

TEST(rounded_at_random) { check_all<Stochastic>(1029); }
TEST(compensated) { check_all<Compensated>(2061); }
TEST(with_the_remainder) { check_all<Remainder>(1029); }

TEST(every_argument_misaligned_alone) {
  const SeedsAtMost few(2);
  for (int argument = 0; argument < 6; ++argument) {
    Stochastic(Optimizer::adamw, 0b111, 300, Offsets::only(argument)).check(group_of(0x1p-5));
    Compensated(Optimizer::adamw, 0b111, 300, Offsets::only(argument)).check(group_of(0x1p-5));
    Remainder(Optimizer::adamw, 0b111, 300, Offsets::only(argument)).check(group_of(0x1p-5));
  }
}

// Elements keep their numbers wherever the tensor is cut, also beyond 2^32.
TEST(random_rounding_does_not_depend_on_the_cut) {
  const uint64_t first = (uint64_t{1} << 32) - 700;
  Stochastic whole(Optimizer::adamw, 0b011, 1500, 0, first);
  expect_ok(whole.run(group_of(0x1p-5)));
  for (const auto& [begin, count] : {std::pair<size_t, size_t>{0, 701}, {701, 799}}) {
    Stochastic part(Optimizer::adamw, 0b011, count, 0, first + begin), source(Optimizer::adamw, 0b011, 1500, 0);
    for (size_t i = 0; i < count; ++i) {
      part.param[i] = source.param[begin + i];
      part.grad[i] = source.grad[begin + i];
      for (int s = 0; s < 2; ++s) part.states[s][i] = source.states[s][begin + i];
    }
    expect_ok(part.run(group_of(0x1p-5)));
    for (size_t i = 0; i < count; ++i) expect_equal("bits", part.param[i].bits, whole.param[begin + i].bits);
  }
}

// Infinities stay what they are, a NaN stays one.
TEST(not_a_number_and_infinity) {
  const auto after = [](auto tensor, float value) {
    tensor.param[0] = from_float<bfloat16>(value);
    if (tensor.dropped.size()) tensor.dropped[0] = {0};
    OptimGroup plain{};  // without decay, which would make an infinite gradient
    plain.lr = 0x1p-5;
    for (int step = 0; step < 2; ++step) expect_ok(tensor.run(plain));
    return to_float(tensor.param[0]);
  };
  for (const float infinity : {HUGE_VALF, -HUGE_VALF}) {
    expect_equal("stochastic", after(Stochastic(Optimizer::sgd, 0, 1, 0), infinity), infinity);
    expect_equal("compensated", after(Compensated(Optimizer::sgd, 0, 1, 0), infinity), infinity);
    expect_equal("remainder", after(Remainder(Optimizer::sgd, 0, 1, 0), infinity), infinity);
  }
  expect(std::isnan(after(Stochastic(Optimizer::sgd, 0, 1, 0), NAN)), "stochastic NaN");
  expect(std::isnan(after(Compensated(Optimizer::sgd, 0, 1, 0), NAN)), "compensated NaN");
  expect(std::isnan(after(Remainder(Optimizer::sgd, 0, 1, 0), NAN)), "remainder NaN");
}

// A float32 comes back from its halves bit by bit, and the upper one is the nearest bfloat16.
TEST(halves_of_a_float) {
  for (uint32_t high = 0; high < 0x10000; high += 37)
    for (const uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const uint32_t bits = high << 16 | low;
      const float x = std::bit_cast<float>(bits);
      const SplitFloat split = split_float(x);
      const float back = join_float(split.rounded, split.remainder);
      if (std::isnan(x))
        expect(std::isnan(back) && std::isnan(to_float(split.rounded)), "NaN");
      else
        expect_equal("bits", std::bit_cast<uint32_t>(back), bits);
      if (low != 0x8000 && !std::isnan(x)) expect_equal("nearest", split.rounded.bits, from_float<bfloat16>(x).bits);
    }
}

RANDOM_TEST(random_refinements) {
  const Optimizer optimizer = kAll[random.integer(0, std::size(kAll) - 1)];
  const std::vector<uint32_t> variants = variants_of(optimizer);
  const uint32_t has = variants[static_cast<size_t>(random.integer(0, static_cast<int64_t>(variants.size()) - 1))];
  const auto elems = static_cast<size_t>(random.size(1, 5000));
  const Offsets offset = Offsets::draw(random, 6);
  OptimGroup group = group_of(random.choice({0x1p-5, 0x1p-8}));
  group.values[0] = random.choice({0.9, 0.5});
  switch (random.integer(0, 2)) {
    case 0:
      return Stochastic(optimizer, has, elems, offset, static_cast<uint64_t>(random.integer(0, 1000))).check(group);
    case 1: return Compensated(optimizer, has, elems, offset).check(group);
    default: return Remainder(optimizer, has, elems, offset).check(group);
  }
}

}  // namespace
}  // namespace warpsmith::test
