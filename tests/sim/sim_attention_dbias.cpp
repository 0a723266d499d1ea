// Padding masks and the gradient of a bias in the Hopper kernels of attention on the host, against double precision.
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

// Blocks that a mask leaves whole, hides in part (one key of a pair too), and hides as a whole.
TEST(padding_masks) {
  NEEDS_SM90_CODE;
  SeedsAtMost few(1);
  Multiprocessors two(2);
  for (const int64_t dim : {64, 128}) {
    const AttentionCase shape{.batch = 3, .queries = 130, .keys = 420, .head_dim = dim, .mask = "1001"};
    AttentionData<bfloat16> data(shape);
    const int64_t ends[] = {420, 255, 96};
    for (int64_t b = 0; b < 3; ++b)
      for (int64_t j = 0; j < 420; ++j) data.mask[data.mask_shape.at(b, 0, 0, j)] = j < ends[b];
    check_biased_forward(data);
    check_biased_backward(data);
  }
}

// dbias by its Hopper kernel: everything that a bias may be broadcast to, tails of tiles, ALiBi beside it.
TEST(bias_gradient) {
  NEEDS_SM90_CODE;
  Multiprocessors two(2);
  SeedsAtMost few(2);
  for (const std::string kept : {"1111", "0111", "1011", "0011"}) {
    AttentionData<bfloat16> data({.batch = 2,
                                  .queries = 140,
                                  .keys = 200,
                                  .heads = 2,
                                  .key_heads = 1,
                                  .head_dim = kept[1] == '1' ? 128 : 40,
                                  .window_right = kept[0] == '1' ? -1 : 0,
                                  .bias = kept,
                                  .alibi = kept == "1011" ? 1 : 0});
    expect(hopper_plan(data.backward()).hopper_dbias, "dbias has a Hopper kernel");
    check_biased_backward(data);
  }
}
TEST(bias_gradient_in_a_window) {
  NEEDS_SM90_CODE;
  Multiprocessors two(2);
  SeedsAtMost few(1);
  for (const int64_t dim : {64, 128}) {
    AttentionData<float16> data({.queries = 300,
                                 .keys = 400,
                                 .heads = 2,
                                 .key_heads = 2,
                                 .head_dim = dim,
                                 .window_left = 50,
                                 .window_right = 20,
                                 .bias = "0011"});
    expect(hopper_plan(data.backward()).hopper_dbias, "dbias has a Hopper kernel");
    check_biased_backward(data);
  }
}
// What a bias holds beyond the end of a sequence does not count, and its gradient there is 0.
TEST(bias_gradient_of_packed_sequences) {
  NEEDS_SM90_CODE;
  Multiprocessors two(2);
  SeedsAtMost few(2);
  for (const std::string kept : {"1011", "0111"}) {
    AttentionData<bfloat16> data({.heads = 2,
                                  .key_heads = 1,
                                  .head_dim = kept == "1011" ? 128 : 64,
                                  .window_right = kept == "1011" ? 0 : -1,
                                  .lengths_q = {150, 0, 3, 131},
                                  .lengths_k = {150, 10, 7, 208},
                                  .spare_tokens = 5,
                                  .bias = kept});
    if (kept == "1011")
      for (int64_t b = 0; b < 4; ++b)
        for (int64_t i = 0; i < 150; ++i)
          for (int64_t j = 0; j < 208; ++j) {
            if (i < data.shape.lengths_q[static_cast<size_t>(b)] && j < data.shape.lengths_k[static_cast<size_t>(b)])
              continue;
            const size_t at = data.bias_shape.at(b, 0, i, j);
            data.bias[at] = std::nanf("");
            data.narrow_bias[at] = from_float<bfloat16>(data.bias[at]);
          }
    expect(hopper_plan(data.backward()).hopper_dbias, "dbias has a Hopper kernel");
    check_biased_backward(data);
  }
}
TEST(bias_gradients_that_the_portable_kernel_makes) {
  NEEDS_SM90_CODE;
  const auto on_hopper = [](const AttentionCase& shape) {
    AttentionData<bfloat16> data(shape);
    return hopper_plan(data.backward()).hopper_dbias;
  };
  expect(on_hopper({.queries = 64, .keys = 64, .bias = "0011"}), "rows in pieces of 16 bytes");
  expect(!on_hopper({.queries = 64, .keys = 68, .bias = "0011"}), "a row of 136 bytes");
  expect(!on_hopper({.queries = 64, .keys = 64, .bias = "0001"}), "broadcast over queries");
  expect(!on_hopper({.queries = 64, .keys = 64, .head_dim = 136, .bias = "0011"}), "a head dimension above 128");
  AttentionData<bfloat16> data({.queries = 64, .keys = 64, .bias = "0011"});
  AttentionBwdParams p = data.backward();
  p.dbias = data.narrow_dbias.data() + 2;
  expect(!hopper_plan(p).hopper_dbias, "an address that is no multiple of 16 bytes");
}

TEST(code_below_sm90_has_no_kernel) {
  on_machine(132, 80, [] {
    AttentionData<bfloat16> data({.queries = 64, .keys = 64, .bias = "0011"});
    expect(!hopper_plan(data.backward()).hopper_dbias, "code of sm_80");
  });
}

}  // namespace
}  // namespace warpsmith::test
