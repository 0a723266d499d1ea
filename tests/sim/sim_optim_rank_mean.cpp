// links: csrc/kernels/optim/rank_mean.cu
// The mean over ranks, and the whole exchange of ranks that share memory: each rank a set of buffers, here of one
// process.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "dtypes.h"
#include "harness.h"
#include "kernels/optim/rank_mean.h"
#include "sim/sparse_memory.h"

namespace warpsmith::test {
namespace {

// The formula: what is sent is rounded to T, added in float from rank 0 on, divided, rounded to T.
template <class T> T mean_of(const std::vector<float>& values) {
  float sum = to_float(from_float<T>(values[0]));
  for (size_t s = 1; s < values.size(); ++s) sum += to_float(from_float<T>(values[s]));
  return from_float<T>(sum / static_cast<float>(values.size()));
}

bool same_bits(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0 || (a != a && b != b); }

template <class T> using Buffers = std::vector<std::unique_ptr<Buffer<T>>>;

template <class T> struct Exchange {
  int ranks;
  int64_t count, part;
  Buffers<float> gradients;
  Buffers<T> inboxes, means;  // of each rank: [ranks, part]

  Exchange(int n, int64_t elems, size_t offset = 0)
      : ranks(n), count(elems), part((elems + n * int64_t{8} - 1) / (n * int64_t{8}) * 8) {
    for (int r = 0; r < n; ++r) {
      gradients.push_back(std::make_unique<Buffer<float>>(static_cast<size_t>(elems), offset));
      inboxes.push_back(std::make_unique<Buffer<T>>(static_cast<size_t>(n * part), offset));
      means.push_back(std::make_unique<Buffer<T>>(static_cast<size_t>(n * part), offset));
    }
  }
  int64_t first(int r) const { return std::min(count, r * part); }
  int64_t length(int r) const { return std::min(count, (r + 1) * part) - first(r); }

  void run() {
    for (int from = 0; from < ranks; ++from)
      for (int to = 0; to < ranks; ++to)
        for (int64_t i = 0; to != from && i < length(to); ++i)
          inboxes[to]->data()[from * part + i] = from_float<T>(gradients[from]->data()[first(to) + i]);
    for (int r = 0; r < ranks; ++r) {
      RankMeanParams p{};
      p.parts = inboxes[r]->data();
      p.own = gradients[r]->data() + first(r);
      p.count = length(r);
      p.stride = part;
      p.ranks = ranks;
      p.rank = r;
      p.dtype = kDtype<T>;
      p.own_dtype = Dtype::float32;
      p.outs[p.out_count++] = {gradients[r]->data() + first(r), Dtype::float32};
      for (int to = 0; to < ranks; ++to)
        if (to != r) p.outs[p.out_count++] = {means[to]->data() + r * part, kDtype<T>};
      expect_ok(rank_mean_cuda(p, nullptr));
    }
    for (int r = 0; r < ranks; ++r)
      for (int from = 0; from < ranks; ++from)
        for (int64_t i = 0; from != r && i < length(from); ++i)
          gradients[r]->data()[first(from) + i] = to_float(means[r]->data()[from * part + i]);
  }

  void check(uint64_t seed) {
    under_every_seed([&] {
      std::vector<std::vector<float>> sent(static_cast<size_t>(count));
      for (int r = 0; r < ranks; ++r) {
        fill_normal(*gradients[r], seed + static_cast<uint64_t>(r), 3.0f);
        inboxes[r]->poison(), means[r]->poison();
        for (int64_t i = 0; i < count; ++i) sent[static_cast<size_t>(i)].push_back(gradients[r]->data()[i]);
      }
      run();
      for (int r = 0; r < ranks; ++r)
        for (int64_t i = 0; i < count; ++i) {
          const float want = to_float(mean_of<T>(sent[static_cast<size_t>(i)])), got = gradients[r]->data()[i];
          if (!same_bits(got, want)) {
            fail("rank " + std::to_string(r) + ", element " + std::to_string(i) + ": expected " + std::to_string(want) +
                 ", got " + std::to_string(got));
            return;
          }
        }
      same_bits_for_every_seed("gradients", *gradients[0]);
    });
  }
};

TEST(ranks_that_share_memory_end_with_the_formula) {
  const SeedsAtMost few(2);
  for (const int ranks : {1, 2, 3, 8})
    for (const int64_t count : {0, 1, 7, 8, 65, 1000, 20003}) {
      Exchange<bfloat16>(ranks, count).check(1);
      Exchange<float16>(ranks, count, 1).check(2);
    }
}

// Rows of `parts` alone, as an all-to-all brings them, into an output of the same dtype.
template <class T> void check_rows(int ranks, int64_t count, int64_t stride, size_t offset, uint64_t seed) {
  Buffer<T> parts(static_cast<size_t>((ranks - 1) * stride + count), offset), out(static_cast<size_t>(count), offset);
  fill_normal(parts, seed);
  under_every_seed([&] {
    out.poison();
    RankMeanParams p{};
    p.parts = parts.data();
    p.count = count;
    p.stride = stride;
    p.ranks = ranks;
    p.dtype = kDtype<T>;
    p.outs[p.out_count++] = {out.data(), kDtype<T>};
    expect_ok(rank_mean_cuda(p, nullptr));
    same_bits_for_every_seed("mean", out);
  });
  for (int64_t i = 0; i < count; ++i) {
    std::vector<float> values;
    for (int s = 0; s < ranks; ++s) values.push_back(to_float(parts[static_cast<size_t>(s * stride + i)]));
    const T want = mean_of<T>(values);
    if (!same_bits(to_float(out[static_cast<size_t>(i)]), to_float(want)))
      return fail("element " + std::to_string(i) + " of " + std::to_string(ranks) + " rows");
  }
}

TEST(rows_of_every_dtype_stride_and_alignment) {
  const SeedsAtMost few(2);
  for (const int ranks : {1, 2, 5, 40})
    for (const size_t offset : {0, 1, 3}) {
      check_rows<float>(ranks, 4099, 4104, offset, 1);
      check_rows<bfloat16>(ranks, 4099, 4099, offset, 2);
      check_rows<float16>(ranks, 9001, 9016, offset, 3);
    }
}

TEST(the_order_is_that_of_the_ranks) {
  // 2^24 + 1 is 2^24 in float.
  constexpr float kBig = 16777216.0f;
  const auto mean = [](std::vector<float> values) {
    Buffer<float> parts(values.size()), out(1);
    std::copy(values.begin(), values.end(), parts.data());
    RankMeanParams p{};
    p.parts = parts.data(), p.count = 1, p.stride = 1, p.ranks = static_cast<int32_t>(values.size());
    p.dtype = Dtype::float32;
    p.outs[p.out_count++] = {out.data(), Dtype::float32};
    expect_ok(rank_mean_cuda(p, nullptr));
    return out[0];
  };
  expect_equal("in order", mean({kBig, 1.0f, 1.0f, -kBig}), 0.0f);
  expect_equal("another order", mean({kBig, -kBig, 1.0f, 1.0f}), 0.5f);
}

TEST(the_own_part_of_a_16_bit_bucket) {
  Buffer<bfloat16> parts(2 * 100), own(100), peer(100);
  fill_normal(parts, 1), fill_normal(own, 2);
  std::vector<bfloat16> want;
  for (size_t i = 0; i < 100; ++i) want.push_back(mean_of<bfloat16>({to_float(parts[i]), to_float(own[i])}));
  RankMeanParams p{};
  p.parts = parts.data(), p.own = own.data(), p.count = 100, p.stride = 100, p.ranks = 2, p.rank = 1;
  p.dtype = p.own_dtype = Dtype::bfloat16;
  p.outs[p.out_count++] = {own.data(), Dtype::bfloat16};
  p.outs[p.out_count++] = {peer.data(), Dtype::bfloat16};
  expect_ok(rank_mean_cuda(p, nullptr));
  for (size_t i = 0; i < 100; ++i)
    expect(own[i].bits == want[i].bits && peer[i].bits == want[i].bits, "element " + std::to_string(i));
}

TEST(nan_infinity_and_overflow_stay_visible) {
  Exchange<float16> e(3, 100);
  for (int r = 0; r < 3; ++r) fill_normal(*e.gradients[r], static_cast<uint64_t>(r));
  e.gradients[1]->data()[3] = std::numeric_limits<float>::quiet_NaN();
  e.gradients[2]->data()[50] = std::numeric_limits<float>::infinity();
  e.gradients[0]->data()[99] = -1e5f;  // beyond float16
  e.run();
  for (int r = 0; r < 3; ++r) {
    const float* g = e.gradients[r]->data();
    expect(g[3] != g[3] && g[50] == HUGE_VALF && g[99] == -HUGE_VALF, "on every rank");
    expect(std::isfinite(g[4]) && std::isfinite(g[98]), "the others stay finite");
  }
}

TEST(bytes_are_each_part_once_and_each_output_once) {
  constexpr int64_t kCount = 8192;
  Buffer<bfloat16> parts(4 * kCount), peer(kCount);
  Buffer<float> own(kCount);
  fill_normal(parts, 1);
  under_every_seed([&] {
    fill_normal(own, 2);
    RankMeanParams p{};
    p.parts = parts.data(), p.own = own.data(), p.count = kCount, p.stride = kCount, p.ranks = 4, p.rank = 2;
    p.dtype = Dtype::bfloat16, p.own_dtype = Dtype::float32;
    p.outs[p.out_count++] = {own.data(), Dtype::float32};
    p.outs[p.out_count++] = {peer.data(), Dtype::bfloat16};
    expect_ok(rank_mean_cuda(p, nullptr));
    expect_bytes({.read = kCount * (3 * 2 + 4), .written = kCount * (4 + 2)});
  });
}

TEST(rows_more_than_2_to_the_31_elements_apart) {
  constexpr int64_t kStride = (int64_t{1} << 31) + 8;
  sim::SparseMemory<bfloat16> parts(static_cast<size_t>(kStride) + 16);
  Buffer<bfloat16> out(16);
  for (size_t i = 0; i < 16; ++i) parts[static_cast<size_t>(kStride) + i] = from_float<bfloat16>(static_cast<float>(i));
  RankMeanParams p{};
  p.parts = parts.data(), p.count = 16, p.stride = kStride, p.ranks = 2, p.dtype = Dtype::bfloat16;
  p.outs[p.out_count++] = {out.data(), Dtype::bfloat16};
  expect_ok(rank_mean_cuda(p, nullptr));
  for (size_t i = 0; i < 16; ++i) expect_equal("element", to_float(out[i]), static_cast<float>(i) / 2);
}

TEST(float64_is_refused_on_cuda) {
  Buffer<double> parts(2), out(1);
  RankMeanParams p{};
  p.parts = parts.data(), p.count = 1, p.stride = 1, p.ranks = 2, p.dtype = Dtype::float64;
  p.outs[p.out_count++] = {out.data(), Dtype::float64};
  expect_refused(rank_mean_cuda(p, nullptr), "float64");
}

RANDOM_TEST(random_exchanges) {
  const int ranks = static_cast<int>(random.integer(1, 6));
  const int64_t count = random.size(0, 30000);
  const auto offset = static_cast<size_t>(random.integer(0, 8));
  if (random.coin())
    Exchange<bfloat16>(ranks, count, offset).check(7);
  else
    Exchange<float16>(ranks, count, offset).check(7);
}

}  // namespace
}  // namespace warpsmith::test
