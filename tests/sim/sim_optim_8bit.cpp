// links: csrc/kernels/optim/optim.cu
// links: csrc/kernels/optim/optim_16bit.cu
// links: csrc/kernels/optim/optim_mixed.cu
// links: csrc/kernels/optim/optim_refined.cu
// links: csrc/kernels/optim/optim_8bit.cu
// The optimizers' kernels with 8-bit states, beside tensors of the same launch with float32 states.
#include <algorithm>
#include <cmath>
#include <memory>

#include "harness.h"
#include "kernels/optim/code_map.h"
#include "kernels/optim/optim.h"
#include "kernels/optim/optim_config.h"
#include "optim_formulas.h"

namespace warpsmith::test {
namespace {

struct Kind {
  Optimizer optimizer;
  uint32_t has;
  uint32_t not_negative;
};
constexpr Kind kKinds[] = {{Optimizer::adamw, 0b011, 0b110},
                           {Optimizer::adam, 0b011, 0b110},
                           {Optimizer::lion, 0b1, 0},
                           {Optimizer::sgd, 0b1, 0}};

OptimGroup group_of(double lr) {
  OptimGroup g{};
  g.lr = lr;
  g.values[0] = 0.9, g.values[1] = 0.5, g.values[2] = 1e-3, g.values[3] = 0.125;
  return g;
}

// The nearest value to x among those of all codes, by a search through all.
double distance_to_nearest(double x, bool is_signed) {
  double best = HUGE_VAL;
  for (int code = 0; code < kCodes; ++code) best = std::min(best, std::abs(double{dynamic_value(code, is_signed)} - x));
  return best;
}

// One tensor as after six steps.
template <class P> struct Tensor {
  static constexpr float kSteps = 6;
  Kind kind;
  bool quantized;
  Buffer<P> param, grad;
  std::vector<Buffer<uint8_t>> codes;
  std::vector<Buffer<float>> states;
  Buffer<float> scales, step{1};
  std::vector<double> want_param, want_states[kOptimMaxStates];

  Tensor(const Kind& of, size_t elems, bool with_codes, const Offsets& offset = {})
      : kind(of),
        quantized(with_codes),
        param(elems, offset[0]),
        grad(elems, offset[1]),
        scales(with_codes ? count_of_states() * blocks(elems) : 0) {
    for (int s = 0; s < kOptimMaxStates; ++s) {
      codes.emplace_back(holds(s) && quantized ? elems : 0, offset[2 + s]);
      states.emplace_back(holds(s) && !quantized ? elems : 0, offset[2 + s]);
    }
    reset();
  }

  static size_t blocks(size_t elems) { return static_cast<size_t>(quant_blocks(static_cast<int64_t>(elems))); }
  size_t count_of_states() const { return kind.has == 0b011 ? 2 : 1; }
  bool holds(int s) const { return (kind.has >> s) & 1; }
  bool is_signed(int s) const { return !((kind.not_negative >> s) & 1); }
  float scale(int s, size_t i) const { return scales[static_cast<size_t>(s) * blocks(param.size()) + i / kQuantBlock]; }
  double state(int s, size_t i) const {
    return quantized ? double{dynamic_value(codes[s][i], is_signed(s)) * scale(s, i)} : double{states[s][i]};
  }

  void reset() {
    fill_normal(param, 1);
    fill_normal(grad, 2);
    for (size_t i = 0; i < scales.size(); ++i) scales[i] = 0.25f + 0.125f * static_cast<float>(i % 3);
    for (int s = 0; s < kOptimMaxStates; ++s) {
      for (size_t i = 0; i < codes[s].size(); ++i) codes[s][i] = static_cast<uint8_t>(i * 2654435761u >> 13);
      fill_normal(states[s], 4 + s, 0.05f, 0.5f);
    }
    step[0] = kSteps;
  }

  OptimTensor record() {
    OptimTensor r{};
    r.param = param.data();
    r.extra = quantized ? scales.data() : nullptr;
    for (int s = 0; s < kOptimMaxStates; ++s)
      if (holds(s)) r.states[s] = quantized ? static_cast<void*>(codes[s].data()) : states[s].data();
    r.step = step.data();
    r.numel = static_cast<int64_t>(param.size());
    r.has = kind.has;
    return r;
  }

  void expect_from(const OptimGroup& group) {
    want_param.clear();
    for (auto& w : want_states) w.clear();
    for (size_t i = 0; i < param.size(); ++i) {
      OptimElement e{to_float(param[i]), {}, kind.has};
      for (int s = 0; s < kOptimMaxStates; ++s)
        if (holds(s)) e.x[s] = state(s, i);
      formula_of(kind.optimizer, group, to_float(grad[i]), kSteps + 1, e);
      want_param.push_back(e.p);
      for (int s = 0; s < kOptimMaxStates; ++s)
        if (holds(s)) want_states[s].push_back(e.x[s]);
    }
  }

  void check(const std::string& name) {
    const size_t count = param.size();
    expect_equal("step", step[0], kSteps + 1);
    // An early second moment may be tiny; its root magnifies what rounding does to it.
    expect_close(name + " param", param, want_param, {.ulps = sizeof(P) == 2 ? 0.51 : 4, .absolute = 4e-6});
    same_bits_for_every_seed(name + " param", param);
    for (int s = 0; s < kOptimMaxStates; ++s) {
      if (!holds(s)) continue;
      if (!quantized) {
        expect_close("state", states[s], want_states[s], {.ulps = 2, .absolute = 2e-6});
        continue;
      }
      same_bits_for_every_seed(name + " codes " + std::to_string(s), codes[s]);
      for (size_t begin = 0; begin < count; begin += kQuantBlock) {
        const size_t end = std::min(count, begin + kQuantBlock);
        double largest = 0;
        for (size_t i = begin; i < end; ++i) largest = std::max(largest, std::abs(want_states[s][i]));
        const double is = scale(s, begin);
        expect(std::abs(is - largest) <= 1e-6 * largest, "scale " + std::to_string(is) + " " + std::to_string(largest));
        for (size_t i = begin; i < end; ++i) {
          const double x = want_states[s][i] / is;
          const double off = std::abs(double{dynamic_value(codes[s][i], is_signed(s))} - x);
          const bool kept_from_zero = !is_signed(s) && codes[s][i] == 1 && x > 0;
          expect(off <= distance_to_nearest(x, is_signed(s)) + 2e-6 || kept_from_zero, "code of " + std::to_string(x));
        }
      }
    }
  }
};

template <class P> constexpr Storage storage_of() {
  return sizeof(P) == 4                ? Storage::float32_8bit
         : std::is_same_v<P, bfloat16> ? Storage::bfloat16_8bit
                                       : Storage::float16_8bit;
}

template <class P> struct Problem {
  std::vector<std::unique_ptr<Tensor<P>>> tensors;

  void add(const Kind& kind, size_t elems, bool quantized, const Offsets& offset = {}) {
    tensors.push_back(std::make_unique<Tensor<P>>(kind, elems, quantized, offset));
  }

  void check(const OptimGroup& group) {
    std::vector<OptimTensor> records;
    std::vector<const void*> grads;
    for (const auto& t : tensors) {
      records.push_back(t->record());
      grads.push_back(t->grad.data());
      t->reset();
      t->expect_from(group);
    }
    std::vector<int64_t> words = tensor_list_words(records, kOptimTileElems);
    const size_t record_words = records.size() * sizeof(OptimTensor) / sizeof(int64_t);
    OptimParams p{};
    p.tensors = reinterpret_cast<OptimTensor*>(words.data());
    p.chunks = reinterpret_cast<const ListChunk*>(words.data() + record_words);
    p.grads = grads.data();
    p.tensor_count = static_cast<int64_t>(tensors.size());
    p.group_count = 1;
    p.chunk_count = static_cast<int64_t>(words.size() - record_words);
    p.optimizer = tensors[0]->kind.optimizer;
    p.storage = storage_of<P>();
    p.most = tensors[0]->kind.has;
    p.groups[0] = group;
    under_every_seed([&] {
      for (const auto& t : tensors) t->reset();
      sim::counters() = {};
      expect_ok(optim_cuda(p, nullptr));
      expect_equal<int64_t, int64_t>("launches", sim::counters().launches, 1);
      for (size_t i = 0; i < tensors.size(); ++i) tensors[i]->check("tensor " + std::to_string(i));
    });
  }
};

template <class P> void check_all() {
  const SeedsAtMost few(2);
  for (const Kind& kind : kKinds) {
    Problem<P> problem;
    for (const size_t elems : {0, 1, 255, 256, 257, 1024, 3001}) problem.add(kind, elems, true);
    for (const size_t elems : {0, 7, 1500}) problem.add(kind, elems, false);
    problem.check(group_of(0x1p-5));
  }
}

TEST(float32_parameters) { check_all<float>(); }
TEST(bfloat16_parameters) { check_all<bfloat16>(); }
TEST(float16_parameters) { check_all<float16>(); }

TEST(every_argument_misaligned_alone) {
  const SeedsAtMost few(2);
  Problem<float> problem;
  for (int argument = 0; argument < 4; ++argument) problem.add(kKinds[0], 700, true, Offsets::only(argument));
  problem.check(group_of(0x1p-5));
}

TEST(bytes_are_the_floor_and_the_maps) {
  constexpr int64_t kElems = 4096, kBlocks = kElems / kQuantBlock;
  Problem<bfloat16> problem;
  problem.add(kKinds[0], kElems, true);
  problem.check(group_of(0x1p-5));
  constexpr int64_t kMaps = kElems / kOptimTileElems * (sizeof(CodeMap<true>) + sizeof(CodeMap<false>));  // each block
  expect_bytes({.read = kElems * (2 + 2 + 2) + 2 * 4 * kBlocks + kMaps, .written = kElems * (2 + 2) + 2 * 4 * kBlocks});
}

// Ascending, and every value is its own code; a value halfway takes the lower one.
TEST(the_map) {
  for (const bool is_signed : {false, true}) {
    float borders[kCodes];
    for (int code = 0; code < kCodes; ++code) borders[code] = dynamic_border(code, is_signed);
    for (int code = 0; code < kCodes; ++code) {
      const float value = dynamic_value(code, is_signed);
      expect_equal("code", dynamic_code(borders, value, is_signed), code);
      if (code + 1 == kCodes) continue;
      expect(value < dynamic_value(code + 1, is_signed), "ascending");
      const bool kept_from_zero = !is_signed && code == 0;
      expect_equal("halfway", dynamic_code(borders, borders[code], is_signed), code + kept_from_zero);
      expect_equal("above", dynamic_code(borders, std::nextafter(borders[code], 2.0f), is_signed), code + 1);
    }
  }
  expect_equal("a tiny second moment", dynamic_value(1, false), 3.25e-7f);
}

// The block of 256 elements, and no other, becomes NaN.
TEST(not_a_number) {
  Tensor<float> t(kKinds[0], 512, true);
  t.grad[300] = NAN;
  std::vector<OptimTensor> records{t.record()};
  std::vector<int64_t> words = tensor_list_words(records, kOptimTileElems);
  const void* address = t.grad.data();
  OptimParams p{};
  p.tensors = reinterpret_cast<OptimTensor*>(words.data());
  p.chunks = reinterpret_cast<const ListChunk*>(words.data() + sizeof(OptimTensor) / sizeof(int64_t));
  p.grads = &address;
  p.tensor_count = p.group_count = p.chunk_count = 1;
  p.storage = Storage::float32_8bit;
  p.most = 0b011;
  p.groups[0] = group_of(0x1p-5);
  expect_ok(optim_cuda(p, nullptr));
  expect(std::isfinite(t.scale(0, 0)) && std::isfinite(t.param[299]), "the others");
  expect(std::isnan(t.scale(0, 300)) && std::isnan(t.scale(1, 300)) && std::isnan(t.param[300]), "NaN");
  p.optimizer = Optimizer::rmsprop;
  expect_refused(optim_cuda(p, nullptr), "8-bit states of this optimizer");
  p.optimizer = Optimizer::lion;
  expect_refused(optim_cuda(p, nullptr), "8-bit states other than");
}

RANDOM_TEST(random_8bit) {
  const Kind kind = kKinds[random.integer(0, std::size(kKinds) - 1)];
  OptimGroup group = group_of(random.choice({0x1p-5, 0x1p-8}));
  group.values[0] = random.choice({0.9, 0.5});
  Problem<bfloat16> narrow;
  Problem<float> wide;
  const bool is_wide = random.coin();
  const int64_t count = random.integer(1, 4);
  for (int64_t i = 0; i < count; ++i) {
    const auto elems = static_cast<size_t>(random.size(0, 5000));
    const bool quantized = random.integer(0, 3) > 0;
    const Offsets offset = Offsets::draw(random, 5);
    if (is_wide)
      wide.add(kind, elems, quantized, offset);
    else
      narrow.add(kind, elems, quantized, offset);
  }
  return is_wide ? wide.check(group) : narrow.check(group);
}

}  // namespace
}  // namespace warpsmith::test
