// A backward whose lse and out are those of a softmax over more keys than its own, as a block of a ring has them:
// 16-bit problems without softcap, biases, masks and dropout, whose kernels take delta from out as it is.
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

// The sink of the oracle stands for the keys elsewhere; the kernel is not told of it.
template <class T> void check(AttentionCase shape) {
  SeedsAtMost few(2);
  shape.sink = true;
  AttentionData<T> data(shape);
  solve_gradients(data);
  expect_equal("delta is taken from out", data.delta_of_rounded_out, true);
  // The values elsewhere add about 1 to each element of out. dlse takes off what that adds to delta, so that the
  // gradients stay the oracle's.
  for (int64_t b = 0; b < data.batch_memory; ++b)
    for (int64_t h = 0; h < shape.heads; ++h)
      for (int64_t i = 0; i < data.length_q; ++i) {
        double more = 0;
        for (int64_t d = 0; d < shape.dim_v(); ++d) {
          const size_t e = data.out.at(b, i, h, d);
          const float before = to_float(data.out.data[e]);
          data.out.data[e] = from_float<T>(before + 1.0f);
          more += static_cast<double>(to_float(data.dout.data[e])) *
                  static_cast<double>(to_float(data.out.data[e]) - before);
        }
        data.dlse[static_cast<size_t>((b * shape.heads + h) * data.length_q + i)] += static_cast<float>(more);
      }
  AttentionBwdParams p = data.backward();
  p.problem.sink = nullptr, p.dsink = nullptr;
  under_every_seed([&] {
    data.poison_gradients();
    expect_ok(run_backward(data, p));
    expect_within("dq", data.dq.data, data.want_dq, data.of_dq);
    expect_within("dk", data.dk.data, data.want_dk, data.of_dk);
    expect_within("dv", data.dv.data, data.want_dv, data.of_dv);
  });
}

TEST(heads_to_128) {
  for (const int64_t dim : {64, 128}) {
    check<bfloat16>({.batch = 2, .queries = 150, .keys = 200, .heads = 2, .key_heads = 1, .head_dim = dim});
    check<float16>({.queries = 200, .keys = 200, .head_dim = dim, .window_right = 0});
  }
  check<bfloat16>({.queries = 100, .keys = 150, .head_dim = 72, .head_dim_v = 40});
}
// Some queries see keys elsewhere alone.
TEST(windows) {
  for (const int64_t left : {20, 100})
    check<bfloat16>({.queries = 200, .keys = 120, .head_dim = 64, .window_left = left, .window_right = 0});
}
TEST(packed) {
  check<bfloat16>({.heads = 2,
                   .key_heads = 1,
                   .head_dim = 64,
                   .window_right = 0,
                   .lengths_q = {70, 0, 3, 90},
                   .lengths_k = {70, 10, 7, 0},
                   .spare_tokens = 5});
}

}  // namespace
}  // namespace warpsmith::test
