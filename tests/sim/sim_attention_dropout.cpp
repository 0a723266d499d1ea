// Dropout in the Hopper kernels of attention on the host: the mask of attention_dropout.h, against double precision.
// links: csrc/kernels/attention/attention.cu
// links: csrc/kernels/attention/portable/attention_portable.cu
// links: csrc/kernels/attention/hopper/forward_sm90a.cu
// links: csrc/kernels/attention/hopper/backward_sm90a.cu
// links: csrc/kernels/attention/hopper/backward_wide_sm90a.cu
// links: csrc/kernels/attention/portable/portable_bfloat16.cu
// links: csrc/kernels/attention/portable/portable_float16.cu
// links: csrc/kernels/attention/portable/portable_float32.cu
#include "device/halves.h"  // before the host's conversions, which harness.h brings

#include "attention_sm90_runs.h"

namespace warpsmith::test {
namespace {

// Words against every threshold, with many bytes close to it.
template <class Check> void for_words_near_thresholds(Check&& check) {
  Random random(1);
  for (uint32_t threshold = 1; threshold <= 256; ++threshold)
    for (int i = 0; i < 100; ++i) {
      uint32_t word = 0;
      for (int byte = 0; byte < 4; ++byte) {
        const int64_t x = random.coin() ? random.integer(0, 255) : int64_t{threshold} + random.integer(-2, 2);
        word |= static_cast<uint32_t>(std::clamp<int64_t>(x, 0, 255)) << (8 * byte);
      }
      check(word, threshold, [&](int byte) { return (word >> (8 * byte) & 0xff) >= threshold; });
    }
}
TEST(bytes_reach_their_threshold) {
  for_words_near_thresholds([](uint32_t word, uint32_t threshold, auto&& kept) {
    const uint32_t reached = device::bytes_reach(word, device::bytes_threshold(threshold));
    for (int byte = 0; byte < 4; ++byte)
      expect_equal("byte " + std::to_string(byte), (reached >> (8 * byte + 7) & 1) != 0, kept(byte));
  });
}
TEST(gates_of_bytes) {
  for_words_near_thresholds([](uint32_t word, uint32_t threshold, auto&& kept) {
    for (int pair = 0; pair < 2; ++pair) {
      const uint32_t gates = device::byte_gates(word, pair, device::byte_threshold(threshold));
      expect_equal("low half", gates & 0xffff, kept(2 * pair) ? 0x3c00u : 0u);
      expect_equal("high half", gates >> 16, kept(2 * pair + 1) ? 0x3c00u : 0u);
    }
  });
}
template <class T> void check_gated() {
  constexpr uint32_t kOpen = 0x3c00;
  for (const float x : {0.0f, 0x1p-14f, 0.75f, 1.0f, 61440.0f})
    for (const uint32_t gates : {0u, kOpen, kOpen << 16, kOpen << 16 | kOpen}) {
      const uint32_t gated = device::multiply_halves<T>(device::pack<T>(x, 1.0f), gates);
      expect_equal("gated", device::low_half<T>(gated), (gates & kOpen) != 0 ? x * device::kGate<T> : 0.0f);
    }
}
TEST(gated_elements) {
  check_gated<float16>();
  check_gated<bfloat16>();
}
TEST(signs_are_spread) {
  expect_equal("1, 5", device::spread_signs(0x00008000, 0x7fff7fff, device::spread_selector(1, 5)), 0x0000ffffu);
  expect_equal("2, 7", device::spread_signs(0x7f7f8080, 0x80000000, device::spread_selector(2, 7)), 0xffff0000u);
  expect_equal("1, 0", device::spread_signs(0x000080ff, 0, device::spread_selector(1, 0)), 0xffffffffu);
}
// The threshold is 256 p, rounded; the scale is the inverse of what is kept.
TEST(thresholds_of_probabilities) {
  const auto is = [](double p, uint32_t threshold, double scale) {
    const Dropout d = make_attention_dropout(nullptr, p);
    expect_equal("threshold", d.threshold, threshold);
    expect_equal("scale", d.scale, scale);
  };
  is(0, 0, 1), is(1e-9, 1, 256.0 / 255), is(0.1, 26, 256.0 / 230), is(0.5, 128, 2);
  is(0.996, 255, 256), is(0.9999, 255, 256), is(1, 256, 0);
}

// Where weights are so unequal that p of the kept ones may underflow, out is close to 0 beside values about 1.
constexpr Tolerance kUnequalWeights{.ulps = 1, .relative = 0, .absolute = 0x1p-7};

template <class T> void check_dropped_forward(const AttentionCase& shape) {
  AttentionData<T> data(shape);
  data.solve(true);  // of_out as well
  expect_ok(on_hopper(data.forward()));
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

template <class T> void check_dropped_backward(const AttentionCase& shape) {
  expect_ok(on_hopper(AttentionData<T>(shape).backward()));
  check_backward<T>(shape);
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
// A part of a larger call drops what that call drops. Packed sequences can be a part of the heads.
TEST(forward_and_backward_of_a_part) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(2);
  Multiprocessors two(2);
  for (const int64_t dim : {64, 128}) {
    AttentionCase part{
        .batch = 2, .queries = 150, .keys = 200, .heads = 2, .key_heads = 1, .head_dim = dim, .dropout = 0.3};
    part.place = part_of_a_whole(part);
    check_dropped_forward<bfloat16>(part);
    check_dropped_backward<bfloat16>(part);
  }
  AttentionCase packed{.heads = 2, .key_heads = 1, .lengths_q = {70, 3}, .lengths_k = {70, 9}, .dropout = 0.3};
  packed.place = {.first_head = 2, .heads = 6};
  check_dropped_forward<float16>(packed);
  check_dropped_backward<float16>(packed);
}
TEST(forward_float16_and_probabilities_at_the_ends) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(2);
  Multiprocessors two(2);
  check_dropped_forward<float16>(
      {.queries = 200, .keys = 260, .heads = 2, .key_heads = 2, .head_dim = 128, .window_right = 0, .dropout = 0.3});
  for (const double p : {0.5, 0.00001, 0.9999, 1.0})
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
TEST(backward_128) {
  NEEDS_SM90_CODE;
  Multiprocessors two(2);
  check_dropped_backward<bfloat16>(
      {.queries = 150, .keys = 300, .heads = 2, .key_heads = 1, .head_dim = 128, .dropout = 0.1});
}
TEST(backward_64) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(3);
  Multiprocessors two(2);
  check_dropped_backward<bfloat16>(
      {.batch = 2, .queries = 200, .keys = 200, .heads = 2, .key_heads = 2, .window_right = 0, .dropout = 0.4});
}
TEST(backward_float16_sink_and_probabilities_at_the_ends) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(2);
  Multiprocessors two(2);
  for (const int64_t dim : {40, 104})
    for (const double p : {0.5, 0.00001, 0.9999, 1.0})
      check_dropped_backward<float16>({.queries = 70, .keys = 140, .head_dim = dim, .sink = true, .dropout = p});
}
TEST(backward_packed_and_windows) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(2);
  Multiprocessors two(2);
  for (const int64_t dim : {64, 128})
    check_dropped_backward<bfloat16>({.heads = 2,
                                      .key_heads = 1,
                                      .head_dim = dim,
                                      .window_left = 90,
                                      .window_right = 0,
                                      .lengths_q = {150, 0, 3, 130, 64},
                                      .lengths_k = {150, 10, 7, 200, 0},
                                      .spare_tokens = 5,
                                      .dropout = 0.2});
}
TEST(a_softcap_beside_it_is_refused) {
  NEEDS_SM90_CODE;
  AttentionData<bfloat16> data({.queries = 64, .keys = 64, .softcap = 2, .dropout = 0.1});
  expect_refused(on_hopper(data.forward()), "dropout beside a softcap");
}
// Forward and backward, of shapes and windows at random.
RANDOM_TEST(random_shapes) {
  NEEDS_SM90_CODE;
  const int64_t key_heads = random.integer(1, 2);
  AttentionCase shape{.batch = random.integer(1, 2),
                      .queries = random.size(1, 200),
                      .keys = random.size(1, 300),
                      .heads = key_heads * random.integer(1, 2),
                      .key_heads = key_heads,
                      .head_dim = 8 * random.integer(1, 16)};
  if (random.coin()) shape.window_right = random.size(0, 200);
  if (random.coin()) shape.window_left = random.size(0, 200);
  shape.dropout = static_cast<double>(random.integer(1, 90)) / 100;
  if (random.coin()) shape.place = part_of_a_whole(shape);
  sim::options().seed = static_cast<uint64_t>(random.integer(0, 7));
  sim::options().properties.multiprocessors = static_cast<int>(random.integer(1, 3));
  AttentionData<bfloat16> data(shape, random.bits() % 1000);
  solve_gradients(data);
  data.poison_gradients();
  expect_ok(run_backward(data));
  compare_gradients(data);
  data.poison_outputs();
  expect_ok(run_forward(data));
  expect_within("out", data.out.data, data.want_out, data.of_out);
  expect_close("lse", data.lse, data.want_lse, kLseTolerance);
  sim::options().seed = 0;
  sim::options().properties.multiprocessors = 132;
}

}  // namespace
}  // namespace warpsmith::test
