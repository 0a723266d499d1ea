// The Hopper kernels of attention on the host: every feature against double precision under every schedule, with the
// FLOPs that whole blocks of keys make.
// links: csrc/kernels/attention/hopper/forward_sm90a.cu
// links: csrc/kernels/attention/hopper/backward_sm90a.cu
#include "attention_sm90_runs.h"
#include "kernels/attention/backward_plan.h"
#include "kernels/attention/sections.h"

namespace warpsmith::test {
namespace {

TEST(forward_full_128) {
  Multiprocessors two(2);
  check_forward<bfloat16>({.queries = 200, .keys = 300, .heads = 2, .key_heads = 1, .head_dim = 128});
}
TEST(forward_causal_128) {
  Multiprocessors two(2);
  check_forward<bfloat16>(
      {.queries = 300, .keys = 300, .heads = 2, .key_heads = 2, .head_dim = 128, .window_right = 0});
}
// Head dimensions above 128: tiles one after the other, a base that follows the maxima.
TEST(forward_256) {
  SeedsAtMost few(2);
  Multiprocessors two(2);
  check_forward<bfloat16>({.batch = 2, .queries = 200, .keys = 300, .heads = 2, .key_heads = 1, .head_dim = 256});
  check_forward<float16>({.queries = 300, .keys = 300, .heads = 2, .key_heads = 2, .head_dim = 256, .window_right = 0});
  check_forward<bfloat16>(
      {.queries = 130, .keys = 250, .heads = 2, .key_heads = 2, .head_dim = 200, .head_dim_v = 136});
}
TEST(forward_256_packed_with_softcap_and_sink) {
  SeedsAtMost few(2);
  Multiprocessors one(1);
  check_forward<bfloat16>({.heads = 2,
                           .key_heads = 1,
                           .head_dim = 256,
                           .window_right = 0,
                           .softcap = 3.0,
                           .sink = true,
                           .lengths_q = {130, 0, 70},
                           .lengths_k = {260, 40, 70}});
}
TEST(forward_full_64) {
  Multiprocessors two(2);
  check_forward<bfloat16>({.batch = 2, .queries = 200, .keys = 300, .heads = 2, .key_heads = 1, .head_dim = 64});
}
TEST(forward_causal_64) {
  Multiprocessors two(2);
  check_forward<bfloat16>({.queries = 330, .keys = 330, .heads = 2, .key_heads = 2, .head_dim = 64, .window_right = 0});
}
TEST(forward_causal_64_long) {
  SeedsAtMost few(2);
  Multiprocessors one(1);
  check_forward<bfloat16>(
      {.queries = 200, .keys = 2100, .heads = 1, .key_heads = 1, .head_dim = 64, .window_right = 0});
}
TEST(forward_float16) {
  SeedsAtMost few(2);
  Multiprocessors two(2);
  check_forward<float16>({.queries = 200, .keys = 260, .heads = 2, .key_heads = 1, .head_dim = 128, .window_right = 0});
  check_forward<float16>({.queries = 200, .keys = 260, .heads = 2, .key_heads = 1, .head_dim = 64});
}
TEST(forward_windows) {
  SeedsAtMost few(2);
  Multiprocessors two(2);
  for (const int64_t dim : {64, 128})
    for (const auto& [left, right] : {std::pair{100, 0}, {0, 0}, {130, 70}, {-1, 40}, {60, -1}, {300, 5}})
      check_forward<bfloat16>({.queries = 300,
                               .keys = 420,
                               .heads = 1,
                               .key_heads = 1,
                               .head_dim = dim,
                               .window_left = left,
                               .window_right = right});
}
TEST(forward_alignment) {
  SeedsAtMost few(2);
  Multiprocessors two(2);
  for (const bool bottom_right : {false, true})
    for (const auto& [queries, keys] : {std::pair{300, 100}, {100, 300}, {1, 200}, {200, 1}})
      check_forward<bfloat16>({.queries = queries,
                               .keys = keys,
                               .head_dim = 128,
                               .window_left = 90,
                               .window_right = 0,
                               .bottom_right = bottom_right});
}
TEST(forward_softcap_and_sink) {
  SeedsAtMost few(2);
  Multiprocessors two(2);
  for (const int64_t dim : {64, 128})
    check_forward<bfloat16>({.queries = 200,
                             .keys = 300,
                             .heads = 2,
                             .key_heads = 2,
                             .head_dim = dim,
                             .window_right = 0,
                             .softcap = 1.5,
                             .sink = true});
  check_forward<bfloat16>({.queries = 200, .keys = 60, .head_dim = 128, .window_right = 0, .sink = true});
}
TEST(forward_odd_head_dims) {
  SeedsAtMost few(2);
  Multiprocessors two(2);
  check_forward<bfloat16>({.queries = 130, .keys = 140, .heads = 3, .key_heads = 1, .head_dim = 72, .head_dim_v = 104});
  check_forward<bfloat16>({.queries = 130, .keys = 140, .heads = 2, .key_heads = 2, .head_dim = 96, .head_dim_v = 8});
  check_forward<bfloat16>({.queries = 130, .keys = 140, .heads = 2, .key_heads = 1, .head_dim = 40, .window_right = 0});
}
TEST(forward_heads_first) {
  SeedsAtMost few(2);
  Multiprocessors two(2);
  check_forward<bfloat16>(
      {.batch = 2, .queries = 130, .keys = 140, .heads = 2, .key_heads = 1, .head_dim = 128, .heads_first = true});
}
TEST(forward_packed) {
  Multiprocessors two(2);
  for (const int64_t dim : {64, 128})
    check_forward<bfloat16>({.heads = 2,
                             .key_heads = 1,
                             .head_dim = dim,
                             .window_right = 0,
                             .lengths_q = {150, 0, 3, 200, 64},
                             .lengths_k = {150, 10, 7, 230, 0},
                             .spare_tokens = 5});
}
TEST(forward_packed_full) {
  SeedsAtMost few(2);
  Multiprocessors two(2);
  check_forward<float16>(
      {.heads = 2, .key_heads = 2, .head_dim = 128, .lengths_q = {1, 260, 31}, .lengths_k = {140, 60, 31}});
}
// Maxima that grow from block to block, by little and beyond any exponent: the base must follow.
TEST(forward_maxima_outgrow_the_base) {
  SeedsAtMost few(2);
  Multiprocessors one(1);
  for (const float growth : {8.0f, 300.0f})
    for (const int64_t dim : {64, 128, 256}) {
      AttentionCase shape{.queries = 150, .keys = 700, .head_dim = dim, .logit_growth = growth};
      check_forward<bfloat16>(shape, {.ulps = 1, .relative = 0, .absolute = 0x1p-7});
      check_forward<float16>(shape, {.ulps = 1, .relative = 0, .absolute = 0x1p-9});
    }
}

TEST(backward_full_128) {
  Multiprocessors two(2);
  check_backward<bfloat16>({.queries = 150, .keys = 300, .heads = 2, .key_heads = 1, .head_dim = 128});
}
TEST(backward_causal_128) {
  Multiprocessors two(2);
  check_backward<bfloat16>(
      {.queries = 300, .keys = 300, .heads = 2, .key_heads = 2, .head_dim = 128, .window_right = 0});
}
TEST(backward_full_64) {
  Multiprocessors two(2);
  check_backward<bfloat16>({.batch = 2, .queries = 150, .keys = 300, .heads = 2, .key_heads = 1, .head_dim = 64});
}
TEST(backward_causal_64) {
  Multiprocessors two(2);
  check_backward<bfloat16>(
      {.queries = 330, .keys = 330, .heads = 4, .key_heads = 2, .head_dim = 64, .window_right = 0});
}
TEST(backward_float16) {
  SeedsAtMost few(2);
  Multiprocessors two(2);
  check_backward<float16>(
      {.queries = 200, .keys = 260, .heads = 2, .key_heads = 1, .head_dim = 128, .window_right = 0});
  check_backward<float16>({.queries = 200, .keys = 260, .heads = 2, .key_heads = 1, .head_dim = 64});
}
TEST(backward_windows) {
  SeedsAtMost few(2);
  Multiprocessors two(2);
  for (const int64_t dim : {64, 128})
    for (const auto& [left, right] : {std::pair{100, 0}, {0, 0}, {130, 70}, {-1, 40}, {60, -1}, {300, 5}})
      check_backward<bfloat16>({.queries = 300,
                                .keys = 420,
                                .heads = 1,
                                .key_heads = 1,
                                .head_dim = dim,
                                .window_left = left,
                                .window_right = right});
}
TEST(backward_alignment) {
  SeedsAtMost few(2);
  Multiprocessors two(2);
  for (const bool bottom_right : {false, true})
    for (const auto& [queries, keys] : {std::pair{300, 100}, {100, 300}, {1, 200}, {200, 1}})
      check_backward<bfloat16>({.queries = queries,
                                .keys = keys,
                                .head_dim = 128,
                                .window_left = 90,
                                .window_right = 0,
                                .bottom_right = bottom_right});
}
// More tiles that no query sees, one after the other, than the loader may be ahead.
TEST(backward_unseen_keys) {
  Multiprocessors one(1);
  check_backward<bfloat16>({.batch = 2, .queries = 100, .keys = 900, .window_right = 0, .bottom_right = false});
  check_backward<bfloat16>({.lengths_q = {70, 0, 1}, .lengths_k = {70, 900, 300}, .spare_tokens = 200});
}
TEST(backward_sink) {
  SeedsAtMost few(2);
  Multiprocessors two(2);
  check_backward<bfloat16>({.batch = 2,
                            .queries = 200,
                            .keys = 60,
                            .heads = 2,
                            .key_heads = 1,
                            .head_dim = 64,
                            .window_right = 0,
                            .sink = true});
  check_backward<float16>(
      {.heads = 2, .key_heads = 2, .head_dim = 128, .sink = true, .lengths_q = {70, 30}, .lengths_k = {70, 130}});
}
TEST(backward_odd_head_dims) {
  SeedsAtMost few(2);
  Multiprocessors two(2);
  check_backward<bfloat16>(
      {.queries = 130, .keys = 140, .heads = 3, .key_heads = 1, .head_dim = 72, .head_dim_v = 104});
  check_backward<bfloat16>({.queries = 130, .keys = 140, .heads = 2, .key_heads = 2, .head_dim = 96, .head_dim_v = 8});
  check_backward<bfloat16>(
      {.queries = 130, .keys = 140, .heads = 2, .key_heads = 1, .head_dim = 40, .window_right = 0});
}
TEST(backward_heads_first) {
  SeedsAtMost few(2);
  Multiprocessors two(2);
  check_backward<bfloat16>(
      {.batch = 2, .queries = 130, .keys = 140, .heads = 2, .key_heads = 1, .head_dim = 128, .heads_first = true});
}
TEST(backward_packed) {
  Multiprocessors two(2);
  for (const int64_t dim : {64, 128})
    check_backward<bfloat16>({.heads = 2,
                              .key_heads = 1,
                              .head_dim = dim,
                              .window_right = 0,
                              .lengths_q = {150, 0, 3, 200, 64},
                              .lengths_k = {150, 10, 7, 230, 0},
                              .spare_tokens = 5});
}

// Tiles so long that the query heads of a key head go to several blocks, whose dk and dv are summed afterwards.
TEST(backward_parts) {
  SeedsAtMost few(2);
  Multiprocessors three(3);
  const AttentionCase shapes[] = {{.queries = 2800, .keys = 70, .heads = 6, .key_heads = 1, .head_dim = 64},
                                  {.heads = 4,
                                   .key_heads = 2,
                                   .head_dim = 72,
                                   .head_dim_v = 104,
                                   .window_right = 0,
                                   .lengths_q = {100, 8200, 0},
                                   .lengths_k = {100, 200, 300},
                                   .spare_tokens = 9}};
  for (const AttentionCase& shape : shapes) {
    AttentionData<bfloat16> data(shape);
    expect_equal("parts", attention::backward_parts(data.backward().problem), 2);
    check_backward<bfloat16>(shape);
  }
}
// A window so narrow that each head's blocks are visited before the next head's.
TEST(backward_blocks_first) {
  SeedsAtMost few(2);
  Multiprocessors two(2);
  for (const int64_t dim : {64, 128}) {
    const AttentionCase shape{.queries = 900,
                              .keys = 930,
                              .heads = 3,
                              .key_heads = 1,
                              .head_dim = dim,
                              .window_left = 60,
                              .window_right = 20};
    AttentionData<bfloat16> data(shape);
    expect_equal("blocks first", attention::visits_blocks_first(data.backward().problem), true);
    check_backward<bfloat16>(shape);
  }
}

RANDOM_TEST(forward_random) {
  const int64_t key_heads = random.integer(1, 2);
  AttentionCase shape{.batch = random.integer(1, 2),
                      .queries = random.size(1, 300),
                      .keys = random.size(1, 400),
                      .heads = key_heads * random.integer(1, 2),
                      .key_heads = key_heads,
                      .head_dim = 8 * random.integer(1, random.coin() ? 16 : 32),
                      .head_dim_v = 8 * random.integer(1, random.coin() ? 16 : 32)};
  if (random.coin()) shape.window_right = random.size(0, 200);
  if (random.coin()) shape.window_left = random.size(0, 200);
  shape.bottom_right = random.coin();
  shape.heads_first = random.coin();
  shape.sink = random.coin();
  sim::options().seed = static_cast<uint64_t>(random.integer(0, 7));
  sim::options().properties.multiprocessors = static_cast<int>(random.integer(1, 3));
  AttentionData<bfloat16> data(shape, random.bits() % 1000);
  data.solve(false);
  expect_ok(run_forward(data));
  expect_close("out", data.out.data, data.want_out, output_tolerance<bfloat16>());
  expect_close("lse", data.lse, data.want_lse, kLseTolerance);
  sim::options().seed = 0;
  sim::options().properties.multiprocessors = 132;
}

RANDOM_TEST(backward_random) {
  const int64_t key_heads = random.integer(1, 2);
  AttentionCase shape{.batch = random.integer(1, 2),
                      .queries = random.size(1, 300),
                      .keys = random.size(1, 400),
                      .heads = key_heads * random.integer(1, 2),
                      .key_heads = key_heads,
                      .head_dim = 8 * random.integer(1, 16),
                      .head_dim_v = 8 * random.integer(1, 16)};
  if (random.coin()) shape.window_right = random.size(0, 200);
  if (random.coin()) shape.window_left = random.size(0, 200);
  shape.bottom_right = random.coin();
  shape.heads_first = random.coin();
  sim::options().seed = static_cast<uint64_t>(random.integer(0, 7));
  sim::options().properties.multiprocessors = static_cast<int>(random.integer(1, 3));
  AttentionData<bfloat16> data(shape, random.bits() % 1000);
  solve_gradients(data);
  expect_ok(run_backward(data));
  compare_gradients(data);
  sim::options().seed = 0;
  sim::options().properties.multiprocessors = 132;
}

void expect_each_tile_once(const attention::Sections& sections) {
  std::vector<int> visits(static_cast<size_t>(sections.heads * sections.row_tiles));
  for (int n = 0; n < sections.heads * sections.row_tiles; ++n) {
    const attention::SectionTile at = attention::section_tile(sections, n);
    expect(at.head >= 0 && at.head < sections.heads && at.row_tile >= 0 && at.row_tile < sections.row_tiles,
           "a tile of no head");
    ++visits[static_cast<size_t>(at.head * sections.row_tiles + at.row_tile)];
  }
  for (const int times : visits) expect_equal("visits of a tile", times, 1);
}
RANDOM_TEST(sections_have_each_tile_once) {
  const int group = static_cast<int>(random.integer(1, 4)), key_heads = static_cast<int>(random.integer(1, 60));
  attention::Sections sections{};
  sections.heads = group * key_heads;
  sections.row_tiles = static_cast<int>(random.integer(1, 9));
  sections.heads_first = random.coin();
  sections.descending = random.coin();
  const attention::SectionHeads chosen = attention::forward_sections(sections.heads, random.integer(0, 80), group);
  sections.together = chosen.together;
  sections.joined = chosen.joined;
  expect_each_tile_once(sections);
  sections.joined = 0;  // the backward's: the last section may be smaller
  sections.together = static_cast<int>(random.integer(1, 80));
  expect_each_tile_once(sections);
}
// The kernels of a call are chosen once: a launch asks neither for its kernels nor for its workspace again.
TEST(a_launch_follows_its_plan) {
  NEEDS_SM90_CODE;
  AttentionData<bfloat16> data({.queries = 70, .keys = 90, .head_dim = 64, .window_right = 0});
  AttentionFwdParams f = data.forward();
  AttentionBwdParams b = data.backward();
  AttentionForwardPlan forward, forward_elsewhere;
  AttentionBackwardPlan backward, backward_elsewhere;
  expect_ok(attention_forward_plan_cuda(f, forward));
  expect_ok(attention_backward_plan_cuda(b, backward));
  solve_gradients(data);
  data.poison_outputs();
  data.poison_gradients();
  attention_portable_alone(true);
  const Status planned_elsewhere = attention_forward_plan_cuda(f, forward_elsewhere);
  use_workspace(data, f, forward);
  const Status ran_forward = attention_forward_cuda(f, forward, nullptr);
  const Status backward_planned_elsewhere = attention_backward_plan_cuda(b, backward_elsewhere);
  use_workspace(data, b, backward);
  const Status ran_backward = attention_backward_cuda(b, backward, nullptr);
  attention_portable_alone(false);
  for (const Status& s : {planned_elsewhere, ran_forward, backward_planned_elsewhere, ran_backward}) expect_ok(s);
  expect(forward.hopper.supported && backward.hopper.supported, "Hopper kernels");
  expect(!forward_elsewhere.hopper.supported && !backward_elsewhere.hopper.supported, "portable kernels");
  expect(backward.workspace_bytes != backward_elsewhere.workspace_bytes, "a workspace of another size");
  expect_close("out", data.out.data, data.want_out, output_tolerance<bfloat16>());
  compare_gradients(data);
}
TEST(a_forward_has_small_sections_and_a_large_last_one) {
  const auto check = [](attention::SectionHeads s, int together, int joined) {
    expect_equal("heads together", s.together, together);
    expect_equal("joined heads", s.joined, joined);
  };
  check(attention::forward_sections(256, 64, 1), 8, 64);     // 16 sequences of 1,024 x 16 heads of 128
  check(attention::forward_sections(768, 128, 1), 16, 128);  // 64 sequences of 1,024 x 12 heads of 64
  check(attention::forward_sections(100, 64, 1), 8, 68);
  check(attention::forward_sections(64, 8, 8), 8, 64);  // one section
  check(attention::forward_sections(16, 0, 1), 1, 1);
}

TEST(code_below_sm90_is_refused) {
  on_machine(132, 80, [] {
    AttentionData<bfloat16> data({.queries = 64, .keys = 64, .head_dim = 64});
    expect_refused(on_hopper(data.forward()), "runs no code of sm_90a");
    expect_refused(on_hopper(data.backward()), "runs no code of sm_90a");
  });
}

}  // namespace
}  // namespace warpsmith::test
