// The attention fixture (attention_sm90_fixture.cuh) on the host: right for every shape under every schedule, with the
// bytes and FLOPs that its contract states and without bank conflicts.
#include <ctime>

#include "attention_sm90_oracle.h"

namespace warpsmith::test {
namespace {

// What a launch moves and multiplies: q, o and lse once, whole blocks of keys for the products, those inside the tensor
// for the bytes.
struct Work {
  int64_t read = 0, written = 0, flops = 0;
};
Work work_of(const AttentionCase& c) {
  constexpr int64_t kRowBytes = attention_sm90::kHeadDim * 2;
  constexpr int64_t kTileRows = attention_sm90::kTileRows, kBlockKeys = attention_sm90::kBlockKeys;
  Work work;
  const int64_t rows = int64_t{c.batch} * c.heads * c.queries;
  work.read = rows * kRowBytes;
  work.written = rows * (kRowBytes + 4);
  for (int64_t first = 0; first < c.queries; first += kTileRows) {
    const auto last = static_cast<int>(std::min<int64_t>(first + kTileRows, c.queries) - 1);
    const int64_t blocks = std::max<int64_t>(1, (c.seen(last) + kBlockKeys - 1) / kBlockKeys);
    const int64_t tiles = int64_t{c.batch} * c.heads;
    work.read += tiles * 2 * kRowBytes * std::min<int64_t>(blocks * kBlockKeys, c.keys);
    work.flops += tiles * blocks * 2 * 2 * kTileRows * kBlockKeys * attention_sm90::kHeadDim;
  }
  return work;
}

void check(AttentionData& data, const Tolerance& tolerance = kOutputTolerance) {
  data.solve();
  under_every_seed([&] {
    data.o.poison();
    data.lse.poison();
    expect_ok(data.run());
    same_bits_for_every_seed("o", data.o);
    same_bits_for_every_seed("lse", data.lse);
    expect_close("o", data.o, data.expected_o, tolerance);
    expect_close("lse", data.lse, data.expected_lse, kLseTolerance);
    const Work work = work_of(data.shape);
    expect_bytes({.read = work.read, .written = work.written});
    expect_equal("flops", sim::counters().flops, work.flops);
    expect_equal("bank conflicts", sim::counters().bank_conflicts, int64_t{0});
    expect(data.workspace[0] == 0 && data.workspace[1] == 0, "the workspace is left zero");
  });
}

void check_shape(const AttentionCase& shape, int multiprocessors = 2) {
  sim::options().properties.multiprocessors = multiprocessors;
  AttentionData data(shape, 1);
  check(data);
  sim::options().properties.multiprocessors = 132;
}

TEST(one_tile_of_four_blocks_within_two_seconds) {
  NEEDS_SM90_CODE;
  AttentionData data({1, 128, 512, 1, 1, false}, 5);
  const std::clock_t start = std::clock();
  int cycles = 0;
  expect_ok(data.run(&cycles));
  const double seconds = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
  expect(seconds < 2, "one tile takes " + std::to_string(seconds) + " s");
  expect(cycles > 0, "the consumers' life is measured");
  check(data);
}
TEST(persistent_tiles) {
  NEEDS_SM90_CODE;
  check_shape({1, 320, 384, 2, 1, false}, 1);
}
TEST(causal) {
  NEEDS_SM90_CODE;
  check_shape({1, 300, 300, 2, 2, true});
}
TEST(causal_with_more_keys) {
  NEEDS_SM90_CODE;
  check_shape({1, 200, 390, 2, 1, true}, 1);
}
TEST(rows_without_keys) {
  NEEDS_SM90_CODE;
  check_shape({1, 300, 100, 1, 1, true});
}
TEST(one_query_one_key) {
  NEEDS_SM90_CODE;
  check_shape({1, 1, 1, 1, 1, false});
}
TEST(batches_of_short_rows) {
  NEEDS_SM90_CODE;
  check_shape({5, 3, 130, 2, 2, false});
}

// Maxima that grow from block to block, by little and beyond any exponent: the base must follow.
TEST(maxima_outgrow_the_base) {
  NEEDS_SM90_CODE;
  sim::options().properties.multiprocessors = 1;
  for (const bool causal : {false, true}) {
    AttentionData data({1, 160, 512, 1, 1, causal}, 9);
    const float factor = causal ? 3.0f : 40.0f;
    for (size_t i = 0; i < data.k.size(); ++i) {  // the first keys, which come last, are the largest
      const float place = static_cast<float>(i / attention_sm90::kHeadDim) / 512.0f;
      data.k[i] = from_float<bfloat16>(to_float(data.k[i]) * std::exp((0.5f - place) * 2 * std::log(factor)));
    }
    check(data, {.ulps = 1, .relative = 0, .absolute = 0x1p-7});
  }
  sim::options().properties.multiprocessors = 132;
}

TEST(not_a_number_stays_in_its_row) {
  NEEDS_SM90_CODE;
  AttentionData data({1, 130, 256, 1, 1, false}, 3);
  data.q[129 * attention_sm90::kHeadDim + 7] = {0x7fc0};
  data.solve();
  under_every_seed([&] {
    data.o.poison();
    expect_ok(data.run());
    expect_close("o", data.o, data.expected_o, kOutputTolerance);
    expect_close("lse", data.lse, data.expected_lse, kLseTolerance);
  });
}

RANDOM_TEST(random_shapes) {
  NEEDS_SM90_CODE;
  const int key_heads = static_cast<int>(random.integer(1, 2));
  AttentionCase shape{static_cast<int>(random.integer(1, 2)),
                      static_cast<int>(random.size(1, 300)),
                      static_cast<int>(random.size(1, 400)),
                      key_heads * static_cast<int>(random.integer(1, 2)),
                      key_heads,
                      random.coin()};
  sim::options().seed = static_cast<uint64_t>(random.integer(0, 7));
  sim::options().properties.multiprocessors = static_cast<int>(random.integer(1, 3));
  AttentionData data(shape, random.bits() % 1000);
  data.solve();
  expect_ok(data.run());
  expect_close("o", data.o, data.expected_o, kOutputTolerance);
  expect_close("lse", data.lse, data.expected_lse, kLseTolerance);
  sim::options().seed = 0;
  sim::options().properties.multiprocessors = 132;
}

}  // namespace
}  // namespace warpsmith::test
