#pragma once
#include "dtypes.h"
#include "far.h"
#include "harness.h"
#include "kernels/activation/activation.h"
#include "kernels/activation/activation_config.h"

// The sim tests of the biased activations.
namespace warpsmith::test {

// An op, with its function and derivative in double.
struct BiasedOp {
  Biased row;
  double (*value)(double);
  double (*derivative)(double);
  bool tanh = false;
  Status forward(const BiasedFwdParams& p, void* stream) const { return biased_forward_cuda(row, p, stream); }
  Status backward(const BiasedBwdParams& p, void* stream) const { return biased_backward_cuda(row, p, stream); }
};

struct BiasedShape {
  int64_t rows, columns;
  int64_t padding = 0;  // elements between rows of the inputs
  Offsets offset = {};  // of the arguments
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
        x(count(shape.rows * stride()), shape.offset[0]),
        dy(x.size(), shape.offset[1]),
        y(count(shape.rows * shape.columns), shape.offset[2]),
        dx(y.size(), shape.offset[3]),
        bias(count(shape.columns), shape.offset[4]),
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
    expect_ok(biased_partial_rows_cuda(backward, &rows));
    partials = Buffer<float>(count(rows * s.columns));
    if (backward.dbias) backward.partials = partials.data();
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
      if (backward.dx) expect_close("dx", dx, want_dx, rounding(4));
      same_bits_for_every_seed("dx", dx);
      if (backward.dbias) check_dbias();
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
  for (int argument = 0; argument < 5; ++argument)
    BiasedCase<bfloat16, bfloat16>(op, {.rows = 5, .columns = 64, .offset = Offsets::only(argument)}).run();
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

// The last rows of contiguous tensors of more than 2^31 elements.
inline void biased_far_rows(const BiasedOp& op) {
  const SeedsAtMost one(1);
  for (const int64_t columns : {8192, 8191}) {
    constexpr int64_t kRows = 3, kMostAlongY = 65535;  // of the grid's rows of blocks
    BiasedCase<bfloat16, bfloat16> near(op, {.rows = kRows, .columns = columns});
    const int64_t first = first_far_row(columns, kRows, kMostAlongY);
    Far<bfloat16> x(near.x, first, columns), dy(near.dy, first, columns);
    Far<bfloat16> y(near.y, first, columns), dx(near.dx, first, columns);
    BiasedFwdParams f = near.forward;
    BiasedBwdParams b = near.backward;
    f.rows = b.rows = first + kRows;
    f.x = b.x = x.data(), b.dy = dy.data(), f.y = y.data(), b.dx = dx.data();
    b.dbias = nullptr;  // a sum of all rows
    const FarMachine machine(uint3{0, kRows, 1});
    under_every_seed([&] {
      y.poison(), dx.poison();
      expect_ok(op.forward(f, nullptr));
      y.fetch();
      expect_close("y", near.y, near.want_y, near.rounding(1));
      expect_ok(op.backward(b, nullptr));
      dx.fetch();
      expect_close("dx", near.dx, near.want_dx, near.rounding(4));
    });
  }
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
  s.offset = Offsets::draw(random, 5);
  const int64_t kind = random.integer(0, 4), left_out = random.integer(0, 4);
  const uint64_t seed = random.bits() % 1000;
  const auto run = [&]<class T, class W>(T, W) {
    BiasedCase<T, W> p(op, s, seed);
    if (left_out == 3) p.backward.dx = nullptr;
    if (left_out == 4) p.backward.dbias = nullptr;
    p.run();
  };
  switch (kind) {
    case 0: return run(bfloat16{}, bfloat16{});
    case 1: return run(float{}, float{});
    case 2: return run(float16{}, float16{});
    case 3: return run(bfloat16{}, float{});
    default: return run(float16{}, float{});
  }
}

}  // namespace warpsmith::test
