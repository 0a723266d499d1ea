// The Hopper backward of attention for head dimensions above 128 on the host: every feature against double precision
// under every schedule.
// links: csrc/kernels/attention/attention.cu
// links: csrc/kernels/attention/portable/attention_portable.cu
// links: csrc/kernels/attention/hopper/forward_sm90a.cu
// links: csrc/kernels/attention/hopper/backward_sm90a.cu
// links: csrc/kernels/attention/hopper/backward_wide_sm90a.cu
// links: csrc/kernels/attention/portable/portable_bfloat16.cu
// links: csrc/kernels/attention/portable/portable_float16.cu
// links: csrc/kernels/attention/portable/portable_float32.cu
#include "attention_sm90_runs.h"

namespace warpsmith::test {
namespace {

template <class T> void check(const AttentionCase& shape) {
  AttentionData<T> data(shape);
  expect_ok(on_hopper(data.backward()));
  check_backward<T>(shape);
}

TEST(full) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(2);
  check<bfloat16>({.queries = 150, .keys = 200, .heads = 2, .key_heads = 1, .head_dim = 256});
}
TEST(causal) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(2);
  check<bfloat16>({.queries = 300, .keys = 300, .heads = 1, .key_heads = 1, .head_dim = 256, .window_right = 0});
}
TEST(float16_rounds_as_it_should) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(2);
  check<float16>({.queries = 200, .keys = 260, .heads = 2, .key_heads = 1, .head_dim = 256, .window_right = 0});
}
TEST(windows) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(2);
  // In the third, some blocks miss being seen whole by one key or one query, at either edge.
  for (const auto& [left, right] : {std::pair{100, 0}, {0, 0}, {128, 60}, {-1, 40}, {60, -1}, {200, 5}})
    check<bfloat16>({.queries = 140, .keys = 270, .head_dim = 256, .window_left = left, .window_right = right});
}
// Sequences of unequal length, among them rows without keys and keys without queries.
TEST(alignment) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(2);
  for (const bool bottom_right : {false, true})
    for (const auto& [queries, keys] : {std::pair{300, 70}, {70, 300}, {1, 200}, {200, 1}})
      check<bfloat16>({.queries = queries,
                       .keys = keys,
                       .head_dim = 136,
                       .window_left = 90,
                       .window_right = 0,
                       .bottom_right = bottom_right});
}
TEST(sink) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(2);
  check<bfloat16>({.batch = 2,
                   .queries = 130,
                   .keys = 60,
                   .heads = 2,
                   .key_heads = 1,
                   .head_dim = 256,
                   .window_right = 0,
                   .sink = true});
  check<float16>(
      {.heads = 2, .key_heads = 2, .head_dim = 192, .sink = true, .lengths_q = {70, 30}, .lengths_k = {70, 130}});
}
TEST(odd_head_dims) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(2);
  check<bfloat16>({.queries = 130, .keys = 140, .heads = 3, .key_heads = 1, .head_dim = 136, .head_dim_v = 200});
  check<bfloat16>({.queries = 130, .keys = 140, .heads = 2, .key_heads = 2, .head_dim = 200, .head_dim_v = 8});
  check<bfloat16>({.queries = 70, .keys = 140, .heads = 2, .key_heads = 1, .head_dim = 64, .head_dim_v = 248});
}
TEST(heads_first) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(2);
  check<bfloat16>(
      {.batch = 2, .queries = 130, .keys = 140, .heads = 2, .key_heads = 1, .head_dim = 256, .heads_first = true});
}
// Empty sequences, keys that no query sees, and tokens after the last sequence.
TEST(packed) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(2);
  check<bfloat16>({.heads = 2,
                   .key_heads = 1,
                   .head_dim = 256,
                   .window_right = 0,
                   .lengths_q = {150, 0, 3, 130, 64},
                   .lengths_k = {150, 10, 7, 200, 0},
                   .spare_tokens = 5});
}
TEST(packed_full) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(2);
  check<float16>({.heads = 4, .key_heads = 2, .head_dim = 200, .lengths_q = {1, 260, 31}, .lengths_k = {140, 60, 31}});
}

RANDOM_TEST(random_shapes) {
  NEEDS_SM90_CODE;
  const int64_t key_heads = random.integer(1, 2);
  AttentionCase shape{.batch = random.integer(1, 2),
                      .queries = random.size(1, 200),
                      .keys = random.size(1, 200),
                      .heads = key_heads * random.integer(1, 2),
                      .key_heads = key_heads,
                      .head_dim = 8 * random.integer(17, 32),
                      .head_dim_v = 8 * random.integer(1, 32)};
  if (random.coin()) shape.window_right = random.size(0, 200);
  if (random.coin()) shape.window_left = random.size(0, 200);
  shape.bottom_right = random.coin();
  shape.heads_first = random.coin();
  shape.sink = random.coin();
  if (random.coin()) {
    shape.lengths_q = {random.size(0, 150), random.size(0, 100)};
    shape.lengths_k = {random.size(0, 150), random.size(0, 100)};
    if (!shape.sink) shape.spare_tokens = random.integer(0, 3);  // the oracle gives them no lse
    if (shape.lengths_q[0] + shape.lengths_q[1] == 0 || shape.lengths_k[0] + shape.lengths_k[1] == 0) return;
  }
  sim::options().seed = static_cast<uint64_t>(random.integer(0, 7));
  AttentionData<bfloat16> data(shape, random.bits() % 1000);
  solve_gradients(data);
  expect_ok(run_backward(data));
  compare_gradients(data);
  sim::options().seed = 0;
}

TEST(softcap_and_dropout_are_refused) {
  NEEDS_SM90_CODE;
  AttentionData<bfloat16> capped({.queries = 64, .keys = 64, .head_dim = 256, .softcap = 2.0});
  expect_refused(on_hopper(capped.backward()), "softcap");
  AttentionData<bfloat16> dropped({.queries = 64, .keys = 64, .head_dim = 256, .dropout = 0.1});
  expect_refused(on_hopper(dropped.backward()), "dropout with head dimensions above 128");
}
TEST(code_below_sm90_is_refused) {
  on_machine(132, 80, [] {
    AttentionData<bfloat16> data({.queries = 64, .keys = 64, .head_dim = 256});
    expect_refused(on_hopper(data.backward()), "runs no code of sm_90a");
  });
}

}  // namespace
}  // namespace warpsmith::test
