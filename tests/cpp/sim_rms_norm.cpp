// The rms_norm kernels on the host: every kernel of the chooser, against the formula in double precision.
#include <algorithm>

#include "harness.h"
#include "kernels/norm/norm_config.h"
#include "kernels/norm/rms_norm.h"
#include "kernels/norm/rms_norm_config.h"
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
  bool weight = true;
  double weight_offset = 0;
};

// A problem with its inputs, outputs and oracle.
template <class T, class W> struct Problem {
  static constexpr double kEps = 1e-5;
  Shape s;
  Buffer<T> x, dy, y, dx;
  Buffer<W> weight, dweight;
  Buffer<float> rstd, partials;
  std::vector<double> want_y, want_rstd, want_dx, want_dweight;
  NormForwardParams forward{};
  NormBackwardParams backward{};

  int64_t stride() const { return s.columns + s.padding; }
  size_t count() const { return static_cast<size_t>(s.rows * s.columns); }

  explicit Problem(const Shape& shape, uint64_t seed = 1)
      : s(shape),
        x(static_cast<size_t>(shape.rows * (shape.columns + shape.padding)), shape.offset),
        dy(x.size(), shape.offset),
        y(static_cast<size_t>(shape.rows * shape.columns)),
        dx(y.size()),
        weight(static_cast<size_t>(shape.columns), shape.offset),
        dweight(weight.size()),
        rstd(static_cast<size_t>(shape.rows)),
        partials(0) {
    fill_normal(x, seed);
    fill_normal(dy, seed + 1);
    fill_normal(weight, seed + 2, 0.3f, 1.0f);
    const Dtype weight_dtype = s.weight ? kDtype<W> : kDtype<T>;
    forward.x = x.data(), forward.weight = s.weight ? weight.data() : nullptr;
    forward.y = y.data(), forward.rstd = rstd.data();
    forward.rows = s.rows, forward.columns = s.columns, forward.x_stride = stride();
    forward.eps = kEps, forward.weight_offset = s.weight_offset;
    forward.dtype = forward.residual_dtype = kDtype<T>, forward.weight_dtype = weight_dtype;
    backward.dy = dy.data(), backward.s = x.data(), backward.weight = forward.weight, backward.rstd = rstd.data();
    backward.dx = dx.data(), backward.dweight = s.weight ? dweight.data() : nullptr;
    backward.rows = s.rows, backward.columns = s.columns, backward.dy_stride = backward.s_stride = stride();
    backward.weight_offset = s.weight_offset;
    backward.dtype = backward.residual_dtype = kDtype<T>, backward.weight_dtype = weight_dtype;
    compute_oracle();
  }

  void compute_oracle() {
    want_y.resize(count());
    want_dx.resize(count());
    want_rstd.resize(static_cast<size_t>(s.rows));
    want_dweight.assign(static_cast<size_t>(s.columns), 0);
    for (int64_t r = 0; r < s.rows; ++r) {
      const auto x_at = [&](int64_t c) {
        return static_cast<double>(to_float(x[static_cast<size_t>(r * stride() + c)]));
      };
      const auto dy_at = [&](int64_t c) {
        return static_cast<double>(to_float(dy[static_cast<size_t>(r * stride() + c)]));
      };
      const auto w_at = [&](int64_t c) {
        return s.weight ? static_cast<double>(to_float(weight[static_cast<size_t>(c)])) + s.weight_offset : 1.0;
      };
      double squares = 0, dot = 0;
      for (int64_t c = 0; c < s.columns; ++c) squares += x_at(c) * x_at(c);
      const double scale = 1 / std::sqrt(squares / static_cast<double>(s.columns) + kEps);
      for (int64_t c = 0; c < s.columns; ++c) dot += dy_at(c) * w_at(c) * x_at(c) * scale;
      want_rstd[static_cast<size_t>(r)] = scale;
      for (int64_t c = 0; c < s.columns; ++c) {
        const size_t at = static_cast<size_t>(r * s.columns + c);
        want_y[at] = x_at(c) * scale * w_at(c);
        want_dx[at] = scale * (dy_at(c) * w_at(c) - x_at(c) * scale * dot / static_cast<double>(s.columns));
        want_dweight[static_cast<size_t>(c)] += dy_at(c) * x_at(c) * scale;
      }
    }
  }

  // Half a rounding step of the storage type, and a few of float for the arithmetic; sums of terms of size one may
  // cancel.
  Tolerance rounding(double terms) const {
    return {.ulps = 0.51, .relative = 4e-6, .absolute = 1e-6 * std::sqrt(terms)};
  }

  void check_forward() {
    expect_close("rstd", rstd, want_rstd, {.relative = 1e-6});
    expect_close("y", y, want_y, rounding(1));
    same_bits_for_every_seed("y", y);
  }

  void check_backward() {
    // dx = rstd (g - x_hat mean): what the bracket loses where it cancels (a row of one column) grows with rstd.
    Tolerance dx_rounding = rounding(4);
    dx_rounding.absolute *= std::max(1.0, *std::max_element(want_rstd.begin(), want_rstd.end()));
    expect_close("dx", dx, want_dx, dx_rounding);
    same_bits_for_every_seed("dx", dx);
    if (!s.weight) return;
    expect_close("dweight", dweight, want_dweight, rounding(4.0 * static_cast<double>(s.rows)));
    same_bits_for_every_seed("dweight", dweight);
  }

  void make_room(int64_t partial_rows) {
    partials = Buffer<float>(static_cast<size_t>(partial_rows * s.columns));
    backward.dweight_partials = s.weight ? partials.data() : nullptr;
  }

  void run() {
    int64_t partial_rows = 0;
    expect_ok(rms_norm_partial_rows_cuda(backward, &partial_rows));
    make_room(partial_rows);
    under_every_seed([&] {
      y.poison(), rstd.poison(), dx.poison(), dweight.poison(), partials.poison();
      expect_ok(rms_norm_forward_cuda(forward, nullptr));
      check_forward();
      expect_ok(rms_norm_backward_cuda(backward, nullptr));
      check_backward();
    });
  }
};

RmsNormProblem planned(int64_t rows, int64_t columns, int element_bytes) {
  RmsNormProblem p;
  p.rows = rows, p.columns = columns, p.element_bytes = element_bytes;
  return p;
}

NormProblem planned_forward(int64_t rows, int64_t columns, int element_bytes) {
  NormProblem p;
  p.rows = rows, p.columns = columns, p.element_bytes = element_bytes;
  return p;
}

// One row length for each kernel and vector count of the chooser, in 16-bit elements.
TEST(every_kernel_bfloat16) {
  for (int64_t columns : {8, 16, 128, 256, 264, 512, 768, 1024, 1032, 2048, 4096, 8192, 8200, 12288, 16384})
    Problem<bfloat16, bfloat16>({.rows = 2, .columns = columns}).run();
}

TEST(every_kernel_float) {
  for (int64_t columns : {4, 8, 128, 132, 256, 384, 512, 516, 2048, 4096, 4100, 6144, 8192})
    Problem<float, float>({.rows = 2, .columns = columns}).run();
}

TEST(float16_and_mixed_weights) {
  for (int64_t columns : {64, 768, 2048, 12288}) {
    Problem<float16, float16>({.rows = 2, .columns = columns}).run();
    Problem<float16, float>({.rows = 2, .columns = columns}).run();
    Problem<bfloat16, float>({.rows = 2, .columns = columns, .weight_offset = 1}).run();
  }
}

TEST(rows_that_are_not_vectors) {
  for (int64_t columns : {1, 2, 3, 7, 33, 257, 1023, 1025, 4097, 5000})
    Problem<bfloat16, bfloat16>({.rows = 3, .columns = columns}).run();
}

TEST(misaligned_and_strided_rows) {
  Problem<bfloat16, bfloat16>({.rows = 5, .columns = 768, .offset = 1}).run();
  Problem<bfloat16, bfloat16>({.rows = 5, .columns = 768, .padding = 3}).run();
  Problem<bfloat16, bfloat16>({.rows = 5, .columns = 768, .padding = 8}).run();
  Problem<float, float>({.rows = 5, .columns = 260, .padding = 4, .offset = 3}).run();
}

TEST(rows_too_long_for_the_chip) {
  Problem<bfloat16, bfloat16>({.rows = 2, .columns = 32768 + 8}).run();
  Problem<bfloat16, bfloat16>({.rows = 2, .columns = 16384 + 8}).run();
  Problem<float, float>({.rows = 1, .columns = 40001}).run();
}

TEST(more_rows_than_groups) {
  for (int64_t rows : {1, 33, 265}) Problem<bfloat16, bfloat16>({.rows = rows, .columns = 16}).run();
  Problem<bfloat16, bfloat16>({.rows = 397, .columns = 264}).run();
  Problem<bfloat16, bfloat16>({.rows = 140, .columns = 1032}).run();
}

// The kernel of rows in shared memory, which wants more rows than registers hold at once: on one multiprocessor.
template <class T> void in_shared_memory(const Shape& shape) {
  Problem<T, T> p(shape);
  NormProblem planned = planned_forward(shape.rows, shape.columns, 2);
  planned.multiprocessors = 1;
  expect(choose_norm_forward(planned).kernel == NormKernel::shared, "the rows lie in shared memory");
  under_every_seed([&] {
    p.y.poison(), p.rstd.poison();
    sim::counters() = {};
    expect_ok(rms_norm_forward_cuda(p.forward, nullptr));
    expect_bytes({.read = 4 * shape.rows * shape.columns, .written = shape.rows * (2 * shape.columns + 4)});
    p.check_forward();
    same_bits_for_every_seed("rstd", p.rstd);
    // On a larger chip other kernels take as few rows: a row's bits do not depend on how many there are.
    p.y.poison(), p.rstd.poison();
    sim::options().properties.multiprocessors = 132;
    expect_ok(rms_norm_forward_cuda(p.forward, nullptr));
    sim::options().properties.multiprocessors = 1;
    p.check_forward();
    same_bits_for_every_seed("rstd", p.rstd);
  });
}

TEST(rows_in_shared_memory) {
  sim::options().properties.multiprocessors = 1;
  in_shared_memory<bfloat16>({.rows = 5, .columns = 8192});
  in_shared_memory<float16>({.rows = 5, .columns = 8192, .padding = 8});
  in_shared_memory<bfloat16>({.rows = 4, .columns = 12288, .padding = 8});
  in_shared_memory<float16>({.rows = 8, .columns = 12288});
  sim::options().properties.multiprocessors = 132;
}

// On a chip of one multiprocessor the blocks of the rings take many rows, and every stage is used again and again.
TEST(many_rows_a_block) {
  sim::options().properties.multiprocessors = 1;
  for (int64_t columns : {136, 264, 1032, 8200})
    Problem<bfloat16, bfloat16>({.rows = columns == 136 ? 400 : 30, .columns = columns}).run();
  sim::options().properties.multiprocessors = 132;
}

TEST(no_weight) {
  for (int64_t columns : {24, 1032, 4096, 4097})
    Problem<bfloat16, bfloat16>({.rows = 2, .columns = columns, .weight = false}).run();
}

TEST(only_one_gradient) {
  Problem<bfloat16, bfloat16> p({.rows = 9, .columns = 1032});
  p.make_room(1000);
  under_every_seed([&] {
    expect_ok(rms_norm_forward_cuda(p.forward, nullptr));
    for (const bool dx : {true, false}) {
      p.dx.poison(), p.dweight.poison();
      NormBackwardParams one = p.backward;
      if (dx)
        one.dweight = one.dweight_partials = nullptr;
      else
        one.dx = nullptr;
      expect_ok(rms_norm_backward_cuda(one, nullptr));
      if (dx)
        expect_close("dx", p.dx, p.want_dx, p.rounding(4));
      else
        expect_close("dweight", p.dweight, p.want_dweight, p.rounding(36));
    }
  });
}

// The floor, and what each kernel adds to it: the weight once a row (registers) or once a block (ring), rstd, partial
// sums.
TEST(bytes_moved) {
  constexpr int64_t kRows = 140, kColumns = 1032, kRow = kColumns * 2;
  Problem<bfloat16, bfloat16> p({.rows = kRows, .columns = kColumns});
  const RmsNormConfig backward = choose_rms_norm_backward(planned(kRows, kColumns, 2));
  p.make_room(rms_norm_partial_rows(backward));
  under_every_seed([&] {
    expect_ok(rms_norm_forward_cuda(p.forward, nullptr));
    const int64_t weights = kRows / choose_norm_forward(planned_forward(kRows, kColumns, 2)).rows;
    expect_bytes({.read = kRows * kRow + weights * kRow, .written = kRows * kRow + kRows * 4});
    sim::counters() = {};
    expect_ok(rms_norm_backward_cuda(p.backward, nullptr));
    const int64_t partials = backward.blocks * kColumns * 4;
    expect_bytes({.read = 2 * kRows * kRow + backward.blocks * kRow + partials +
                          kRows * 4 * backward.lanes,  // rstd by every thread
                  .written = kRows * kRow + partials + kRow});
  });
}

// Every forward kernel stores rstd once a row, or not at all where it is not wanted.
TEST(rstd_is_stored_once_a_row_where_it_is_wanted) {
  for (const int64_t columns : {16, 264, 1032, 8200, 33, 4097}) {
    Problem<bfloat16, bfloat16> p({.rows = 5, .columns = columns});
    const int64_t y_bytes = 5 * columns * 2;
    under_every_seed([&] {
      sim::counters() = {};
      p.forward.rstd = p.rstd.data();
      expect_ok(rms_norm_forward_cuda(p.forward, nullptr));
      expect_equal("bytes written, with rstd", sim::counters().global_bytes_written, y_bytes + 5 * 4);
      sim::counters() = {};
      p.forward.rstd = nullptr;
      p.y.poison();
      expect_ok(rms_norm_forward_cuda(p.forward, nullptr));
      expect_equal("bytes written, without", sim::counters().global_bytes_written, y_bytes);
      p.check_forward();
    });
  }
}

TEST(unknown_dtype_is_refused) {
  Problem<float, float> p({.rows = 1, .columns = 4});
  p.forward.dtype = p.forward.weight_dtype = Dtype::float64;
  expect_refused(rms_norm_forward_cuda(p.forward, nullptr), "float64");
}

std::string choice(const RmsNormConfig& c) {
  std::string text = name(c.kernel);
  for (const int64_t n : {int64_t{c.vector_elems}, int64_t{c.vectors}, int64_t{c.lanes}, int64_t{c.threads},
                          int64_t{c.stages}, c.shared_bytes, c.blocks})
    text += " " + std::to_string(n);
  return text;
}

std::string choice(const NormConfig& c) {
  std::string text = std::string(name(c.kernel)) + " " + name(c.scope);
  for (const int64_t n : {int64_t{c.vector_elems}, int64_t{c.vectors}, int64_t{c.rows}, int64_t{c.lanes},
                          int64_t{c.threads}, int64_t{c.cluster}, c.blocks})
    text += " " + std::to_string(n);
  return text;
}

// What is chosen for 4,096 rows of 16-bit elements on an H200, at both sides of every boundary: kernel, elements of an
// access, vectors and lanes of a row, threads, stages, shared bytes, blocks; forward: kernel, scope, elements of an
// access, vectors, rows together, lanes, threads, cluster, blocks. A choice must not change by accident.
TEST(the_chooser) {
  struct Choice {
    int64_t columns;
    const char *forward, *backward;
  };
  const Choice choices[] = {
      {8, "registers group 8 1 4 1 64 1 16", "ring 8 1 1 256 2 16384 16"},
      {16, "registers group 8 1 4 2 64 1 32", "ring 8 2 1 256 2 32768 16"},
      {32, "registers group 8 1 4 4 64 1 64", "ring 8 2 2 256 2 32768 32"},
      {64, "registers group 8 1 4 8 64 1 128", "ring 8 2 4 256 2 32768 64"},
      {128, "registers group 8 1 4 16 64 1 256", "ring 8 2 8 256 2 32768 128"},
      {136, "registers group 8 1 4 32 64 1 512", "ring 8 2 16 256 2 32768 256"},
      {248, "registers group 8 1 4 32 64 1 512", "ring 8 2 16 256 2 32768 256"},
      {256, "registers group 8 1 4 32 64 1 512", "ring 8 2 16 256 2 32768 256"},
      {264, "registers group 8 2 1 32 64 1 2048", "ring 8 2 32 128 3 24576 396"},
      {512, "registers group 8 2 1 32 64 1 2048", "ring 8 2 32 128 3 24576 396"},
      {520, "registers group 8 3 1 32 64 1 2048", "ring 8 3 32 128 3 36864 396"},
      {768, "registers group 8 3 1 32 64 1 2048", "ring 8 3 32 128 3 36864 396"},
      {776, "registers group 8 4 1 32 64 1 2048", "ring 8 4 32 128 3 49152 396"},
      {1016, "registers group 8 4 1 32 64 1 2048", "ring 8 4 32 128 3 49152 396"},
      {1024, "registers group 8 4 1 32 64 1 2048", "ring 8 4 32 128 3 49152 396"},
      {1032, "registers block 8 2 1 96 96 1 4096", "ring 8 1 160 160 3 15360 528"},
      {4096, "registers block 8 2 1 256 256 1 4096", "ring 8 1 512 512 3 49152 264"},
      {4104, "registers block 8 4 1 160 160 1 4096", "ring 8 1 544 544 3 52224 132"},
      {8192, "shared block 8 4 1 256 256 1 4096", "ring 8 1 1024 1024 3 98304 132"},
      {8200, "registers block 8 4 1 288 288 1 4096", "ring 8 3 352 352 2 67584 132"},
      {12288, "shared block 8 6 1 256 256 1 4096", "ring 8 3 512 512 2 98304 132"},
      {12296, "registers block 8 4 1 416 416 1 4096", "ring 8 4 416 416 2 106496 132"},
      {16384, "registers block 8 4 1 512 512 1 4096", "ring 8 4 512 512 2 131072 132"},
      {16392, "registers cluster 8 4 1 288 288 2 8192", "looped 8 1 512 512 0 0 528"},
      {32768, "registers cluster 8 4 1 512 512 2 8192", "looped 8 1 512 512 0 0 528"},
      {32776, "registers cluster 8 4 1 288 288 4 16384", "looped 8 1 1024 1024 0 0 528"},
      {4097, "looped block 1 1 1 1024 1024 1 4096", "looped 1 1 1024 1024 0 0 528"},
  };
  for (const Choice& expected : choices) {
    const RmsNormProblem p = planned(4096, expected.columns, 2);
    const auto check = [&](const RmsNormConfig& c, const std::string& text) {
      expect(choice(c) == text, "backward of " + std::to_string(p.columns) + ": " + choice(c));
      const int64_t block = c.shared_bytes + 1024 + 512,
                    together = (c.blocks + p.multiprocessors - 1) / p.multiprocessors;
      if (c.kernel == RmsNormKernel::ring && c.blocks < p.rows)
        expect(together * block <= p.max_shared_bytes + 1024, "the blocks of a multiprocessor have room in it");
    };
    check(choose_rms_norm_backward(p), expected.backward);
    const std::string forward = choice(choose_norm_forward(planned_forward(4096, expected.columns, 2)));
    expect(forward == expected.forward, "forward of " + std::to_string(expected.columns) + ": " + forward);
  }
  // Rows in shared memory where they were measured, and nowhere else.
  const auto is = [](NormKernel kernel, int64_t rows, int64_t columns, const auto& change) {
    NormProblem p = planned_forward(rows, columns, 2);
    change(p);
    expect(choose_norm_forward(p).kernel == kernel, choice(choose_norm_forward(p)));
  };
  const auto as_it_is = [](NormProblem&) {};
  is(NormKernel::shared, 4096, 8192, [](NormProblem& p) { p.layer = true; });
  for (const int64_t rows : {1, 3 * 132, 3 * 132 + 1, 8 * 132, 8 * 132 + 1}) {
    is(NormKernel::shared, rows, 12288, as_it_is);
    expect(choose_norm_forward(planned_forward(rows, 12288, 2)).weights_with_row == (rows <= 3 * 132 || rows > 8 * 132),
           "few blocks a multiprocessor ask for the weight with the row");
  }
  is(NormKernel::registers, 4 * 132, 8192, as_it_is);
  is(NormKernel::registers, 4096, 8192, [](NormProblem& p) { p.residual_bytes = 2; });
  is(NormKernel::registers, 1024, 12288, [](NormProblem& p) { p.affine_as_x = false; });
  is(NormKernel::registers, 1024, 6144, [](NormProblem& p) { p.element_bytes = 4; });
  is(NormKernel::registers, 1024, 12288, [](NormProblem& p) { p.clusters = false; });
  is(NormKernel::registers, 1024, 12288, [](NormProblem& p) { p.max_shared_bytes = 99 * 1024; });
  RmsNormProblem p = planned(1, 16384, 2);
  expect_equal("one row", choose_rms_norm_backward(p).blocks, int64_t{1});
  p.max_shared_bytes = 99 * 1024;  // compute capability 8.6: two stages of dy and x do not fit
  expect(choice(choose_rms_norm_backward(p)) == "looped 8 1 512 512 0 0 1", choice(choose_rms_norm_backward(p)));
  p.max_shared_bytes = 163 * 1024;  // 8.0
  expect(choice(choose_rms_norm_backward(p)) == "ring 8 4 512 512 2 131072 1", choice(choose_rms_norm_backward(p)));
  p.aligned = false;
  expect(choice(choose_rms_norm_backward(p)) == "looped 1 1 1024 1024 0 0 1", choice(choose_rms_norm_backward(p)));
  expect_equal("rows of partial sums, one a group", rms_norm_partial_rows(choose_rms_norm_backward(planned(20, 5, 2))),
               int64_t{24});
}

// 2^31 elements and more, in memory that is never touched but for the rows under test: row starts need 64 bits.
TEST(beyond_2_31_elements) {
  constexpr int64_t kRows = 3, kColumns = 768, kStride = int64_t{1} << 31;
  sim::SparseMemory<bfloat16> x(kRows * kStride);
  Problem<bfloat16, bfloat16> near({.rows = kRows, .columns = kColumns});
  for (int64_t r = 0; r < kRows; ++r) std::memcpy(x.data() + r * kStride, near.x.data() + r * kColumns, kColumns * 2);
  near.forward.x = x.data();
  near.forward.x_stride = kStride;
  under_every_seed([&] {
    near.y.poison();
    expect_ok(rms_norm_forward_cuda(near.forward, nullptr));
    near.check_forward();
  });
}

template <class T, class W> void run_random(Random& random) {
  Shape s{.rows = random.size(1, 40), .columns = random.size(1, 2100)};
  if (random.coin()) s.columns = (s.columns + 7) / 8 * 8;
  s.padding = random.choice<int64_t>({0, 8, 1});
  s.offset = static_cast<size_t>(random.choice<int64_t>({0, 0, 0, 1}));
  s.weight = random.integer(0, 4) > 0;
  s.weight_offset = random.coin() ? 1 : 0;
  Problem<T, W>(s, random.bits() % 1000).run();
}

RANDOM_TEST(random_problems) {
  switch (random.integer(0, 4)) {
    case 0: return run_random<bfloat16, bfloat16>(random);
    case 1: return run_random<float, float>(random);
    case 2: return run_random<float16, float16>(random);
    case 3: return run_random<bfloat16, float>(random);
    default: return run_random<float16, float>(random);
  }
}

}  // namespace
}  // namespace warpsmith::test
