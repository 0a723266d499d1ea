// Column sums, the bias's gradient of the linear losses, on the host: against sums in double precision.
#include "harness.h"
#include "kernels/linear_loss/linear_log_prob.h"
#include "sim/sparse_memory.h"

namespace warpsmith::test {
namespace {

template <class T> constexpr Dtype kDtype = Dtype::float32;
template <> constexpr Dtype kDtype<float16> = Dtype::float16;
template <> constexpr Dtype kDtype<bfloat16> = Dtype::bfloat16;

struct Shape {
  int64_t rows, columns;
  int64_t padding = 0;  // elements between rows
  size_t offset = 0;    // elements past an aligned address
  bool add = false;
};

template <class T> struct Problem {
  Shape s;
  Buffer<T> x;
  Buffer<float> sums, before, partials;
  std::vector<double> want;
  ColumnSumsParams params{};

  explicit Problem(const Shape& shape, uint64_t seed = 1)
      : s(shape),
        x(static_cast<size_t>(shape.rows * (shape.columns + shape.padding)), shape.offset),
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

TEST(every_dtype) {
  for (const bool add : {false, true}) {
    Problem<float>({.rows = 33, .columns = 300, .add = add}).run();
    Problem<float16>({.rows = 33, .columns = 300, .padding = 4, .add = add}).run();
    Problem<bfloat16>({.rows = 33, .columns = 2100, .padding = 4, .add = add}).run();
  }
}

TEST(several_slices) {
  for (const bool add : {false, true}) {
    Problem<bfloat16>({.rows = 700, .columns = 130, .padding = 6, .add = add}).run();
    Problem<float>({.rows = 193, .columns = 1025, .padding = 3, .add = add}).run();
  }
}

TEST(rows_that_are_not_vectors) {
  for (const int64_t columns : {1, 3, 7, 257}) Problem<bfloat16>({.rows = 150, .columns = columns}).run();
  Problem<bfloat16>({.rows = 20, .columns = 64, .offset = 1}).run();
  Problem<float>({.rows = 20, .columns = 64, .padding = 1}).run();
}

// The end of a row is not a whole vector, and what is behind it (NaN) is not touched.
TEST(padded_rows) {
  for (const int64_t columns : {1, 9, 2047}) {
    Problem<bfloat16> p({.rows = 20, .columns = columns, .padding = 16 - columns % 8});
    const size_t stride = static_cast<size_t>(p.params.x_stride);
    for (size_t r = 0; r < 20; ++r)
      for (size_t c = static_cast<size_t>(columns); c < stride; ++c) p.x[r * stride + c] = from_float<bfloat16>(NAN);
    p.run();
  }
}

TEST(no_rows_and_no_columns) {
  Problem<float>({.rows = 0, .columns = 9}).run();
  Problem<float>({.rows = 0, .columns = 9, .add = true}).run();
  Problem<float>({.rows = 5, .columns = 0}).run();
}

// x once; for several slices their partial sums written and read; the sums.
TEST(bytes_moved) {
  constexpr int64_t kRows = 640, kColumns = 2048;
  Problem<bfloat16> p({.rows = kRows, .columns = kColumns});
  const int64_t slices = p.make_room();
  expect(slices > 1, "expected several slices");
  Problem<bfloat16> one({.rows = 32, .columns = kColumns, .add = true});
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

TEST(unknown_dtype_is_refused) {
  Problem<float> p({.rows = 1, .columns = 4});
  p.params.dtype = Dtype::float64;
  expect_refused(column_sums_cuda(p.params, nullptr), "float64");
}

// Rows more than 2^31 elements apart in all: row starts need 64 bits.
TEST(beyond_2_31_elements) {
  constexpr int64_t kRows = 3, kColumns = 64, kStride = int64_t{1} << 31;
  sim::SparseMemory<bfloat16> x(kRows * kStride);
  Problem<bfloat16> near({.rows = kRows, .columns = kColumns});
  for (int64_t r = 0; r < kRows; ++r) std::memcpy(x.data() + r * kStride, near.x.data() + r * kColumns, kColumns * 2);
  near.params.x = x.data();
  near.params.x_stride = kStride;
  near.run();
}

template <class T> void run_random(Random& random) {
  const sim::Options before = sim::options();
  sim::options().properties.multiprocessors = static_cast<int>(random.integer(1, 4));
  Shape s{.rows = random.size(1, 400), .columns = random.size(1, 600)};
  if (random.coin()) s.padding = 8 - s.columns % 8;
  s.offset = static_cast<size_t>(random.choice<int64_t>({0, 0, 1}));
  s.add = random.coin();
  Problem<T>(s, random.bits() % 1000).run();
  sim::options() = before;
}

RANDOM_TEST(random_problems) {
  switch (random.integer(0, 2)) {
    case 0: return run_random<bfloat16>(random);
    case 1: return run_random<float>(random);
    default: return run_random<float16>(random);
  }
}

}  // namespace
}  // namespace warpsmith::test
