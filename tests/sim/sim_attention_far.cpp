// Logits of any finite size: every kernel of attention, forward and backward, where lse in float cannot hold the
// logarithm of a sum. Logits of a row are equal, or so far below the others that their weights are 0: the oracle then
// needs no law of rounding, and results are compared as tightly as those of small logits.
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

template <class T> constexpr double kStep = std::is_same_v<T, bfloat16>  ? 0x1p-8
                                            : std::is_same_v<T, float16> ? 0x1p-11
                                                                         : 0x1p-19;
template <class T> constexpr float kMost = std::is_same_v<T, float16> ? 65504.0f
                                           : std::is_same_v<T, float> ? 3.4028235e38f
                                                                      : 3.3895314e38f;

template <class E> void fill(Buffer<E>& x, E value) {
  for (size_t i = 0; i < x.size(); ++i) x[i] = value;
}
// Within some steps of T, relative to the largest element.
template <class Got> void expect_near(const char* name, const Got& got, const std::vector<double>& want, double steps) {
  double largest = 0;
  for (const double x : want) largest = std::max(largest, std::fabs(x));
  expect_close(name, got, want, {.ulps = 0, .relative = 0, .absolute = steps * largest + 1e-30});
}

template <class T> void check(AttentionData<T>& data) {
  data.solve(true);
  under_every_seed([&] {
    data.poison_outputs();
    expect_ok(run_forward(data));
    expect_near("out", data.out.data, data.want_out, 4 * kStep<T>);
    expect_close("lse", data.lse, data.want_lse, kLseTolerance);
    same_bits_for_every_seed("lse_rest", data.lse_rest);
    data.poison_gradients();
    expect_ok(run_backward(data));
    expect_near("dq", data.dq.data, data.want_dq, 24 * kStep<T>);
    expect_near("dk", data.dk.data, data.want_dk, 24 * kStep<T>);
    expect_near("dv", data.dv.data, data.want_dv, 8 * kStep<T>);
    if (!data.shape.bias.empty() && data.shape.bias_is_float)
      expect_near("dbias", data.dbias, data.want_dbias, 24 * kStep<T>);
    else if (!data.shape.bias.empty())
      expect_near("dbias", data.narrow_dbias, data.want_dbias, 24 * kStep<T>);
    if (data.shape.sink) expect_near("dsink", data.dsink, data.want_dsink, 24 * kStep<T>);
  });
}

// A bias of `size`, times 1 or, for every third key, 2: those keys have no weight, or all of it.
template <class T> void check_bias(AttentionCase shape, float size, bool two_sizes) {
  AttentionData<T> data(shape);
  fill(data.q.data, T{});
  const auto keys = static_cast<size_t>(data.bias_shape.strides.k == 0 ? 1 : data.length_k);
  for (size_t i = 0; i < data.bias.size(); ++i) {
    const float x = two_sizes && i % keys % 3 == 0 ? size / 2 : size;
    data.narrow_bias[i] = from_float<T>(x);
    data.bias[i] = shape.bias_is_float ? x : static_cast<float>(to_float(data.narrow_bias[i]));
  }
  fill(data.sink, static_cast<float>(to_float(from_float<T>(size))));
  check(data);
}
// Products of `size`, of both signs in `signs`. softmax_scale is 2^-3.
template <class T> void check_products(AttentionCase shape, int exponent, float sign, bool two_signs) {
  shape.softmax_scale = 0.125;
  AttentionData<T> data(shape);
  // size = 2^exponent = dim * x * y / 8, exact in T
  const int dims = static_cast<int>(std::lround(std::log2(static_cast<double>(shape.head_dim))));
  const int of_q = (exponent + 3 - dims) / 2, of_k = exponent + 3 - dims - of_q;
  fill(data.q.data, from_float<T>(std::ldexp(1.0f, of_q)));
  for (int64_t b = 0; b < data.batch_memory; ++b)
    for (int64_t j = 0; j < data.length_k; ++j)
      for (int64_t h = 0; h < shape.key_heads; ++h)
        for (int64_t d = 0; d < shape.head_dim; ++d)
          data.k.data[data.k.at(b, j, h, d)] = from_float<T>(std::ldexp(two_signs && j % 3 == 0 ? -sign : sign, of_k));
  fill(data.sink, std::ldexp(sign, exponent));
  // dq is a sum of ds * k over equal k, which cancels: without meaning at this size.
  data.solve(true);
  under_every_seed([&] {
    data.poison_outputs();
    expect_ok(run_forward(data));
    expect_near("out", data.out.data, data.want_out, 4 * kStep<T>);
    expect_close("lse", data.lse, data.want_lse, kLseTolerance);
    data.poison_gradients();
    expect_ok(run_backward(data));
    expect_near("dk", data.dk.data, data.want_dk, 24 * kStep<T>);
    expect_near("dv", data.dv.data, data.want_dv, 8 * kStep<T>);
    if (shape.sink) expect_near("dsink", data.dsink, data.want_dsink, 24 * kStep<T>);
  });
}

template <class T> void check_sizes_of_a_bias(AttentionCase shape) {
  for (const float size : {2e3f, 6e4f, 1e8f, kMost<T>})
    for (const float sign : {-1.0f, 1.0f})
      if (size <= kMost<T>) check_bias<T>(shape, sign * size, size == 1e8f || size == 2e3f);
}
template <class T> void check_sizes_of_products(const AttentionCase& shape) {
  for (const int exponent : {11, 20, 27, 123})
    for (const float sign : {-1.0f, 1.0f})
      if (!std::is_same_v<T, float16> || exponent <= 27) check_products<T>(shape, exponent, sign, exponent % 2 == 0);
}

TEST(bias) {
  SeedsAtMost few(1);
  Multiprocessors two(2);
  for (const int64_t dim : {64, 128}) {
    const AttentionCase shape{
        .queries = 70, .keys = 140, .heads = 2, .key_heads = 1, .head_dim = dim, .window_right = 0, .bias = "0101"};
    check_sizes_of_a_bias<bfloat16>(shape);
    check_sizes_of_a_bias<float16>(shape);
  }
}
TEST(bias_of_all_queries_beside_a_sink) {
  SeedsAtMost few(2);
  Multiprocessors two(2);
  AttentionCase shape{
      .queries = 70, .keys = 150, .heads = 1, .key_heads = 1, .head_dim = 64, .sink = true, .bias = "0001"};
  check_sizes_of_a_bias<bfloat16>(shape);
  shape.bias_is_float = true;
  check_sizes_of_a_bias<bfloat16>(shape);
  check_sizes_of_a_bias<float>(shape);
}
TEST(bias_of_each_pair) {
  SeedsAtMost few(2);
  Multiprocessors two(2);
  const AttentionCase shape{
      .batch = 2, .queries = 136, .keys = 136, .heads = 1, .key_heads = 1, .head_dim = 64, .bias = "0011"};
  check_sizes_of_a_bias<bfloat16>(shape);
  check_sizes_of_a_bias<float>(shape);
}
TEST(products) {
  SeedsAtMost few(1);
  Multiprocessors two(2);
  for (const int64_t dim : {64, 128, 256}) {
    const AttentionCase shape{
        .queries = 70, .keys = 140, .heads = 2, .key_heads = 1, .head_dim = dim, .window_right = 0};
    check_sizes_of_products<bfloat16>(shape);
    check_sizes_of_products<float16>(shape);
  }
}
TEST(products_of_packed_sequences_beside_a_sink) {
  SeedsAtMost few(2);
  Multiprocessors two(2);
  const AttentionCase shape{.heads = 2,
                            .key_heads = 1,
                            .head_dim = 64,
                            .sink = true,
                            .lengths_q = {70, 0, 130, 1},
                            .lengths_k = {150, 5, 130, 0},
                            .spare_tokens = 5};
  check_sizes_of_products<bfloat16>(shape);
}
TEST(products_of_floats) {
  SeedsAtMost few(1);
  Multiprocessors two(2);
  check_sizes_of_products<float>(
      {.queries = 70, .keys = 100, .heads = 2, .key_heads = 1, .head_dim = 32, .window_right = 0});
}
TEST(products_under_dropout) {
  SeedsAtMost few(1);
  Multiprocessors two(2);
  for (const int64_t dim : {64, 128})
    check_sizes_of_products<bfloat16>(
        {.queries = 70, .keys = 150, .heads = 1, .key_heads = 1, .head_dim = dim, .dropout = 0.3});
}
TEST(products_under_a_mask_and_alibi) {
  SeedsAtMost few(1);
  Multiprocessors two(2);
  check_sizes_of_products<bfloat16>(
      {.queries = 70, .keys = 150, .heads = 1, .key_heads = 1, .head_dim = 64, .mask = "0011"});
}

}  // namespace
}  // namespace warpsmith::test
