// Dropout in the Hopper kernels of attention on the host: the mask of attention_dropout.h, against double precision.
// links: csrc/kernels/attention/attention.cu
// links: csrc/kernels/attention/attention_portable.cu
// links: csrc/kernels/attention/forward_sm90a.cu
// links: csrc/kernels/attention/backward_sm90a.cu
// links: csrc/kernels/attention/portable_bfloat16.cu
// links: csrc/kernels/attention/portable_float16.cu
// links: csrc/kernels/attention/portable_float32.cu
#include "attention_sm90_runs.h"
#include "device/halves.h"

namespace warpsmith::test {
namespace {

// Every word against every threshold that has a case of its own, and many others.
TEST(halves_reach_their_threshold) {
  Random random(1);
  std::vector<uint32_t> thresholds{0, 1, 0x7fff, 0x8000, 0x8001, 0xffff, 0x10000};
  for (int i = 0; i < 50; ++i) thresholds.push_back(static_cast<uint32_t>(random.integer(0, 65536)));
  for (const uint32_t threshold : thresholds) {
    const device::HalvesThreshold halves = device::halves_threshold(threshold);
    for (int i = 0; i < 400; ++i) {
      const auto near = [&] {
        const int64_t x = random.coin() ? random.integer(0, 65535) : int64_t{threshold} + random.integer(-2, 2);
        return static_cast<uint32_t>(std::clamp<int64_t>(x, 0, 65535));
      };
      const uint32_t low = near(), high = near(), kept = device::halves_reach(high << 16 | low, halves);
      expect_equal("low half", (kept >> 15 & 1) != 0, low >= threshold);
      expect_equal("high half", kept >> 31 != 0, high >= threshold);
    }
  }
}
TEST(signs_are_spread) {
  expect_equal("0, 2", device::spread_signs(0x00008000, 0x7fff7fff, device::spread_selector(0, 2)), 0x0000ffffu);
  expect_equal("1, 3", device::spread_signs(0x7fff8000, 0x80000000, device::spread_selector(1, 3)), 0xffff0000u);
  expect_equal("1, 0", device::spread_signs(0x8000ffff, 0, device::spread_selector(1, 0)), 0xffffffffu);
}

// Where weights are so unequal that p of the kept ones may underflow, out is close to 0 beside values about 1.
constexpr Tolerance kUnequalWeights{.ulps = 1, .relative = 0, .absolute = 0x1p-7};

template <class T> void check_dropped_forward(const AttentionCase& shape) {
  AttentionData<T> data(shape);
  data.solve(true);  // of_out as well
  expect_ok(attention_forward_supported_sm90(data.forward()));
  under_every_seed([&] {
    data.poison_outputs();
    expect_ok(run_forward(data));
    same_bits_for_every_seed("out", data.out.data);
    same_bits_for_every_seed("lse", data.lse);
    if (shape.logit_growth > 0)
      expect_close("out", data.out.data, data.want_out, kUnequalWeights);
    else
      expect_within("out", data.out.data, data.want_out, data.of_out);
    expect_close("lse", data.lse, data.want_lse, kLseTolerance);
    expect_equal("bank conflicts", sim::counters().bank_conflicts, int64_t{0});
  });
}

TEST(forward_128) {
  NEEDS_SM90_CODE;
  Multiprocessors two(2);
  check_dropped_forward<bfloat16>(
      {.queries = 150, .keys = 420, .heads = 2, .key_heads = 1, .head_dim = 128, .dropout = 0.1});
}
TEST(forward_64) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(2);
  Multiprocessors two(2);
  check_dropped_forward<bfloat16>(
      {.queries = 200, .keys = 400, .heads = 3, .key_heads = 3, .window_right = 0, .dropout = 0.6});
}
TEST(forward_float16_and_probabilities_at_the_ends) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(2);
  Multiprocessors two(2);
  check_dropped_forward<float16>(
      {.queries = 200, .keys = 260, .heads = 2, .key_heads = 2, .head_dim = 128, .window_right = 0, .dropout = 0.3});
  for (const double p : {0.5, 0.00001, 0.99, 1.0})
    check_dropped_forward<float16>({.queries = 70, .keys = 300, .head_dim = 40, .sink = true, .dropout = p});
}
TEST(forward_packed_and_windows) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(2);
  Multiprocessors two(2);
  check_dropped_forward<bfloat16>({.heads = 2,
                                   .key_heads = 1,
                                   .head_dim = 128,
                                   .window_left = 150,
                                   .window_right = 0,
                                   .lengths_q = {150, 0, 3, 300, 64},
                                   .lengths_k = {150, 10, 7, 430, 0},
                                   .spare_tokens = 5,
                                   .dropout = 0.2});
  check_dropped_forward<bfloat16>(
      {.queries = 300, .keys = 520, .window_left = 300, .window_right = 70, .bottom_right = false, .dropout = 0.2});
}
// The base follows the maxima, and what was dropped before stays so.
TEST(forward_maxima_outgrow_the_base) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(2);
  Multiprocessors one(1);
  for (const float growth : {8.0f, 300.0f}) {
    check_dropped_forward<bfloat16>(
        {.queries = 150, .keys = 700, .head_dim = 128, .logit_growth = growth, .dropout = 0.4});
    check_dropped_forward<float16>({.queries = 150, .keys = 700, .logit_growth = growth, .dropout = 0.4});
  }
}
TEST(a_softcap_beside_it_is_refused) {
  NEEDS_SM90_CODE;
  AttentionData<bfloat16> data({.queries = 64, .keys = 64, .softcap = 2, .dropout = 0.1});
  expect_refused(attention_forward_sm90(data.forward(), nullptr), "dropout beside a softcap");
}

}  // namespace
}  // namespace warpsmith::test
