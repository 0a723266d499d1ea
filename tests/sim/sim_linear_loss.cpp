// The kernels of the linear losses on the host: what finishes linear_cross_entropy's gradients in the backward, the
// column sums that are a bias gradient, and the plan of chunks.
#include "kernels/linear_loss/linear_loss_config.h"
#include "linear_loss_finish.h"
#include "sim/sparse_memory.h"

namespace warpsmith::test {
namespace {

// ---- chunks

LinearLossChunks chunks(int64_t rows, int64_t classes, int element_bytes, int64_t limit, bool cuda = true) {
  return choose_linear_loss_chunks({rows, classes, element_bytes, limit, cuda});
}

TEST(chunks_of_rows) {
  const LinearLossChunks one = chunks(4096, 128256, 2, 0);
  expect_equal("chunks", one.chunks, int64_t{1});
  expect_equal("bytes", one.logits_bytes, int64_t{4096} * 128256 * 2);
  const LinearLossChunks four = chunks(4096, 128256, 2, int64_t{1024} * 128256 * 2);
  expect_equal("chunks", four.chunks, int64_t{4});
  expect_equal("rows", four.chunk_rows, int64_t{1024});
  expect_equal("bytes", four.logits_bytes, int64_t{1024} * 128256 * 2);
  const LinearLossChunks odd = chunks(1000, 50257, 4, 300 * 50260 * 4, false);
  expect_equal("stride", odd.logits_stride, int64_t{50260});
  expect_equal("chunks", odd.chunks, int64_t{4});
  expect_equal("rows", odd.chunk_rows, int64_t{256});
  expect_equal("a vector's stride", chunks(1, 8, 2, 0).logits_stride, int64_t{8});
  expect_equal("no whole tile", chunks(300, 1000, 2, 110 * 2000).chunk_rows, int64_t{100});
  expect_equal("the limit itself", chunks(128, 1000, 2, 128 * 2000).chunks, int64_t{1});
  expect_equal("less than a row", chunks(5, 1000, 2, 1).chunks, int64_t{5});
  expect_equal("no rows", chunks(0, 1000, 2, 0).chunks, int64_t{0});
  expect_equal("the default of a CPU", chunks(40'000, 1000, 2, 0, false).chunks, int64_t{2});
  expect_equal("the default of CUDA", chunks(40'000, 1000, 2, 0).chunks, int64_t{1});
}

// ---- finish: every pair of dtypes, in place and not, and the sum into a caller's float32 buffer

// A machine or a filter of blocks for one test.
struct Machine {
  sim::Options before = sim::options();
  explicit Machine(int multiprocessors) { sim::options().properties.multiprocessors = multiprocessors; }
  ~Machine() { sim::options() = before; }
};

template <class In, class Out> void check_sizes() {
  for (const size_t count : {size_t{1}, size_t{7}, size_t{8}, size_t{2049}, size_t{70'000}})
    Finish<In, Out>(count, {.factor = 1.75f}).check_out_of_place();
}

TEST(finish_every_pair_of_dtypes) {
  check_sizes<float, float>();
  check_sizes<float, float16>();
  check_sizes<float, bfloat16>();
  check_sizes<float16, float16>();
  check_sizes<bfloat16, bfloat16>();
}

TEST(finish_in_place) {
  Finish<float, float>(3001, {.factor = -0.5f}).check_in_place();
  Finish<float16, float16>(3001, {.factor = 2}).check_in_place();
  Finish<bfloat16, bfloat16>(3001, {.factor = 3}).check_in_place();
}

TEST(finish_into_a_sum) {
  for (const size_t count : {size_t{1}, size_t{9}, size_t{5000}}) {
    Finish<float, float>(count, {.factor = 1}).check_sum();
    Finish<float16, float16>(count, {.factor = 0.25f, .denominator = 3, .divides = true}).check_sum();
    Finish<bfloat16, bfloat16>(count, {.factor = 7}).check_sum();
  }
}

TEST(finish_misaligned_tensors) {
  Finish<bfloat16, bfloat16>(1000, {.factor = 3}, 1).check_in_place();
  Finish<float, float16>(1000, {.factor = 3}, 1).check_out_of_place();
  Finish<float, float>(1000, {.factor = 3}, 3).check_sum();
}

// One of two tensors alone lies off 16 bytes.
TEST(finish_one_misaligned_tensor) {
  Finish<float, bfloat16> p(1000, {.factor = 3});
  Buffer<bfloat16> out(1000, 1);
  Buffer<float> sum(1000, 1);
  under_every_seed([&] {
    LinearFinishParams to_out = p.params();
    to_out.out = out.data();
    expect_ok(linear_finish_cuda(to_out, nullptr));
    expect_close("out", out, p.scaled(), {.ulps = 0.51, .relative = 2e-7, .absolute = 3.1e-8});
    LinearFinishParams to_sum = p.params();
    std::memset(static_cast<void*>(sum.data()), 0, sum.size() * sizeof(float));
    to_sum.sum = sum.data();
    to_sum.out = nullptr;
    to_sum.out_dtype = to_sum.dtype;
    expect_ok(linear_finish_cuda(to_sum, nullptr));
    expect_close("sum", sum, p.scaled(), {.relative = 2e-7});
  });
}

TEST(finish_denominators) {
  Finish<float16, float16>(100, {.factor = 65536, .denominator = 4000, .divides = true}).check_in_place();
  Finish<float, float>(100, {.factor = 2, .denominator = 0, .divides = true}).check_out_of_place();
}

// More blocks than the grid may have: the loop goes round several times.
TEST(finish_a_small_machine) {
  const Machine small(1);
  Finish<bfloat16, bfloat16>(100'003, {.factor = 3}).check_in_place();
  Finish<float, bfloat16>(100'003, {.factor = 3}).check_out_of_place();
  Finish<bfloat16, bfloat16>(40'003, {.factor = 3}).check_sum();
}

// A factor of 1 costs a read of the factor by each thread, and no element.
TEST(finish_bytes_moved) {
  constexpr int64_t kCount = 8192, kThreads = kCount / 8;
  Finish<bfloat16, bfloat16> p(kCount, {.factor = 3});
  Finish<float, bfloat16> cast(kCount, {.factor = 3});
  under_every_seed([&] {
    LinearFinishParams in_place = p.params();
    in_place.out = in_place.x;
    expect_ok(linear_finish_cuda(in_place, nullptr));
    expect_bytes({.read = kCount * 2 + kThreads * 4, .written = kCount * 2});

    sim::counters() = {};
    p.factor[0] = 1;
    expect_ok(linear_finish_cuda(in_place, nullptr));
    expect_bytes({.read = kThreads * 4, .written = 0});
    p.factor[0] = 3;

    sim::counters() = {};
    LinearFinishParams sum = p.params();
    sum.sum = p.sum.data();
    sum.out = nullptr;
    expect_ok(linear_finish_cuda(sum, nullptr));
    expect_bytes({.read = kCount * 6 + kThreads * 4, .written = kCount * 6});

    sim::counters() = {};
    expect_ok(linear_finish_cuda(cast.params(), nullptr));
    expect_bytes({.read = kCount * 4 + kThreads * 4, .written = kCount * 2});
  });
}

TEST(finish_nothing_to_do) {
  LinearFinishParams p = Finish<float, float>(1, {}).params();
  p.count = 0;
  expect_ok(linear_finish_cuda(p, nullptr));
}

TEST(finish_pairs_without_a_kernel_are_refused) {
  LinearFinishParams p = Finish<float, float>(1, {}).params();
  p.dtype = Dtype::float16;
  expect_refused(linear_finish_cuda(p, nullptr), "from float16 to float32");
  p.dtype = p.out_dtype = Dtype::float64;
  expect_refused(linear_finish_cuda(p, nullptr), "from float64 to float64");
  p.dtype = Dtype::float32;
  expect_refused(linear_finish_cuda(p, nullptr), "from float32 to float64");
}

// The last of more than 2^31 elements, in memory that is never touched but for the end: one block runs of them all.
TEST(finish_beyond_2_31_elements) {
  constexpr int64_t kCount = (int64_t{1} << 31) + 4096;
  sim::SparseMemory<bfloat16> x(kCount), out(kCount);
  sim::SparseMemory<float> wide(kCount), sum(kCount);
  Buffer<float> factor(1);
  factor[0] = 2;
  const Machine large(static_cast<int>(kCount / (256 * 8 * 8)) + 1);
  sim::options().block_filter = [](uint3 block) { return block.x == kCount / (256 * 8) - 1; };
  const int64_t last = kCount - 1;
  under_every_seed([&] {
    x.data()[last] = from_float<bfloat16>(1.5f);
    expect_ok(linear_finish_cuda(
        {x.data(), x.data(), nullptr, factor.data(), nullptr, kCount, Dtype::bfloat16, Dtype::bfloat16}, nullptr));
    expect_equal("last element", to_float(x.data()[last]), 3.0f);
    wide[last] = 1.5f, sum[last] = 1;
    expect_ok(linear_finish_cuda(
        {wide.data(), out.data(), nullptr, factor.data(), nullptr, kCount, Dtype::float32, Dtype::bfloat16}, nullptr));
    expect_equal("last element of another dtype", to_float(out[last]), 3.0f);
    expect_ok(linear_finish_cuda(
        {x.data(), nullptr, sum.data(), factor.data(), nullptr, kCount, Dtype::bfloat16, Dtype::bfloat16}, nullptr));
    expect_equal("last element of the sum", sum[last], 7.0f);
  });
}

template <class In, class Out> void finish_random(Random& random) {
  const Factors f{.factor = static_cast<float>(random.integer(-3, 3)),
                  .denominator = static_cast<float>(random.integer(0, 9)),
                  .divides = random.coin()};
  Finish<In, Out> p(static_cast<size_t>(random.size(1, 30'000)), f, Offsets::draw(random, 3));
  const Machine machine(static_cast<int>(random.integer(1, 3)));
  switch (random.integer(0, 2)) {
    case 0: return p.check_out_of_place();
    case 1: return p.check_in_place();
    default: return p.check_sum();
  }
}

RANDOM_TEST(finish_random_problems) {
  switch (random.integer(0, 3)) {
    case 0: return finish_random<float, float>(random);
    case 1: return finish_random<bfloat16, bfloat16>(random);
    case 2: return finish_random<float16, float16>(random);
    default: {
      Finish<float, bfloat16>(static_cast<size_t>(random.size(1, 30'000)), {.factor = 1}).check_out_of_place();
      return;
    }
  }
}

// ---- column sums, against sums in double precision

struct SumsShape {
  int64_t rows, columns;
  int64_t padding = 0;  // elements between rows
  Offsets offset = {};  // of the arguments
  bool add = false;
};

template <class T> struct ColumnSums {
  SumsShape s;
  Buffer<T> x;
  Buffer<float> sums, before, partials;
  std::vector<double> want;
  ColumnSumsParams params{};

  explicit ColumnSums(const SumsShape& shape, uint64_t seed = 1)
      : s(shape),
        x(static_cast<size_t>(shape.rows * (shape.columns + shape.padding)), shape.offset[0]),
        sums(static_cast<size_t>(shape.columns)),
        before(sums.size()),
        partials(0),
        want(sums.size(), 0.0) {
    fill_normal(x, seed);
    fill_normal(before, seed + 1);
    const int64_t stride = s.columns + s.padding;
    for (int64_t c = 0; c < s.columns; ++c) {
      const auto at = static_cast<size_t>(c);
      if (s.add) want[at] = static_cast<double>(before[at]);
      for (int64_t r = 0; r < s.rows; ++r)
        want[at] += static_cast<double>(to_float(x[static_cast<size_t>(r * stride + c)]));
    }
    params = {x.data(), sums.data(), nullptr, s.rows, s.columns, stride, s.add, kDtype<T>};
  }

  int64_t make_room() {
    int64_t slices = 0;
    expect_ok(column_sums_slices_cuda(params, &slices));
    partials = Buffer<float>(static_cast<size_t>(slices > 1 ? slices * s.columns : 0));
    params.partials = partials.data();
    return slices;
  }

  void run() {
    make_room();
    under_every_seed([&] {
      partials.poison();
      sums.poison();
      if (s.add) std::memcpy(sums.data(), before.data(), sums.size() * sizeof(float));
      expect_ok(column_sums_cuda(params, nullptr));
      expect_close("sums", sums, want, {.relative = 1e-6, .absolute = 1e-6 * std::sqrt(static_cast<double>(s.rows))});
      same_bits_for_every_seed("sums", sums);
    });
  }
};

TEST(column_sums_every_dtype) {
  for (const bool add : {false, true}) {
    ColumnSums<float>({.rows = 33, .columns = 300, .add = add}).run();
    ColumnSums<float16>({.rows = 33, .columns = 300, .padding = 4, .add = add}).run();
    ColumnSums<bfloat16>({.rows = 33, .columns = 2100, .padding = 4, .add = add}).run();
  }
}

TEST(column_sums_several_slices) {
  for (const bool add : {false, true}) {
    ColumnSums<bfloat16>({.rows = 700, .columns = 130, .padding = 6, .add = add}).run();
    ColumnSums<float>({.rows = 193, .columns = 1025, .padding = 3, .add = add}).run();
  }
}

TEST(column_sums_rows_that_are_not_vectors) {
  for (const int64_t columns : {1, 3, 7, 257}) ColumnSums<bfloat16>({.rows = 150, .columns = columns}).run();
  ColumnSums<bfloat16>({.rows = 20, .columns = 64, .offset = 1}).run();
  ColumnSums<float>({.rows = 20, .columns = 64, .padding = 1}).run();
}

// The end of a row is not a whole vector, and what is behind it (NaN) is not touched.
TEST(column_sums_padded_rows) {
  for (const int64_t columns : {1, 9, 2047}) {
    ColumnSums<bfloat16> p({.rows = 20, .columns = columns, .padding = 16 - columns % 8});
    const size_t stride = static_cast<size_t>(p.params.x_stride);
    for (size_t r = 0; r < 20; ++r)
      for (size_t c = static_cast<size_t>(columns); c < stride; ++c) p.x[r * stride + c] = from_float<bfloat16>(NAN);
    p.run();
  }
}

TEST(column_sums_no_rows_and_no_columns) {
  ColumnSums<float>({.rows = 0, .columns = 9}).run();
  ColumnSums<float>({.rows = 0, .columns = 9, .add = true}).run();
  ColumnSums<float>({.rows = 5, .columns = 0}).run();
}

// x once; for several slices their partial sums written and read; the sums.
TEST(column_sums_bytes_moved) {
  constexpr int64_t kRows = 640, kColumns = 2048;
  ColumnSums<bfloat16> p({.rows = kRows, .columns = kColumns});
  const int64_t slices = p.make_room();
  expect(slices > 1, "expected several slices");
  ColumnSums<bfloat16> one({.rows = 32, .columns = kColumns, .add = true});
  expect_equal("slices of few rows", one.make_room(), int64_t{1});
  under_every_seed([&] {
    expect_ok(column_sums_cuda(p.params, nullptr));
    expect_bytes({.read = kRows * kColumns * 2 + slices * kColumns * 4, .written = (slices + 1) * kColumns * 4});
    sim::counters() = {};
    std::memcpy(one.sums.data(), one.before.data(), one.sums.size() * sizeof(float));
    expect_ok(column_sums_cuda(one.params, nullptr));
    expect_bytes({.read = 32 * kColumns * 2 + kColumns * 4, .written = kColumns * 4});
  });
}

TEST(column_sums_unknown_dtype_is_refused) {
  ColumnSums<float> p({.rows = 1, .columns = 4});
  p.params.dtype = Dtype::float64;
  expect_refused(column_sums_cuda(p.params, nullptr), "float64");
}

// Rows more than 2^31 elements apart in all: row starts need 64 bits.
TEST(column_sums_beyond_2_31_elements) {
  constexpr int64_t kRows = 3, kColumns = 64, kStride = int64_t{1} << 31;
  sim::SparseMemory<bfloat16> x(kRows * kStride);
  ColumnSums<bfloat16> near({.rows = kRows, .columns = kColumns});
  for (int64_t r = 0; r < kRows; ++r) std::memcpy(x.data() + r * kStride, near.x.data() + r * kColumns, kColumns * 2);
  near.params.x = x.data();
  near.params.x_stride = kStride;
  near.run();
}

template <class T> void column_sums_random(Random& random) {
  const sim::Options before = sim::options();
  sim::options().properties.multiprocessors = static_cast<int>(random.integer(1, 4));
  SumsShape s{.rows = random.size(1, 400), .columns = random.size(1, 600)};
  if (random.coin()) s.padding = 8 - s.columns % 8;
  s.offset = Offsets::draw(random, 1);
  s.add = random.coin();
  ColumnSums<T>(s, random.bits() % 1000).run();
  sim::options() = before;
}

RANDOM_TEST(column_sums_random_problems) {
  switch (random.integer(0, 2)) {
    case 0: return column_sums_random<bfloat16>(random);
    case 1: return column_sums_random<float>(random);
    default: return column_sums_random<float16>(random);
  }
}

}  // namespace
}  // namespace warpsmith::test
