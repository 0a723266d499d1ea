// Bias tensors, boolean masks and ALiBi in the Hopper kernels of attention on the host, against double precision.
// links: csrc/kernels/attention/attention.cu
// links: csrc/kernels/attention/portable/attention_portable.cu
// links: csrc/kernels/attention/hopper/forward_sm90a.cu
// links: csrc/kernels/attention/hopper/backward_sm90a.cu
// links: csrc/kernels/attention/hopper/backward_wide_sm90a.cu
// links: csrc/kernels/attention/portable/portable_bfloat16.cu
// links: csrc/kernels/attention/portable/portable_float16.cu
// links: csrc/kernels/attention/portable/portable_float32.cu
#include "attention_bias_runs.h"

namespace warpsmith::test {
namespace {

TEST(forward_128) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(4);
  Multiprocessors two(2);
  for (const int64_t keys : {416, 420})  // copied 8 or 2 at once
    check_biased_forward<bfloat16>(
        {.queries = 150, .keys = keys, .heads = 2, .key_heads = 1, .head_dim = 128, .bias = "1111"});
}
TEST(forward_64) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(2);
  Multiprocessors two(2);
  check_biased_forward<bfloat16>(
      {.batch = 2, .queries = 200, .keys = 400, .heads = 2, .key_heads = 2, .window_right = 0, .bias = "0111"});
}
// Every way of broadcasting that has pairs of keys, of biases and of masks.
TEST(forward_broadcast) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(1);
  Multiprocessors two(2);
  for (const std::string kept : {"0001", "0011", "1001", "1011", "0101", "1101"})
    for (const bool mask : {false, true})
      check_biased_forward<bfloat16>({.batch = 2,
                                      .queries = 70,
                                      .keys = 270,
                                      .heads = 2,
                                      .key_heads = 1,
                                      .head_dim = mask ? 64 : 104,
                                      .bias = mask ? "" : kept,
                                      .mask = mask ? kept : ""});
}
TEST(forward_alibi) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(2);
  Multiprocessors two(2);
  for (const int64_t dim : {40, 128})
    for (const int dimensions : {1, 2})
      check_biased_forward<float16>({.batch = 2,
                                     .queries = 130,
                                     .keys = 270,
                                     .heads = 2,
                                     .key_heads = 2,
                                     .head_dim = dim,
                                     .window_right = dim == 40 ? 0 : -1,
                                     .alibi = dimensions});
}
TEST(forward_windows_and_sink) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(2);
  Multiprocessors two(2);
  for (const int64_t dim : {64, 128})
    check_biased_forward<float16>({.queries = 200,
                                   .keys = 300,
                                   .heads = 2,
                                   .key_heads = 2,
                                   .head_dim = dim,
                                   .window_left = 180,
                                   .window_right = 20,
                                   .sink = true,
                                   .bias = dim == 64 ? "0111" : "",
                                   .mask = dim == 64 ? "" : "0011",
                                   .alibi = 1});
}
// Odd lengths in tensors whose rows are even; queries beyond a sequence's last one; tokens of no sequence.
TEST(forward_packed) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(2);
  Multiprocessors two(2);
  for (const int64_t dim : {64, 128})
    check_biased_forward<bfloat16>({.heads = 2,
                                    .key_heads = 1,
                                    .head_dim = dim,
                                    .window_right = dim == 64 ? 0 : -1,
                                    .lengths_q = {150, 0, 3, 201, 64},
                                    .lengths_k = {150, 10, 7, 301, 302},
                                    .spare_tokens = 5,
                                    .bias = dim == 64 ? "1111" : "",
                                    .mask = dim == 64 ? "" : "1011",
                                    .alibi = 2});
}
// Rows that see no key at all, and rows whose first keys are hidden for many blocks: a base of -inf in steps without a
// window's mask.
TEST(forward_hidden_rows) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(2);
  Multiprocessors one(1);
  for (const int64_t dim : {64, 128})
    for (const bool by_bias : {false, true}) {
      const AttentionCase shape{
          .queries = 130, .keys = 700, .head_dim = dim, .bias = by_bias ? "0011" : "", .mask = by_bias ? "" : "0011"};
      AttentionData<bfloat16> data(shape);
      for (int64_t i = 0; i < shape.queries; ++i)
        for (int64_t j = 0; j < shape.keys; ++j) {
          const bool seen = i % 5 != 0 && j < 20 * (i % 35);
          if (by_bias && !seen) {
            const size_t at = data.bias_shape.at(0, 0, i, j);
            data.bias[at] = -std::numeric_limits<float>::infinity();
            data.narrow_bias[at] = from_float<bfloat16>(data.bias[at]);
          } else if (!by_bias) {
            data.mask[data.mask_shape.at(0, 0, i, j)] = seen;
          }
        }
      check_biased_forward(data);
    }
}
// Whatever q and k hold there, keys that the mask hides do not count: their scores are NaN and infinite.
TEST(forward_hidden_scores_are_not_read) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(1);
  Multiprocessors one(1);
  const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
  const AttentionCase shape{.queries = 70, .keys = 300, .mask = "0001"};
  AttentionData<bfloat16> data(shape);
  const auto hidden = [](int64_t j) { return j % 7 == 3; };
  for (int64_t j = 0; j < shape.keys; ++j) data.mask[data.mask_shape.at(0, 0, 0, j)] = !hidden(j);
  data.solve(true);
  for (int64_t j = 0; j < shape.keys; ++j) {
    if (!hidden(j)) continue;
    for (int64_t d = 0; d < shape.head_dim; ++d)
      data.k.data[data.k.at(0, j, 0, d)] = from_float<bfloat16>(j % 2 != 0 ? nan : infinity);
  }
  data.poison_outputs();
  expect_ok(run_forward(data));
  expect_within("out", data.out.data, data.want_out, data.of_out);
  expect_close("lse", data.lse, data.want_lse, kLseTolerance);
}
// Biases that grow from block to block: the base must follow.
TEST(forward_maxima_outgrow_the_base) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(1);
  Multiprocessors one(1);
  AttentionData<float16> data({.queries = 70, .keys = 700, .head_dim = 128, .bias = "0001"});
  for (int64_t j = 0; j < 700; ++j) {
    data.bias[static_cast<size_t>(j)] = static_cast<float>(700 - j) / 4;
    data.narrow_bias[static_cast<size_t>(j)] = from_float<float16>(data.bias[static_cast<size_t>(j)]);
    data.bias[static_cast<size_t>(j)] = static_cast<float>(to_float(data.narrow_bias[static_cast<size_t>(j)]));
  }
  check_biased_forward(data);
}

TEST(backward_full) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(3);
  Multiprocessors two(2);
  for (const int64_t dim : {64, 128})
    check_biased_backward<bfloat16>(
        {.queries = 150, .keys = 300, .heads = 2, .key_heads = 1, .head_dim = dim, .bias = "1111"});
}
TEST(backward_causal_with_sink) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(2);
  Multiprocessors two(2);
  for (const int64_t dim : {64, 112})
    check_biased_backward<float16>({.batch = 2,
                                    .queries = 200,
                                    .keys = 200,
                                    .heads = 2,
                                    .key_heads = 2,
                                    .head_dim = dim,
                                    .window_right = 0,
                                    .sink = true,
                                    .bias = "0111"});
}
TEST(backward_broadcast) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(1);
  Multiprocessors two(2);
  for (const std::string kept : {"0001", "1011", "0101"})
    for (const bool mask : {false, true})
      check_biased_backward<bfloat16>({.batch = 2,
                                       .queries = 70,
                                       .keys = 150,
                                       .heads = 2,
                                       .key_heads = 1,
                                       .head_dim = (kept == "0101") != mask ? 128 : 40,
                                       .bias = mask ? "" : kept,
                                       .mask = mask ? kept : "",
                                       .alibi = mask ? 1 : 0});
}
TEST(backward_packed_and_windows) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(2);
  Multiprocessors two(2);
  for (const bool mask : {false, true})
    check_biased_backward<bfloat16>({.heads = 2,
                                     .key_heads = 1,
                                     .head_dim = mask ? 128 : 64,
                                     .window_left = mask ? -1 : 90,
                                     .window_right = 0,
                                     .lengths_q = {150, 0, 3, 131, 64},
                                     .lengths_k = {150, 10, 7, 201, 202},
                                     .spare_tokens = 5,
                                     .bias = mask ? "" : "1111",
                                     .mask = mask ? "1011" : "",
                                     .alibi = 2});
}
TEST(backward_alibi) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(2);
  Multiprocessors two(2);
  for (const int64_t dim : {64, 128})
    check_biased_backward<float16>({.batch = 2,
                                    .queries = 130,
                                    .keys = 200,
                                    .heads = 2,
                                    .key_heads = 1,
                                    .head_dim = dim,
                                    .window_right = dim == 64 ? 0 : -1,
                                    .alibi = dim == 64 ? 1 : 2});
}
// A window so narrow that without a bias each head's blocks would be visited before the next head's.
TEST(backward_narrow_window) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(1);
  Multiprocessors two(2);
  check_biased_backward<bfloat16>({.queries = 900,
                                   .keys = 930,
                                   .heads = 3,
                                   .key_heads = 1,
                                   .window_left = 60,
                                   .window_right = 20,
                                   .bias = "0101",
                                   .alibi = 1});
}
// Rows without a key have no gradient, and what a bias holds where a window hides it does not count.
TEST(backward_hidden_rows) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(1);
  Multiprocessors one(1);
  for (const bool by_bias : {false, true}) {
    const AttentionCase shape{.queries = 130,
                              .keys = 200,
                              .head_dim = by_bias ? 128 : 64,
                              .window_right = 0,
                              .bias = by_bias ? "0011" : "",
                              .mask = by_bias ? "" : "0011"};
    AttentionData<bfloat16> data(shape);
    for (int64_t i = 0; i < shape.queries; ++i)
      for (int64_t j = 0; j < shape.keys; ++j) {
        const bool seen = i % 5 != 0 && j < 20 * (i % 35), in_window = j <= i + shape.keys - shape.queries;
        if (by_bias && !seen) {
          const size_t at = data.bias_shape.at(0, 0, i, j);
          data.bias[at] = in_window ? -std::numeric_limits<float>::infinity() : std::nanf("");
          data.narrow_bias[at] = from_float<bfloat16>(data.bias[at]);
        } else if (!by_bias) {
          data.mask[data.mask_shape.at(0, 0, i, j)] = seen;
        }
      }
    check_biased_backward(data);
  }
}

// Rows with space between them, and batch and heads in the other order. The space holds NaN: the kernels read none of
// it.
TEST(strided_biases) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(1);
  Multiprocessors two(2);
  for (const int64_t keys : {200, 198})
    for (const int64_t space : {8, 2}) {  // 2: TMA cannot read them
      const AttentionCase shape{.batch = 2, .queries = 150, .keys = keys, .heads = 2, .key_heads = 1, .bias = "1111"};
      AttentionData<bfloat16> data(shape);
      solve_gradients(data);
      const int64_t row = (keys + 7) / 8 * 8 + space, head = shape.queries * row * shape.batch;
      const AttentionBiasStrides strides{shape.queries * row, head, row, 1};
      Buffer<bfloat16> biases(static_cast<size_t>(head * shape.heads));
      for (size_t i = 0; i < biases.size(); ++i) biases[i] = from_float<bfloat16>(std::nanf(""));
      for (int64_t b = 0; b < shape.batch; ++b)
        for (int64_t h = 0; h < shape.heads; ++h)
          for (int64_t i = 0; i < shape.queries; ++i)
            for (int64_t j = 0; j < keys; ++j)
              biases[static_cast<size_t>(b * strides.batch + h * strides.head + i * strides.q + j)] =
                  data.narrow_bias[data.bias_shape.at(b, h, i, j)];
      const auto replace = [&](auto params) {
        params.problem.bias = biases.data();
        params.problem.bias_strides = strides;
        return params;
      };
      expect_ok(on_hopper(replace(data.forward())));
      expect_ok(on_hopper(replace(data.backward())));
      data.poison_gradients();
      expect_ok(run_backward(data, replace(data.backward())));
      compare_gradients(data);
      compare_dbias(data);
      data.poison_outputs();
      expect_ok(run_forward(data, replace(data.forward())));
      expect_within("out", data.out.data, data.want_out, data.of_out);
      expect_close("lse", data.lse, data.want_lse, kLseTolerance);
    }
}

TEST(what_the_kernels_lack_is_refused) {
  NEEDS_SM90_CODE;
  const auto refused = [](const AttentionCase& shape, const char* why) {
    AttentionData<bfloat16> data(shape);
    expect_refused(on_hopper(data.forward()), why);
  };
  refused({.queries = 64, .keys = 65, .bias = "0011"}, "a bias or mask whose keys are no aligned pairs");
  refused({.queries = 64, .keys = 64, .mask = "0010"}, "a bias or mask whose keys are no aligned pairs");
  refused({.queries = 64, .keys = 64, .bias = "0011", .bias_is_float = true}, "a float32 bias");
  refused({.queries = 64, .keys = 64, .softmax_scale = 0x1p-70, .alibi = 1}, "a softmax_scale below 2^-64");
  refused({.queries = 64, .keys = 64, .alibi = 1, .dropout = 0.1}, "dropout beside a bias");
  refused({.queries = 64, .keys = 64, .softcap = 2, .alibi = 1}, "a softcap beside a bias");
  refused({.queries = 64, .keys = 64, .bias = "0011", .mask = "0011"}, "a bias beside a mask");
  refused({.queries = 64, .keys = 64, .head_dim = 136, .alibi = 1}, "with head dimensions above 128");
  AttentionData<bfloat16> wide({.queries = 64, .keys = 64, .head_dim = 136, .alibi = 1});
  expect_refused(on_hopper(wide.backward()), "with head dimensions above 128");
  AttentionData<bfloat16> data({.queries = 64, .keys = 64, .bias = "0011"});
  AttentionFwdParams p = data.forward();
  p.problem.bias_strides.q = 33;
  expect_refused(on_hopper(p), "whose keys are no aligned pairs");
  p = data.forward();
  p.problem.bias = data.narrow_bias.data() + 1;
  expect_refused(on_hopper(p), "whose keys are no aligned pairs");
}

// Shapes, windows and options at random.
RANDOM_TEST(random_shapes) {
  NEEDS_SM90_CODE;
  const int64_t key_heads = random.integer(1, 2);
  AttentionCase shape{.batch = random.integer(1, 2),
                      .queries = random.size(1, 200),
                      .keys = random.coin() ? 2 * random.size(1, 150) : 8 * random.size(1, 40),
                      .heads = key_heads * random.integer(1, 2),
                      .key_heads = key_heads,
                      .head_dim = 8 * random.integer(1, 16)};
  if (random.integer(0, 2) == 2) {  // packed: `keys`, which is even, is the longest
    const int64_t sequences = random.integer(1, 4);
    shape.lengths_k.push_back(shape.keys);
    shape.lengths_q.push_back(random.size(0, 200));
    for (int64_t i = 1; i < sequences; ++i) {
      shape.lengths_k.push_back(random.size(0, shape.keys));
      shape.lengths_q.push_back(random.size(0, 200));
    }
    shape.lengths_q.push_back(random.size(1, 200));
    shape.lengths_k.push_back(random.size(0, shape.keys));
    shape.spare_tokens = random.size(0, 200);
  }
  if (random.coin()) shape.window_right = random.size(0, 200);
  if (random.coin()) shape.window_left = random.size(0, 200);
  const auto broadcast = [&] {
    std::string kept;
    for (int i = 0; i < 3; ++i) kept += random.coin() ? "1" : "0";
    return kept + "1";
  };
  const int64_t tensor = random.integer(0, 2);
  if (tensor == 1) shape.bias = broadcast();
  if (tensor == 2) shape.mask = broadcast();
  if (tensor == 0 || random.coin()) shape.alibi = static_cast<int>(random.integer(1, 2));
  sim::options().seed = static_cast<uint64_t>(random.integer(0, 7));
  sim::options().properties.multiprocessors = static_cast<int>(random.integer(1, 3));
  AttentionData<bfloat16> data(shape, random.bits() % 1000);
  solve_gradients(data);
  expect_ok(on_hopper(data.backward()));
  data.poison_gradients();
  expect_ok(run_backward(data));
  compare_gradients(data);
  compare_dbias(data);
  data.poison_outputs();
  expect_ok(on_hopper(data.forward()));
  expect_ok(run_forward(data));
  expect_within("out", data.out.data, data.want_out, data.of_out);
  expect_close("lse", data.lse, data.want_lse, kLseTolerance);
  sim::options().seed = 0;
  sim::options().properties.multiprocessors = 132;
}

TEST(code_below_sm90_is_refused) {
  on_machine(132, 80, [] {
    AttentionData<bfloat16> data({.queries = 64, .keys = 64, .bias = "0011"});
    expect_refused(on_hopper(data.forward()), "runs no code of sm_90a");
    expect_refused(on_hopper(data.backward()), "runs no code of sm_90a");
  });
}

}  // namespace
}  // namespace warpsmith::test
