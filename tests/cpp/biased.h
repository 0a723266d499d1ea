#pragma once
#include "harness.h"
#include "kernels/activation/biased.h"
#include "kernels/activation/biased_config.h"
#include "sim/sparse_memory.h"

// What the sim tests of the biased activations share. An op's test defines a BiasedOp: its launchers, and its function
// and derivative in double.
namespace warpsmith::test {

template <class T> constexpr Dtype kDtype = Dtype::float32;
template <> inline constexpr Dtype kDtype<float16> = Dtype::float16;
template <> inline constexpr Dtype kDtype<bfloat16> = Dtype::bfloat16;

struct BiasedOp {
  Status (*forward)(const BiasedFwdParams&, void*);
  Status (*backward)(const BiasedBwdParams&, void*);
  Status (*partial_rows)(const BiasedBwdParams&, int64_t*);
  double (*value)(double);
  double (*derivative)(double);
  bool tanh = false;
};

struct BiasedShape {
  int64_t rows, columns;
  int64_t padding = 0;  // elements between rows of the inputs
  size_t offset = 0;    // elements past an aligned address
};

template <class T, class W> struct BiasedCase {
  BiasedOp op;
  BiasedShape s;
  Buffer<T> x, dy, y, dx;
  Buffer<W> bias, dbias;
  Buffer<float> partials;
  std::vector<double> want_y, want_dx, want_dbias;
  BiasedFwdParams forward{};
  BiasedBwdParams backward{};

  static size_t count(int64_t n) { return static_cast<size_t>(n); }
  int64_t stride() const { return s.columns + s.padding; }

  BiasedCase(const BiasedOp& o, const BiasedShape& shape, uint64_t seed = 1)
      : op(o),
        s(shape),
        x(count(shape.rows * stride()), shape.offset),
        dy(x.size(), shape.offset),
        y(count(shape.rows * shape.columns), shape.offset),
        dx(y.size(), shape.offset),
        bias(count(shape.columns), shape.offset),
        dbias(bias.size()),
        partials(0) {
    fill_normal(x, seed, 2.0f);
    fill_normal(dy, seed + 1);
    fill_normal(bias, seed + 2);
    forward = {x.data(), bias.data(), y.data(), s.rows, s.columns, stride(), op.tanh, kDtype<T>, kDtype<W>};
    backward = {dy.data(), x.data(), bias.data(), dx.data(), dbias.data(), nullptr,  s.rows,
                s.columns, stride(), stride(),    op.tanh,   kDtype<T>,    kDtype<W>};
    want_y.resize(y.size());
    want_dx.resize(dx.size());
    want_dbias.assign(bias.size(), 0);
    for (int64_t r = 0; r < s.rows; ++r)
      for (int64_t c = 0; c < s.columns; ++c) {
        const size_t from = count(r * stride() + c), to = count(r * s.columns + c);
        const double z = static_cast<double>(to_float(x[from])) + static_cast<double>(to_float(bias[count(c)]));
        want_y[to] = op.value(z);
        want_dx[to] = static_cast<double>(to_float(dy[from])) * op.derivative(z);
        want_dbias[count(c)] += want_dx[to];
      }
  }

  // Half a rounding step of the storage type, and a few of float; sums of terms of size one may cancel.
  static Tolerance rounding(double terms) {
    return {.ulps = 0.51, .relative = 4e-6, .absolute = 1e-6 * std::sqrt(terms)};
  }

  void make_room() {
    int64_t rows = 0;
    expect_ok(op.partial_rows(backward, &rows));
    partials = Buffer<float>(count(rows * s.columns));
    backward.partials = partials.data();
  }

  void check_dbias() {
    expect_close("dbias", dbias, want_dbias, rounding(4.0 * static_cast<double>(s.rows)));
    same_bits_for_every_seed("dbias", dbias);
  }

  void run() {
    make_room();
    under_every_seed([&] {
      y.poison(), dx.poison(), dbias.poison(), partials.poison();
      expect_ok(op.forward(forward, nullptr));
      expect_close("y", y, want_y, rounding(1));
      same_bits_for_every_seed("y", y);
      expect_ok(op.backward(backward, nullptr));
      expect_close("dx", dx, want_dx, rounding(4));
      same_bits_for_every_seed("dx", dx);
      check_dbias();
    });
  }
};

// Tiles of every width, full and not; each pair of dtypes; vectors and single elements; one row and more than a
// block's.
inline void biased_paths(const BiasedOp& op) {
  for (const int64_t columns : {8, 24, 64, 264, 2056})
    BiasedCase<bfloat16, bfloat16>(op, {.rows = 5, .columns = columns}).run();
  for (const int64_t columns : {1, 7, 33, 257})
    BiasedCase<bfloat16, bfloat16>(op, {.rows = 5, .columns = columns}).run();
  BiasedCase<float, float>(op, {.rows = 5, .columns = 516}).run();
  BiasedCase<float16, float16>(op, {.rows = 5, .columns = 264}).run();
  BiasedCase<float16, float>(op, {.rows = 5, .columns = 64}).run();
  BiasedCase<bfloat16, float>(op, {.rows = 5, .columns = 65}).run();
  for (const int64_t rows : {1, 33, 130}) BiasedCase<bfloat16, bfloat16>(op, {.rows = rows, .columns = 256}).run();
}

inline void biased_layouts(const BiasedOp& op) {
  BiasedCase<bfloat16, bfloat16>(op, {.rows = 5, .columns = 64, .offset = 1}).run();
  BiasedCase<bfloat16, bfloat16>(op, {.rows = 5, .columns = 64, .padding = 3}).run();
  BiasedCase<bfloat16, float>(op, {.rows = 5, .columns = 64, .padding = 8}).run();
  BiasedCase<float, float>(op, {.rows = 5, .columns = 60, .padding = 4, .offset = 3}).run();
}

// On a card of one multiprocessor blocks take many rows, an odd and an even number of times.
inline void biased_loops(const BiasedOp& op) {
  const auto properties = sim::options().properties;
  sim::options().properties.multiprocessors = 1;
  for (const int64_t rows : {9, 13, 41}) BiasedCase<bfloat16, bfloat16>(op, {.rows = rows, .columns = 2048}).run();
  BiasedCase<float, float>(op, {.rows = 700, .columns = 36}).run();
  sim::options().properties = properties;
}

inline void biased_one_gradient(const BiasedOp& op) {
  BiasedCase<bfloat16, bfloat16> p(op, {.rows = 9, .columns = 264});
  p.make_room();
  under_every_seed([&] {
    BiasedBwdParams one = p.backward;
    one.dbias = one.partials = nullptr;
    p.dx.poison();
    expect_ok(op.backward(one, nullptr));
    expect_close("dx", p.dx, p.want_dx, p.rounding(4));
    one = p.backward;
    one.dx = nullptr;
    p.dbias.poison();
    expect_ok(op.backward(one, nullptr));
    p.check_dbias();
  });
}

// The floor; the bias once a row forward, once a row of threads backward; one float a column and
// row block of partial sums, written and read.
inline void biased_bytes(const BiasedOp& op) {
  constexpr int64_t kRows = 128, kColumns = 256, kUnit = kRows * kColumns * 2;
  BiasedCase<bfloat16, bfloat16> p(op, {.rows = kRows, .columns = kColumns});
  p.make_room();
  const BiasedConfig c = choose_biased_backward({kRows, kColumns, 2});
  const int64_t partials = c.row_blocks * kColumns * 4;
  under_every_seed([&] {
    expect_ok(op.forward(p.forward, nullptr));
    expect_bytes({.read = 2 * kUnit, .written = kUnit});
    sim::counters() = {};
    expect_ok(op.backward(p.backward, nullptr));
    expect_bytes({.read = 2 * kUnit + c.row_blocks * c.rows_at_once() * kColumns * 2 + partials,
                  .written = kUnit + partials + kColumns * 2});
  });
}

// Rows 2^31 elements apart, in memory that is never touched but for the rows under test.
inline void biased_beyond_2_31(const BiasedOp& op) {
  constexpr int64_t kRows = 3, kColumns = 264, kStride = int64_t{1} << 31;
  BiasedCase<bfloat16, bfloat16> near(op, {.rows = kRows, .columns = kColumns});
  near.make_room();
  sim::SparseMemory<bfloat16> x(kRows * kStride), dy(kRows * kStride);
  for (int64_t r = 0; r < kRows; ++r) {
    std::memcpy(x.data() + r * kStride, near.x.data() + r * kColumns, kColumns * 2);
    std::memcpy(dy.data() + r * kStride, near.dy.data() + r * kColumns, kColumns * 2);
  }
  near.forward.x = near.backward.x = x.data();
  near.backward.dy = dy.data();
  near.forward.x_stride = near.backward.x_stride = near.backward.dy_stride = kStride;
  near.run();
}

inline void biased_refuses_float64(const BiasedOp& op) {
  BiasedCase<float, float> p(op, {.rows = 1, .columns = 4});
  p.forward.dtype = p.forward.bias_dtype = p.backward.dtype = p.backward.bias_dtype = Dtype::float64;
  expect_refused(op.forward(p.forward, nullptr), "float64");
  expect_refused(op.backward(p.backward, nullptr), "float64");
}

inline void biased_random(const BiasedOp& op, Random& random) {
  BiasedShape s{.rows = random.size(1, 60), .columns = random.size(1, 600)};
  if (random.coin()) s.columns = (s.columns + 7) / 8 * 8;
  s.padding = random.choice<int64_t>({0, 8, 1});
  s.offset = static_cast<size_t>(random.choice<int64_t>({0, 0, 0, 1}));
  const int64_t kind = random.integer(0, 4);
  const uint64_t seed = random.bits() % 1000;
  switch (kind) {
    case 0: return BiasedCase<bfloat16, bfloat16>(op, s, seed).run();
    case 1: return BiasedCase<float, float>(op, s, seed).run();
    case 2: return BiasedCase<float16, float16>(op, s, seed).run();
    case 3: return BiasedCase<bfloat16, float>(op, s, seed).run();
    default: return BiasedCase<float16, float>(op, s, seed).run();
  }
}

#define WARPSMITH_BIASED_TESTS(op)                               \
  TEST(every_path) { biased_paths(op); }                         \
  TEST(layouts) { biased_layouts(op); }                          \
  TEST(loops_over_rows) { biased_loops(op); }                    \
  TEST(only_one_gradient) { biased_one_gradient(op); }           \
  TEST(bytes_moved) { biased_bytes(op); }                        \
  TEST(beyond_2_31_elements) { biased_beyond_2_31(op); }         \
  TEST(unknown_dtype_is_refused) { biased_refuses_float64(op); } \
  RANDOM_TEST(random_problems) { biased_random(op, random); }

}  // namespace warpsmith::test
