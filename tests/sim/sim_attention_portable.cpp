// The portable kernels of attention on the host: every option against double precision under every schedule.
// links: csrc/kernels/attention/portable/portable_bfloat16.cu
// links: csrc/kernels/attention/portable/portable_float16.cu
// links: csrc/kernels/attention/portable/portable_float32.cu
#include "kernels/attention/portable/portable_product.cuh"

#include "attention_portable_runs.h"
#include "device/launch.h"

namespace warpsmith::test {
namespace {

TEST(full) {
  check<bfloat16>({.batch = 2, .queries = 100, .keys = 150, .heads = 2, .key_heads = 1});
  check<float16>({.queries = 100, .keys = 150, .head_dim = 128});
}
TEST(float32) {
  SeedsAtMost few(2);
  check<float>({.queries = 70, .keys = 90, .heads = 2, .key_heads = 1});
  check<float>({.queries = 40, .keys = 50, .head_dim = 128, .window_right = 0, .softcap = 2});
  check<float>({.queries = 40, .keys = 30, .head_dim = 256, .window_left = 9, .dropout = 0.3});
}
// x = p * b over all steps by a warp: p[step][column / 8][4][lane] as accumulators lie, b[step][column][width].
template <int kColumns, int kWidth> __global__ void products(const float* p, const float* b, float* x, int steps) {
  constexpr int kStride = attention::kSharedStride<float, kWidth>;
  WARPSMITH_SHARED(float, rows, kColumns* kStride);
  const auto lane = static_cast<int>(threadIdx.x);
  attention::Accumulators<kWidth> sum[1] = {};
  for (int step = 0; step < steps; ++step) {
    for (int i = lane; i < kColumns * kWidth; i += 32)
      rows[i / kWidth * kStride + i % kWidth] = b[step * kColumns * kWidth + i];
    __syncwarp(0xffffffffu);
    attention::Accumulators<kColumns> factors[1];
    for (int n = 0; n < kColumns / 8; ++n)
      for (int e = 0; e < 4; ++e) factors[0][n][e] = p[((step * kColumns / 8 + n) * 4 + e) * 32 + lane];
    attention::add_product<float, kWidth, kColumns, kWidth, 1>(sum, factors, rows, lane);
    __syncwarp(0xffffffffu);
  }
  for (int n = 0; n < kWidth / 8; ++n)
    for (int e = 0; e < 4; ++e) x[(lane / 4 + e / 2 * 8) * kWidth + n * 8 + lane % 4 * 2 + e % 2] = sum[0][n][e];
}

// A step's sum is made by itself and then added, so that errors are those of chains of columns + steps additions. In
// one chain of all columns they would be four times as large: dk of 260 queries missed twice plain torch's.
template <int kColumns, int kWidth> void check_products() {
  constexpr int kSteps = 3200 / kColumns;
  Buffer<float> p(16 * 3200), b(3200 * kWidth), x(16 * kWidth);
  fill_normal(p, 1, 1.0f);
  fill_normal(b, 2, 1.0f);
  expect_ok(launch(products<kColumns, kWidth>, {.block = 32}, nullptr, p.data(), b.data(), x.data(), kSteps));
  double errors = 0;
  for (size_t row = 0; row < 16; ++row)
    for (size_t column = 0; column < kWidth; ++column) {
      double sum = 0, squares = 0;
      for (size_t k = 0; k < 3200; ++k) {
        const size_t lane = row % 8 * 4 + k % 8 / 2, e = row / 8 * 2 + k % 2;
        const double term =
            static_cast<double>(p[(k / 8 * 4 + e) * 32 + lane]) * static_cast<double>(b[k * kWidth + column]);
        sum += term;
        squares += term * term;
      }
      // One more rounding of each term: of the product, where the compiler does not contract it.
      const double variance = additions(kColumns + kSteps, squares, 0) + square(kHalfStep<float>) * squares / 3;
      errors += square(static_cast<double>(x[row * kWidth + column]) - sum) / variance;
    }
  expect(errors <= 16 * kWidth,
         "errors are " + std::to_string(std::sqrt(errors / (16 * kWidth))) + " standard deviations in the mean square");
}
TEST(float32_sums_of_many_steps) {
  SeedsAtMost few(1);
  check_products<32, 64>();
  check_products<16, 128>();
}
TEST(wide_and_odd_head_dims) {
  SeedsAtMost few(2);
  check<bfloat16>({.queries = 70, .keys = 90, .head_dim = 256, .window_right = 0});
  check<float16>({.queries = 70, .keys = 40, .head_dim = 8, .head_dim_v = 200});
  check<bfloat16>({.queries = 70, .keys = 70, .heads = 3, .key_heads = 1, .head_dim = 72, .head_dim_v = 104});
  check<bfloat16>({.queries = 33, .keys = 31, .head_dim = 40, .head_dim_v = 16});
}
// Several tiles of keys add to the dq of each block of queries. The second time on a GPU whose blocks have 99 KiB.
TEST(gradients_in_turns) {
  SeedsAtMost few(2);
  const int limit = sim::options().properties.max_dynamic_shared_bytes;
  for (const int most : {limit, attention::kPortableSharedBytes}) {
    sim::options().properties.max_dynamic_shared_bytes = most;
    check<bfloat16>(
        {.queries = 80, .keys = 270, .heads = 2, .key_heads = 1, .head_dim = 16, .window_right = 0, .sink = true});
    check<float16>({.queries = 150, .keys = 200, .head_dim = 72, .window_left = 60, .window_right = 10});
    check<bfloat16>({.queries = 20, .keys = 70, .head_dim = 256, .head_dim_v = 136});
  }
  check<bfloat16>({.heads = 2,
                   .key_heads = 1,
                   .head_dim = 72,
                   .window_right = 0,
                   .lengths_q = {70, 20, 30, 0},
                   .lengths_k = {130, 70, 0, 40},
                   .spare_tokens = 10});
  sim::options().properties.max_dynamic_shared_bytes = limit;
}
TEST(causal_and_windows) {
  SeedsAtMost few(2);
  for (const bool bottom_right : {false, true})
    for (const auto& [queries, keys] : {std::pair{150, 60}, {60, 150}, {1, 90}, {90, 1}})
      for (const auto& [left, right] : {std::pair{-1, 0}, {20, 0}, {30, 15}, {70, -1}})
        check<bfloat16>({.queries = queries,
                         .keys = keys,
                         .head_dim = 16,
                         .window_left = left,
                         .window_right = right,
                         .bottom_right = bottom_right});
}
TEST(softcap_sink_and_scale) {
  SeedsAtMost few(2);
  check<bfloat16>({.queries = 90, .keys = 70, .heads = 2, .window_right = 0, .softcap = 1.5, .sink = true});
  check<float16>({.queries = 90, .keys = 70, .softcap = 0.5, .sink = true, .softmax_scale = -0.2, .narrow_sink = true});
  check<bfloat16>({.queries = 90, .keys = 30, .window_right = 0, .sink = true, .narrow_sink = true});
}
// Most rows have a weight near 1: what is left of dP - delta is smaller than the rounding of out, times k of many
// logits.
template <class T> void check_saturated(int64_t dim) {
  check<T>({.queries = 70, .keys = 90, .heads = 2, .key_heads = 1, .head_dim = dim, .softmax_scale = 4});
  check<T>({.queries = 40,
            .keys = 50,
            .head_dim = dim,
            .window_right = 0,
            .softcap = 30,
            .sink = true,
            .softmax_scale = 4,
            .bias = "0011",
            .dropout = 0.3});
}
TEST(saturated_softmax) {
  SeedsAtMost few(2);
  check_saturated<bfloat16>(64);
  check_saturated<float16>(128);
  check_saturated<float>(64);
}
TEST(alibi) {
  SeedsAtMost few(2);
  check<bfloat16>({.batch = 2, .queries = 70, .keys = 90, .heads = 2, .key_heads = 2, .alibi = 1});
  check<bfloat16>({.batch = 2, .queries = 90, .keys = 70, .heads = 2, .window_right = 0, .alibi = 2});
}
TEST(bias_of_every_shape) {
  SeedsAtMost few(2);
  for (const char* kept : {"1111", "0111", "1011", "0101", "1001", "0110", "0000", "1110"})
    for (const bool is_float : {false, true})
      check<bfloat16>({.batch = 2,
                       .queries = 70,
                       .keys = 50,
                       .heads = 2,
                       .key_heads = 1,
                       .head_dim = 16,
                       .bias = kept,
                       .bias_is_float = is_float});
}
TEST(masks) {
  SeedsAtMost few(2);
  for (const char* kept : {"1111", "1001", "0010", "0000"})
    check<float16>({.batch = 2, .queries = 70, .keys = 50, .heads = 2, .head_dim = 16, .mask = kept});
}
TEST(dropout) {
  check<bfloat16>({.batch = 2, .queries = 70, .keys = 90, .heads = 4, .key_heads = 2, .dropout = 0.4});
  SeedsAtMost few(2);
  check<float16>({.queries = 40, .keys = 50, .head_dim = 256, .sink = true, .bias = "0011", .dropout = 0.2});
}
TEST(dropout_of_a_part) {
  SeedsAtMost few(2);
  AttentionCase part{.batch = 2, .queries = 70, .keys = 90, .heads = 2, .key_heads = 1, .dropout = 0.4};
  part.place = part_of_a_whole(part);
  check<bfloat16>(part);
}
TEST(packed) {
  check<bfloat16>({.heads = 2,
                   .key_heads = 1,
                   .window_right = 0,
                   .lengths_q = {70, 0, 3, 100, 64},
                   .lengths_k = {70, 10, 7, 130, 0},
                   .spare_tokens = 5});
  SeedsAtMost few(2);
  check<float16>({.heads = 2,
                  .key_heads = 1,
                  .head_dim = 40,
                  .window_left = 30,
                  .softcap = 3,
                  .sink = true,
                  .lengths_q = {33, 1, 90},
                  .lengths_k = {20, 40, 70},
                  .spare_tokens = 70,
                  .bias = "0111",
                  .mask = "1001",
                  .alibi = 2,
                  .dropout = 0.1});
}

template <class T> void random_case(Random& random) {
  const int64_t key_heads = random.integer(1, 2);
  AttentionCase shape{.batch = random.integer(1, 2),
                      .queries = random.size(0, 140),
                      .keys = random.size(0, 140),
                      .heads = key_heads * random.integer(1, 3),
                      .key_heads = key_heads,
                      .head_dim = 8 * random.size(1, 32),
                      .head_dim_v = 8 * random.size(1, 32)};
  if (random.coin()) shape.window_right = random.size(0, 100);
  if (random.coin()) shape.window_left = random.size(0, 100);
  shape.bottom_right = random.coin();
  shape.heads_first = random.coin();
  if (random.coin()) shape.softcap = 1.5;
  shape.sink = random.coin();
  shape.narrow_sink = random.coin();
  shape.alibi = static_cast<int>(random.integer(0, 2));
  if (random.coin()) shape.dropout = 0.3;
  if (random.coin()) shape.place = part_of_a_whole(shape);
  const auto kept = [&] {
    std::string dimensions;
    for (int i = 0; i < 4; ++i) dimensions += random.coin() ? '1' : '0';
    return dimensions;
  };
  if (random.coin()) shape.bias = kept();
  shape.bias_is_float = random.coin();
  if (random.coin()) shape.mask = kept();
  if (random.coin()) {
    for (int64_t i = random.integer(1, 3); i > 0; --i) {
      shape.lengths_q.push_back(random.size(0, 90));
      shape.lengths_k.push_back(random.size(0, 90));
    }
    shape.spare_tokens = random.size(0, 70);
    shape.heads_first = false;
  }
  sim::options().seed = static_cast<uint64_t>(random.integer(0, 7));
  AttentionData<T> data(shape, random.bits() % 1000);
  solve_gradients(data);
  run_forward(data);
  run_backward(data);
  sim::options().seed = 0;
}
RANDOM_TEST(random_bfloat16) { random_case<bfloat16>(random); }
RANDOM_TEST(random_float16) { random_case<float16>(random); }
RANDOM_TEST(random_float32) { random_case<float>(random); }

}  // namespace
}  // namespace warpsmith::test
