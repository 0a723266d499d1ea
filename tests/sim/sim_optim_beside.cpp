// links: csrc/kernels/optim/optim_runtime_dtypes.cu
// links: csrc/kernels/optim/optim_8bit.cu
// What a step does beside its own: averages, copies, gradients that become zero.
#include "harness.h"
#include "kernels/optim/average.h"
#include "kernels/optim/contraction.h"
#include "optim_mixed.h"

namespace warpsmith::test {
namespace {

// Beside parameters and states as a run without has them.
template <class P, class G, Storage kStorage>
void check_beside(size_t elems, const Offsets& offset, bool averages_param) {
  using M = Mixed<P, float, G, kStorage>;
  constexpr Dtype kCopy = Dtype::float16;
  const float weight = averages_param ? 0.25f : 0.75f;
  for (const bool skips : {false, true})
    for (const bool missing : {false, true}) {
      M plain(Optimizer::adamw, 0b011, elems, offset), m(Optimizer::adamw, 0b011, elems, offset);
      Buffer<float> average(elems, offset[5]), before(elems);
      Buffer<float16> copy(M::kMaster ? 0 : elems, offset[2]);
      const auto step = [&](M& t, const StepExtras* beside) {
        t.reset();
        t.found_inf[0] = skips;
        Launch launch(t.record(), missing ? nullptr : entry_of(t.grad), t.optimizer, kStorage, group_of(0x1p-5));
        launch.p.found_inf = t.found_inf.data();
        launch.p.extras = beside;
        launch.p.ema_weight = weight;
        launch.p.zero_grads = beside != nullptr;
        expect_ok(optim_runtime_dtypes_cuda(launch.p, nullptr));
      };
      step(plain, nullptr);
      under_every_seed([&] {
        fill_normal(average, 11);
        fill_normal(before, 11);
        fill_normal(copy, 12);
        const StepExtras beside{average.data(), M::kMaster ? nullptr : copy.data(), kCopy, averages_param};
        step(m, &beside);
        expect_equal("step", m.step[0], plain.step[0]);
        for (size_t i = 0; i < elems; ++i) {
          expect_equal("param", to_float(m.param[i]), to_float(plain.param[i]));
          expect_equal("first moment", m.states[0][i], plain.states[0][i]);
          expect(missing || to_float(m.grad[i]) == 0, "a gradient that is not 0");
          float value = to_float(m.param[i]);
          if (M::kMaster && !averages_param) value = m.master[i];
          expect_equal("average", average[i], skips ? before[i] : lerp(before[i], value, weight));
          if (!M::kMaster && !skips && !missing)
            expect_equal("copy", copy[i].bits, from_float<float16>(to_float(m.param[i])).bits);
        }
        same_bits_for_every_seed("average", average);
      });
    }
}

TEST(averages_copies_and_zeros) {
  const SeedsAtMost few(2);
  for (const bool averages_param : {false, true}) {
    check_beside<float, float, Storage::float32>(2061, 0, averages_param);
    check_beside<float, bfloat16, Storage::float32>(1029, 0, averages_param);
    check_beside<bfloat16, bfloat16, Storage::bfloat16_master>(1029, 0, averages_param);
    check_beside<float16, float, Storage::float16_master>(1029, 0, averages_param);
    for (int argument = 0; argument < 6; ++argument)
      check_beside<float, float, Storage::float32>(300, Offsets::only(argument), averages_param);
  }
}

TEST(bytes_of_averages_copies_and_zeros) {
  Mixed<float, float, float, Storage::float32> m(Optimizer::adamw, 0b011, 4 * kOptimTileElems, 0);
  Buffer<float> average(m.param.size());
  Buffer<bfloat16> copy(m.param.size());
  under_every_seed([&] {
    m.reset();
    fill_normal(average, 1);
    const StepExtras beside{average.data(), copy.data(), Dtype::bfloat16, false};
    Launch launch(m.record(), m.grad.data(), m.optimizer, Storage::float32, group_of(0x1p-5));
    launch.p.extras = &beside;
    launch.p.zero_grads = true;
    sim::counters() = {};
    expect_ok(optim_runtime_dtypes_cuda(launch.p, nullptr));
    const auto n = static_cast<int64_t>(m.param.size());
    expect_bytes({.read = (16 + 4) * n, .written = (12 + 4 + 2 + 4) * n});
  });
}

}  // namespace
}  // namespace warpsmith::test
