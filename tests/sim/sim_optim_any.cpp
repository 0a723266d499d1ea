// links: csrc/kernels/optim/optim_runtime_dtypes.cu
// links: csrc/kernels/optim/optim_8bit.cu
// The optimizers' kernels with gradients in another dtype than their parameters.
#include <cmath>
#include <cstring>
#include <iterator>
#include <type_traits>

#include "harness.h"
#include "optim_mixed.h"

namespace warpsmith::test {
namespace {

constexpr Optimizer kAll[] = {
#define WARPSMITH_ROW(optimizer, F) Optimizer::optimizer,
    WARPSMITH_OPTIMIZERS(WARPSMITH_ROW)
#undef WARPSMITH_ROW
};

template <class P, class S, class G, Storage kStorage> void check_all(size_t elems) {
  const SeedsAtMost few(2);
  for (const Optimizer optimizer : kAll)
    for (const uint32_t has : variants_of(optimizer))
      Mixed<P, S, G, kStorage>(optimizer, has, elems, 0).check(group_of(0x1p-5));
}

TEST(bfloat16_gradients_beside_float32) { check_all<float, float, bfloat16, Storage::float32>(1029); }
TEST(float16_gradients_and_bfloat16_states) { check_all<float, bfloat16, float16, Storage::bfloat16_states>(1029); }
TEST(float32_gradients_in_bfloat16) { check_all<bfloat16, bfloat16, float, Storage::bfloat16>(1029); }
TEST(float32_gradients_in_float16) { check_all<float16, float16, float, Storage::float16>(1029); }
TEST(float16_gradients_in_bfloat16) { check_all<bfloat16, bfloat16, float16, Storage::bfloat16>(1029); }
TEST(float32_gradients_and_masters) { check_all<bfloat16, float, float, Storage::bfloat16_master>(1029); }
TEST(float32_gradients_and_masters_of_float16) { check_all<float16, float, float, Storage::float16_master>(1029); }
TEST(float32_gradients_rounded_at_random) { check_all<bfloat16, bfloat16, float, Storage::bfloat16_stochastic>(1029); }
TEST(float32_gradients_compensated) { check_all<bfloat16, bfloat16, float, Storage::bfloat16_compensated>(1029); }
TEST(float32_gradients_with_the_remainder) { check_all<bfloat16, float, float, Storage::bfloat16_remainder>(1029); }

TEST(every_argument_misaligned_alone) {
  const SeedsAtMost few(2);
  for (int argument = 0; argument < 6; ++argument) {
    const Offsets offset = Offsets::only(argument);
    Mixed<bfloat16, float, float, Storage::bfloat16_master>(Optimizer::adamw, 0b111, 300, offset).check(group_of(0.1));
    Mixed<bfloat16, bfloat16, float, Storage::bfloat16_compensated>(Optimizer::adamw, 0b111, 300, offset)
        .check(group_of(0.1));
  }
}

TEST(random_rounding_from_an_odd_element) {
  const SeedsAtMost few(2);
  Mixed<bfloat16, bfloat16, float, Storage::bfloat16_stochastic>(Optimizer::adamw, 0b011, 1029, 0, 701)
      .check(group_of(0x1p-5));
}

// What divides to NaN is computed again, as IEEE 754 says.
TEST(infinities_and_tiny_moments) {
  Mixed<float, float, bfloat16, Storage::float32> m(Optimizer::adamw, 0b011, 8, 0);
  under_every_seed([&] {
    m.reset();
    for (size_t i = 0; i < 8; ++i) m.states[0][i] = m.states[1][i] = 0, m.grad[i] = from_float<bfloat16>(0.0f);
    m.states[1][2] = INFINITY;
    m.grad[5] = from_float<bfloat16>(NAN);
    OptimGroup group = group_of(0x1p-5);
    group.values[AdamW::eps] = 0x1p-130;
    Launch launch(m.record(), entry_of(m.grad), Optimizer::adamw, Storage::float32, group);
    expect_ok(optim_runtime_dtypes_cuda(launch.p, nullptr));
    for (size_t i = 0; i < 8; ++i) expect(std::isnan(m.param[i]) == (i == 5), "NaN only of NaN");
  });
}

TEST(a_skipped_step_and_a_missing_gradient_change_nothing) {
  Mixed<bfloat16, float, float, Storage::bfloat16_master> m(Optimizer::lion, 0b1, 1029, 0);
  for (const bool missing : {false, true})
    under_every_seed([&] {
      m.reset();
      m.found_inf[0] = !missing;
      const void* entry = missing ? nullptr : entry_of(m.grad);
      Launch launch(m.record(), entry, m.optimizer, Storage::bfloat16_master, group_of(0.1));
      launch.p.found_inf = m.found_inf.data();
      expect_ok(optim_runtime_dtypes_cuda(launch.p, nullptr));
      const Mixed<bfloat16, float, float, Storage::bfloat16_master> before(m.optimizer, m.has, 1029, 0);
      for (size_t i = 0; i < 1029; ++i) expect_equal("master", m.master[i], before.master[i]);
      expect_equal("step", m.step[0], m.kSteps);
    });
}

// Of 8-bit states, and of float32 ones in the same storage: the bits of the kernel for gradients of the own dtype.
template <class P, class G>
void check_8bit(Optimizer optimizer, uint32_t has, size_t elems, bool quantized, const Offsets& offset) {
  constexpr Storage kStorage = sizeof(P) == 4                ? Storage::float32_8bit
                               : std::is_same_v<P, bfloat16> ? Storage::bfloat16_8bit
                                                             : Storage::float16_8bit;
  const auto blocks = static_cast<size_t>(quant_blocks(static_cast<int64_t>(elems)));
  struct Run {
    Buffer<P> param;
    Buffer<uint8_t> codes[2];
    Buffer<float> states[2], scales, step;
  };
  Buffer<G> grad(elems, offset[1]);
  Buffer<P> own(elems, offset[1]);
  fill_normal(own, 2);
  for (size_t i = 0; i < elems; ++i) {  // values that both dtypes hold
    own[i] = from_float<P>(std::round(to_float(own[i]) * 32) / 32);
    grad[i] = from_float<G>(to_float(own[i]));
  }
  under_every_seed([&] {
    const auto run = [&](bool mixed) {
      Run r{Buffer<P>(elems, offset[0]),
            {Buffer<uint8_t>(elems, offset[2]), Buffer<uint8_t>(elems, offset[3])},
            {Buffer<float>(elems, offset[2]), Buffer<float>(elems, offset[3])},
            Buffer<float>(2 * blocks),
            Buffer<float>(1)};
      fill_normal(r.param, 1);
      r.step[0] = 6;
      for (size_t i = 0; i < r.scales.size(); ++i) r.scales[i] = 0.25f + 0.125f * static_cast<float>(i % 3);
      OptimTensor t{};
      t.param = r.param.data();
      t.extra = quantized ? r.scales.data() : nullptr;
      t.step = r.step.data();
      t.numel = static_cast<int64_t>(elems);
      t.has = has;
      for (int s = 0; s < 2; ++s) {
        for (size_t i = 0; i < elems; ++i) r.codes[s][i] = static_cast<uint8_t>(i * 2654435761u >> 13);
        fill_normal(r.states[s], 4 + static_cast<uint64_t>(s), 0.05f, 0.5f);
        if ((has >> s) & 1) t.states[s] = quantized ? static_cast<void*>(r.codes[s].data()) : r.states[s].data();
      }
      Launch launch(t, mixed ? entry_of(grad) : own.data(), optimizer, kStorage, group_of(0x1p-5));
      launch.p.mixed_grads = mixed;
      expect_ok(optim_runtime_dtypes_cuda(launch.p, nullptr));
      return r;
    };
    const Run got = run(true), want = run(false);
    const auto same = [](const auto& a, const auto& b) {
      return std::memcmp(a.data(), b.data(), a.size() * sizeof(*a.data())) == 0;
    };
    expect(same(got.param, want.param) && same(got.step, want.step) && same(got.scales, want.scales), "bits");
    for (int s = 0; s < 2; ++s)
      expect(same(got.codes[s], want.codes[s]) && same(got.states[s], want.states[s]), "bits of states");
    expect_equal("step", got.step[0], 7.0f);
  });
}

TEST(eight_bit_states) {
  const SeedsAtMost few(2);
  for (const bool quantized : {true, false}) {
    for (const size_t elems : {5, 256, 1029}) {
      check_8bit<bfloat16, float>(Optimizer::adamw, 0b011, elems, quantized, 0);
      check_8bit<float, bfloat16>(Optimizer::adam, 0b011, elems, quantized, 0);
      check_8bit<float16, float>(Optimizer::lion, 0b1, elems, quantized, 0);
      check_8bit<float, float16>(Optimizer::sgd, 0b1, elems, quantized, 0);
    }
    for (int argument = 0; argument < 4; ++argument)
      check_8bit<bfloat16, float>(Optimizer::adamw, 0b011, 1029, quantized, Offsets::only(argument));
  }
}

TEST(float64_is_refused) {
  Mixed<float, float, bfloat16, Storage::float32> m(Optimizer::sgd, 0, 5, 0);
  Launch launch(m.record(), entry_of(m.grad), m.optimizer, Storage::float64, group_of(0.1));
  expect_refused(optim_runtime_dtypes_cuda(launch.p, nullptr), "float64");
}

RANDOM_TEST(random_mixed) {
  const Optimizer optimizer = kAll[random.integer(0, std::size(kAll) - 1)];
  const std::vector<uint32_t> variants = variants_of(optimizer);
  const uint32_t has = variants[static_cast<size_t>(random.integer(0, static_cast<int64_t>(variants.size()) - 1))];
  const auto elems = static_cast<size_t>(random.size(1, 5000));
  const Offsets offset = Offsets::draw(random, 6);
  const OptimGroup group = group_of(random.choice({0x1p-5, 0x1p-8}));
  switch (random.integer(0, 3)) {
    case 0: return Mixed<bfloat16, float, float, Storage::bfloat16_master>(optimizer, has, elems, offset).check(group);
    case 1: return Mixed<float, float, bfloat16, Storage::float32>(optimizer, has, elems, offset).check(group);
    case 2: return Mixed<bfloat16, bfloat16, float, Storage::bfloat16>(optimizer, has, elems, offset).check(group);
    default:
      return Mixed<bfloat16, bfloat16, float, Storage::bfloat16_stochastic>(optimizer, has, elems, offset).check(group);
  }
}

}  // namespace
}  // namespace warpsmith::test
