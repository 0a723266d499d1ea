// links: csrc/kernels/optim/optim.cu
// links: csrc/kernels/optim/optim_16bit.cu
// links: csrc/kernels/optim/optim_mixed.cu
// links: csrc/kernels/optim/optim_refined.cu
// links: csrc/kernels/optim/optim_8bit.cu
// The optimizers' kernels with 16-bit parameters and states, with and without masters.
#include <bit>
#include <cmath>
#include <memory>

#include "harness.h"
#include "kernels/optim/optim.h"
#include "kernels/optim/optim_config.h"
#include "optim_formulas.h"

namespace warpsmith::test {
namespace {

constexpr Optimizer kAll[] = {
#define WARPSMITH_ROW(optimizer, F) Optimizer::optimizer,
    WARPSMITH_OPTIMIZERS(WARPSMITH_ROW)
#undef WARPSMITH_ROW
};

OptimGroup group_of(double lr) {
  OptimGroup g{};
  g.lr = lr;
  g.values[0] = 0.9, g.values[1] = 0.5, g.values[2] = 1e-3, g.values[3] = 0.125;
  return g;
}

// One tensor whose parameter and gradient are P and whose states are S, as after six steps.
template <class P, class S, bool kMaster> struct Stored {
  static constexpr float kSteps = 6;
  Optimizer optimizer;
  uint32_t has;
  Buffer<P> param, grad;
  Buffer<float> master, step{1};
  std::vector<Buffer<S>> states;

  Stored(Optimizer of, uint32_t mask, size_t elems, const Offsets& offset)
      : optimizer(of),
        has(mask),
        param(elems, offset[0]),
        grad(elems, offset[1]),
        master(kMaster ? elems : 0, offset[2]) {
    for (int s = 0; s < kOptimMaxStates; ++s) states.emplace_back((has >> s) & 1 ? elems : 0, offset[3 + s]);
    reset();
  }

  void reset() {
    fill_normal(param, 1);
    fill_normal(grad, 2);
    fill_normal(master, 3);
    for (int s = 0; s < kOptimMaxStates; ++s) fill_normal(states[s], 4 + s, 0.05f, 0.5f);  // positive
    step[0] = kSteps;
  }

  // All in float64 from what is stored; then one step of the kernel under every seed.
  void check(const OptimGroup& group) {
    const size_t count = param.size();
    std::vector<double> want_param, want_states[kOptimMaxStates];
    for (size_t i = 0; i < count; ++i) {
      OptimElement e{kMaster ? double{master[i]} : double{to_float(param[i])}, {}, has};
      for (int s = 0; s < kOptimMaxStates; ++s)
        if (e.holds(s)) e.x[s] = to_float(states[s][i]);
      formula_of(optimizer, group, to_float(grad[i]), kSteps + 1, e);
      want_param.push_back(e.p);
      for (int s = 0; s < kOptimMaxStates; ++s)
        if (e.holds(s)) want_states[s].push_back(e.x[s]);
    }
    std::vector<OptimTensor> records(1);
    records[0].param = param.data();
    records[0].extra = kMaster ? master.data() : nullptr;
    for (int s = 0; s < kOptimMaxStates; ++s) records[0].states[s] = (has >> s) & 1 ? states[s].data() : nullptr;
    records[0].step = step.data();
    records[0].numel = static_cast<int64_t>(count);
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
    p.storage = storage();
    p.most = has;
    p.groups[0] = group;
    under_every_seed([&] {
      reset();
      expect_ok(optim_cuda(p, nullptr));
      // One rounding to nearest of what float32 arithmetic gives.
      const Tolerance rounded{.ulps = sizeof(P) == 2 ? 0.51 : 2, .absolute = 2e-6};
      if (kMaster) expect_close("master", master, want_param, {.ulps = 2, .absolute = 2e-6});
      expect_close("param", param, want_param, rounded);
      for (int s = 0; s < kOptimMaxStates; ++s)
        expect_close("state " + std::to_string(s), states[s], want_states[s],
                     {.ulps = sizeof(S) == 2 ? 0.51 : 2, .absolute = 2e-6});
      expect_equal("step", step[0], kSteps + 1);
      same_bits_for_every_seed("param", param);
      const auto n = static_cast<int64_t>(count);
      const int64_t kept = std::popcount(has) * static_cast<int64_t>(sizeof(S)), value = kMaster ? 4 : sizeof(P);
      expect_bytes({.read = n * (kept + value + static_cast<int64_t>(sizeof(P))),
                    .written = n * (kept + static_cast<int64_t>(sizeof(P)) + (kMaster ? 4 : 0))});
    });
  }

  static constexpr Storage storage() {
    constexpr bool kBrain = std::is_same_v<P, bfloat16>;
    if (kMaster) return kBrain ? Storage::bfloat16_master : Storage::float16_master;
    if (sizeof(P) == 4) return Storage::bfloat16_states;
    return kBrain ? Storage::bfloat16 : Storage::float16;
  }
};

template <class P, class S, bool kMaster> void check_all(size_t elems, const Offsets& offset) {
  const SeedsAtMost few(2);
  for (const Optimizer optimizer : kAll)
    for (const uint32_t has : variants_of(optimizer))
      Stored<P, S, kMaster>(optimizer, has, elems, offset).check(group_of(0x1p-5));
}

TEST(bfloat16) { check_all<bfloat16, bfloat16, false>(2061, 0); }
TEST(float16) { check_all<float16, float16, false>(2061, 0); }
TEST(bfloat16_with_masters) { check_all<bfloat16, float, true>(1029, 0); }
TEST(float16_with_masters) { check_all<float16, float, true>(1029, 0); }
TEST(bfloat16_states) { check_all<float, bfloat16, false>(1029, 0); }

TEST(every_argument_misaligned_alone) {
  for (int argument = 0; argument < 6; ++argument) {
    Stored<bfloat16, bfloat16, false>(Optimizer::adamw, 0b111, 300, Offsets::only(argument)).check(group_of(0x1p-5));
    Stored<bfloat16, float, true>(Optimizer::adamw, 0b111, 300, Offsets::only(argument)).check(group_of(0x1p-5));
    Stored<float, bfloat16, false>(Optimizer::adamw, 0b111, 300, Offsets::only(argument)).check(group_of(0x1p-5));
  }
}

RANDOM_TEST(random_storages) {
  const Optimizer optimizer = kAll[random.integer(0, std::size(kAll) - 1)];
  const std::vector<uint32_t> variants = variants_of(optimizer);
  const uint32_t has = variants[static_cast<size_t>(random.integer(0, static_cast<int64_t>(variants.size()) - 1))];
  const auto elems = static_cast<size_t>(random.size(1, 5000));
  const Offsets offset = Offsets::draw(random, 6);
  OptimGroup group = group_of(random.choice({0x1p-5, 0x1p-8}));
  group.values[0] = random.choice({0.9, 0.5});
  switch (random.integer(0, 4)) {
    case 0: return Stored<bfloat16, bfloat16, false>(optimizer, has, elems, offset).check(group);
    case 1: return Stored<float16, float16, false>(optimizer, has, elems, offset).check(group);
    case 2: return Stored<bfloat16, float, true>(optimizer, has, elems, offset).check(group);
    case 3: return Stored<float16, float, true>(optimizer, has, elems, offset).check(group);
    default: return Stored<float, bfloat16, false>(optimizer, has, elems, offset).check(group);
  }
}

}  // namespace
}  // namespace warpsmith::test
