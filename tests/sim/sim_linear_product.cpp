// The Hopper products against plain loops: every kernel, every edge, both types; what Python's law cannot choose.
// links: csrc/kernels/linear/product.cu
// links: csrc/kernels/linear/hopper/product_nt_sm90a.cu
// links: csrc/kernels/linear/hopper/product_nn_sm90a.cu
// links: csrc/kernels/linear/hopper/product_tn_sm90a.cu
// links: csrc/kernels/linear/hopper/product_float8_sm90a.cu
#include <map>

#include "device/float8.h"
#include "far.h"
#include "kernels/linear/hopper/product_sm90_pipeline.cuh"
#include "kernels/linear/linear.h"

namespace warpsmith::test {
namespace {

using Epilogue = ProductEpilogue;

template <class T> double rounded(double x) {
  return static_cast<double>(to_float(from_float<T>(static_cast<float>(x))));
}

// A problem of small integers, whose sums are exact in any order. gap: elements between rows of a and b. other: the
// second form of an epilogue, which keeps z, sums columns, adds to out, or has scales of rows.
template <class T> struct Problem {
  ProductKernel kernel;
  bool a_turned, b_turned;
  ProductParams p;
  Buffer<T> a, b, bias, z, out, up, up_bias, up_z;
  Buffer<float> wide, partials, column_sums, a_scale, b_scale;

  static int64_t stride(int64_t width, int64_t gap) { return (width + 7) / 8 * 8 + gap; }
  static size_t elements(int64_t rows, int64_t width) { return static_cast<size_t>(rows * width); }
  Problem(const ProductKernel& which, int64_t m, int64_t n, int64_t k, int64_t gap, bool with_bias, bool other)
      : kernel(which),
        a_turned(which.layout == ProductLayout::tn),
        b_turned(which.layout != ProductLayout::nt),
        p{.a_stride = stride(a_turned ? m : k, gap),
          .b_stride = stride(b_turned ? n : k, gap),
          .up_stride = stride(k, 8 - gap),
          .z_stride = n},
        a(elements(a_turned ? k : m, p.a_stride)),
        b(elements(b_turned ? k : n, p.b_stride)),
        bias(elements(1, n)),
        z(elements(m, n)),
        out(elements(m, n)),
        up(elements(n, p.up_stride)),
        up_bias(elements(1, n)),
        up_z(elements(m, n)),
        wide(elements(m, n)),
        partials(elements(partial_rows(m), n)),
        column_sums(elements(1, n)),
        a_scale(elements(which.blocks() ? (k + 63) / 64 : 1, m)),
        b_scale(elements(which.blocks() ? (k + 63) / 64 : 1, n)) {
    Random random(7);
    for (Buffer<T>* x : {&a, &b, &bias, &z, &up, &up_bias})
      for (size_t i = 0; i < x->size(); ++i) (*x)[i] = from_float<T>(static_cast<float>(random.bits() % 3) - 1.0f);
    const Epilogue e = p.epilogue = kernel.epilogue;
    p.a = a.data(), p.b = b.data(), p.out = e == Epilogue::wide ? static_cast<void*>(wide.data()) : out.data();
    p.rows = m, p.columns = n, p.inner = k, p.layout = kernel.layout, p.add = other;
    p.activation = LinearActivation::relu;
    p.dtype = std::is_same_v<T, bfloat16> ? Dtype::bfloat16 : Dtype::float16;
    if (with_bias && kernel.takes_bias()) p.bias = bias.data();
    if (kernel.reads() || (kernel.computes() && other)) p.z = z.data();
    if (kernel.gated()) {
      p.up = up.data();
      if (with_bias == (gap == 0)) p.up_bias = up_bias.data();  // each bias with and without the other
      if (other) p.up_z = up_z.data();
    }
    if (kernel.float8()) take_float8(random, other, gap == 0);
    if (e == Epilogue::derivative && other) p.partials = partials.data(), p.column_sums = column_sums.data();
  }
  // Bytes of -1, 0 and 1, in pairs; scales that are powers of two, of rows (blocks: of squares of b) or not.
  void take_float8(Random& random, bool by_rows, bool both) {
    const auto fill = [&](Buffer<T>& x, unsigned one) {
      const auto code = [&] { return random.coin() ? one | random.bits() % 2 << 7 : 0; };
      for (size_t i = 0; i < x.size(); ++i) x[i].bits = static_cast<uint16_t>(code() | code() << 8);
    };
    fill(a, kernel.factors == ProductFactors::e5m2 ? 0x3c : 0x38);
    fill(b, 0x38);
    for (Buffer<float>* x : {&a_scale, &b_scale})
      for (size_t i = 0; i < x->size(); ++i) (*x)[i] = static_cast<float>(1 << random.bits() % 3);
    p.factors = kernel.factors;
    p.scales = kernel.blocks() ? ProductScales::blocks : by_rows ? ProductScales::rows : ProductScales::one;
    p.b_squares = kernel.blocks() && by_rows;
    p.a_scale = a_scale.data();
    if (both || kernel.blocks()) p.b_scale = b_scale.data();
  }
  double scale(int64_t i, int64_t j, int64_t k) const {
    const int64_t block = k / 64, blocks = (p.inner + 63) / 64;
    const bool one = p.scales == ProductScales::one;
    const auto of = [](const float* x, int64_t at) { return x ? static_cast<double>(x[at]) : 1; };
    if (!kernel.blocks()) return of(p.a_scale, one ? 0 : i) * of(p.b_scale, one ? 0 : j);
    return of(p.a_scale, i * blocks + block) *
           of(p.b_scale, p.b_squares ? j / 128 * blocks + block : block * p.columns + j);
  }
  double term(int64_t i, int64_t j) const {
    if (!kernel.float8()) return at(a, i) * at(b, j);
    const int x = a[static_cast<size_t>(i)].bits, y = b[static_cast<size_t>(j)].bits;
    double both = 0;
    for (int shift : {0, 8}) {
      const auto left = static_cast<uint8_t>(x >> shift), right = static_cast<uint8_t>(y >> shift);
      both += static_cast<double>((kernel.factors == ProductFactors::e5m2 ? device::to_float(float8_e5m2{left})
                                                                          : device::to_float(float8_e4m3{left})) *
                                  device::to_float(float8_e4m3{right}));
    }
    return both;
  }
  double at(const Buffer<T>& x, int64_t i) const { return static_cast<double>(to_float(x[static_cast<size_t>(i)])); }
  double sum(int64_t i, int64_t j) const {
    double s = 0;
    for (int64_t l = 0; l < p.inner; ++l)
      s +=
          term(a_turned ? l * p.a_stride + i : i * p.a_stride + l, b_turned ? l * p.b_stride + j : j * p.b_stride + l) *
          scale(i, j, l);
    return s + (p.bias ? at(bias, j) : 0);
  }
  double up_sum(int64_t i, int64_t j) const {
    double s = p.up_bias ? at(up_bias, j) : 0;
    for (int64_t l = 0; l < p.inner; ++l) s += at(a, i * p.a_stride + l) * at(up, j * p.up_stride + l);
    return s;
  }
  void run_and_compare() {
    const Epilogue e = kernel.epilogue;
    std::vector<double> expected(out.size()), kept(out.size()), up_kept(out.size()), sums(partials.size()),
        totals(column_sums.size());
    for (int64_t i = 0; i < p.rows; ++i)
      for (int64_t j = 0; j < p.columns; ++j) {
        const auto here = static_cast<size_t>(i * p.columns + j);
        const double s = kept[here] = sum(i, j), x = at(z, i * p.columns + j);
        const double u = up_kept[here] = kernel.gated() ? up_sum(i, j) : 0;
        const double y = e == Epilogue::activate     ? std::max(s, 0.0)
                         : e == Epilogue::gated      ? rounded<T>(std::max(s, 0.0) * u)
                         : e == Epilogue::residual   ? s + x
                         : e == Epilogue::derivative ? (x > 0 ? s : 0)
                         : e == Epilogue::wide       ? s + (p.add ? static_cast<double>(here % 5) : 0)
                         : kernel.float8()           ? rounded<T>(s)
                                                     : s;
        sums[static_cast<size_t>((i / 128 * 3 + (i / 16 % 8 + j / 64 % 4) % 3) * p.columns + j)] += expected[here] = y;
        totals[static_cast<size_t>(j)] += y;
      }
    under_every_seed([&] {
      out.poison();
      partials.poison();
      column_sums.poison();
      up_z.poison();
      if (!kernel.reads()) z.poison();
      for (size_t i = 0; i < wide.size(); ++i) wide[i] = static_cast<float>(i % 5);
      ProductPlan plan{&kernel};
      expect_ok(product_workspace_cuda(p, &plan));
      Buffer<float> shares(static_cast<size_t>(plan.sums));
      std::vector<int> flags(static_cast<size_t>(plan.flags));
      p.sums = shares.data(), p.flags = flags.data();
      expect_ok(product_cuda(p, plan, nullptr));
      e == Epilogue::wide ? expect_close("wide", wide, expected, {}) : expect_close("out", out, expected, {});
      if (!kernel.reads() && p.z) expect_close("z", z, kept, {});
      if (p.up_z) expect_close("up_z", up_z, up_kept, {});
      if (p.partials) expect_close("partials", partials, sums, {}), expect_close("sums", column_sums, totals, {});
    });
  }
};

template <class... A> void compare(const ProductKernel& kernel, bool bf16, A... a) {
  bf16 ? Problem<bfloat16>(kernel, a...).run_and_compare() : Problem<float16>(kernel, a...).run_and_compare();
}

// Several tiles a cluster, so that a tile is stored under the next one's products; where sums are split, three tiles
// for two, five and seven clusters. Both forms of each kernel.
TEST(every_product_of_several_tiles) {
  NEEDS_SM90_CODE;
  const SeedsAtMost few(3);
  for (const ProductKernel& kernel : kProducts)
    for (int multiprocessors : {4, 10, 14}) {
      if ((!kernel.splits && multiprocessors > 4) || kernel.symmetric() || kernel.siblings()) continue;
      const int64_t m = 2 * kernel.tile.rows * kernel.tile.cluster_rows + 17, n = kernel.splits ? 24 : 264;
      on_machine(multiprocessors, 90, [&] {
        compare(kernel, true, m, n, 208, 0, true, true);
        compare(kernel, false, m, n, kernel.splits ? 300 : 72, 8, false, false);
        if (kernel.float8()) compare(kernel, true, m, n, 40, 0, true, true);  // a stage is the first and the last
      });
    }
}

// More stages than an epilogue has steps: z of the next tile is fetched before the sum ends.
TEST(every_epilogue_of_a_long_sum) {
  NEEDS_SM90_CODE;
  const SeedsAtMost few(3);
  for (const ProductKernel& kernel : kProducts)
    if (kernel.computes() && !kernel.symmetric())
      on_machine(2, 90, [&] { compare(kernel, true, 600, 200, 1480, 0, true, true); });
}

// Whole units, fronts, and a pool of what they leave: every stage of every sum once, and others in the order of k.
TEST(shares_cover_every_sum_once) {
  for (int clusters = 2; clusters < 14; ++clusters)
    for (int units = 1; units < 2 * clusters; ++units)
      for (int blocks = 1; blocks < 12; ++blocks) {
        linear::ProductArguments a{};
        a.blocks = blocks, a.units = units, a.whole = units / clusters * clusters;
        std::map<int, linear::Share> slots, first;
        linear::Share x{};
        for (int c = 0; c < clusters; ++c)
          for (linear::ProductShares<true> shares(a, c, clusters); shares.next(&x);)
            expect(x.begin > 0 ? slots.emplace(x.slot, x).second : first.emplace(x.unit, x).second, "one share a slot");
        const linear::ProductShares<true> shares(a, 0, clusters);
        for (int unit = 0; unit < units; ++unit) {
          int end = first[unit].end, step = 1;
          for (int slot; end < blocks && (slot = shares.next_other(unit, &step)) >= 0; end = slots[slot].end)
            expect(slots[slot].unit == unit && slots[slot].begin == end, "the next share of a sum");
          expect_equal("stages added", end, blocks);
        }
      }
}

RANDOM_TEST(products_of_any_size) {
  NEEDS_SM90_CODE;
  const ProductKernel& kernel = kProducts[random.integer(0, std::size(kProducts) - 1)];
  const int64_t m = random.size(1, 300), n = 8 * random.size(1, 40), k = random.size(1, 140);
  if (kernel.symmetric() || kernel.siblings()) return;
  on_machine(2, 90,
             [&] { compare(kernel, random.coin(), m, n, k, 8 * random.integer(0, 1), random.coin(), random.coin()); });
}

// ---- several weights in one launch

// Small integers. nt: x [m, common] by weights [width, common], of which the bits of `biased` say which have a bias.
// nn: the sum of products of [m, width] and [width, common]. Rows of what is read lie `gap` elements further apart.
template <class T> struct Siblings {
  bool nt;
  int64_t m, common, gap;
  std::vector<int64_t> widths;
  unsigned biased = 0;

  void run_and_compare() const {
    Random random(7);
    std::vector<Buffer<T>> kept;  // moves no memory
    kept.reserve(16);
    const auto drawn = [&](int64_t rows, int64_t stride) -> const T* {
      Buffer<T>& x = kept.emplace_back(static_cast<size_t>(rows * stride));
      for (size_t i = 0; i < x.size(); ++i) x[i] = from_float<T>(static_cast<float>(random.bits() % 3) - 1.0f);
      return x.data();
    };
    const auto at = [](const void* x, int64_t i) { return static_cast<double>(to_float(static_cast<const T*>(x)[i])); };
    const auto stride = [&](int64_t width) { return (width + 7) / 8 * 8 + gap; };
    ProductParams p;
    p.layout = nt ? ProductLayout::nt : ProductLayout::nn, p.epilogue = Epilogue::siblings;
    p.dtype = std::is_same_v<T, bfloat16> ? Dtype::bfloat16 : Dtype::float16;
    p.rows = m, (nt ? p.inner : p.columns) = common;
    if (nt) p.a_stride = stride(common), p.a = drawn(m, p.a_stride);
    std::vector<Buffer<T>> outs;
    outs.reserve(kMostSiblings);
    std::vector<std::vector<double>> expected;
    const auto add_out = [&](int64_t columns) {
      expected.emplace_back(static_cast<size_t>(m * columns));
      return outs.emplace_back(expected.back().size()).data();
    };
    if (!nt) p.out = add_out(common);
    for (const int64_t width : widths) {
      ProductSibling& s = p.siblings[p.sibling_count];
      s.width = width, s.b_stride = stride(common), s.b = drawn(width, s.b_stride);
      if (nt) s.out = add_out(width);
      if (!nt) s.a_stride = stride(width), s.a = drawn(m, s.a_stride);
      if (biased >> p.sibling_count & 1) s.bias = drawn(1, width);
      for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < width; ++j) {
          double sum = s.bias ? at(s.bias, j) : 0;
          for (int64_t k = 0; k < common; ++k) {
            const double b = at(s.b, j * s.b_stride + k);
            nt ? sum += at(p.a, i * p.a_stride + k) * b
               : expected[0][static_cast<size_t>(i * common + k)] += at(s.a, i * s.a_stride + j) * b;
          }
          if (nt) expected.back()[static_cast<size_t>(i * width + j)] = sum;
        }
      (nt ? p.columns : p.inner) += width;
      ++p.sibling_count;
    }
    under_every_seed([&] {
      for (Buffer<T>& out : outs) out.poison();
      expect_ok(product_cuda(p, {find_product({p.layout, p.epilogue, false, kWideTile})}, nullptr));
      for (size_t i = 0; i < outs.size(); ++i) expect_close("out", outs[i], expected[i], {});
    });
  }
};

// Several tiles a cluster, of one weight and of the next; weights that end within a tile and within a stage.
TEST(several_weights_in_one_launch) {
  NEEDS_SM90_CODE;
  const SeedsAtMost few(3);
  on_machine(4, 90, [&] {
    for (const bool nt : {true, false}) {
      Siblings<bfloat16>{nt, 280, 208, 0, {264, 8, 72}, nt ? 5u : 0}.run_and_compare();
      Siblings<float16>{nt, 17, 72, 8, {72, 72, 328}, nt ? 2u : 0}.run_and_compare();
      Siblings<bfloat16>{nt, 530, 264, 0, {136, 264}}.run_and_compare();
    }
  });
}

RANDOM_TEST(several_weights_of_any_size) {
  NEEDS_SM90_CODE;
  const bool nt = random.coin();
  std::vector<int64_t> widths;
  for (int64_t i = random.integer(2, kMostSiblings); i > 0; --i) widths.push_back(8 * random.size(1, 40));
  const int64_t m = random.size(1, 300), common = 8 * random.size(1, 20), gap = 8 * random.integer(0, 1);
  const auto biased = static_cast<unsigned>(nt ? random.integer(0, 7) : 0);
  on_machine(static_cast<int>(2 * random.integer(1, 2)), 90, [&] {
    random.coin() ? Siblings<bfloat16>{nt, m, common, gap, widths, biased}.run_and_compare()
                  : Siblings<float16>{nt, m, common, gap, widths, biased}.run_and_compare();
  });
}

// Queries, keys and values of models, whose widths are {q, k, k}, on 66 clusters.
TEST(several_weights_are_one_launch_where_that_takes_fewer_waves) {
  const auto problem = [](ProductLayout layout, int64_t rows, int64_t common, int64_t q, int64_t k) {
    const bool nt = layout == ProductLayout::nt;
    ProductProblem p{rows, nt ? q + 2 * k : common, nt ? common : q + 2 * k, layout, Epilogue::siblings};
    p.widths[0] = q, p.widths[1] = p.widths[2] = k;
    return p;
  };
  const auto waves = [&](int64_t rows, int64_t common, int64_t q, int64_t k) {
    const ProductProblem p = problem(ProductLayout::nt, rows, common, q, k);
    expect((choose_product(p).kernel != nullptr) == (sibling_waves(p, true) < sibling_waves(p, false)), "chosen");
    return std::pair(sibling_waves(p, false), sibling_waves(p, true));
  };
  expect(waves(8192, 2048, 2048, 512) == std::pair<int64_t, int64_t>(6, 6), "Llama 1.2B");
  expect(waves(16384, 4096, 4096, 1024) == std::pair<int64_t, int64_t>(24, 24), "Llama 8B");
  expect(waves(12288, 1536, 1536, 256) == std::pair<int64_t, int64_t>(7, 6), "Qwen2 1.5B");
  expect(waves(2048, 4096, 4096, 1024) == std::pair<int64_t, int64_t>(4, 3), "Llama 8B, few rows");
  const auto gradient = [&](int64_t rows, int64_t q) {
    return choose_product(problem(ProductLayout::nn, rows, 2048, q, 512)).kernel != nullptr;
  };
  expect(gradient(8192, 2048) && !gradient(1024, 2048) && !gradient(8192, 16384), "input gradients");
}

// ---- symmetric products

// out = alpha x y^T + 0.5 z of `batches` matrices, z symmetric. y is x, or x again with rows of another stride.
// turned: the columns of x and y lie adjacent. Rows and matrices of x, and rows of z, lie `gap` elements apart.
template <class T> struct Symmetric {
  int64_t batches, n, k, gap;
  bool turned, other, with_z;
  float alpha = 1;

  void run_and_compare() const {
    const int64_t lines = turned ? k : n, width = turned ? n : k, stride = (width + 7) / 8 * 8 + gap;
    const int64_t apart = lines * stride + gap, other_stride = stride + 8, z_stride = n + gap;
    Buffer<T> x(static_cast<size_t>(batches * apart)), y(static_cast<size_t>(batches * lines * other_stride)),
        z(static_cast<size_t>(batches * n * z_stride)), out(static_cast<size_t>(batches * n * n));
    Random random(7);
    const auto drawn = [&] { return from_float<T>(static_cast<float>(random.bits() % 3) - 1.0f); };
    std::vector<double> expected(out.size()), row(static_cast<size_t>(n * k));
    for (int64_t b = 0; b < batches; ++b) {
      for (int64_t line = 0; line < lines; ++line)
        for (int64_t c = 0; c < width; ++c) {
          const T v = drawn();
          x[static_cast<size_t>(b * apart + line * stride + c)] = v;
          y[static_cast<size_t>((b * lines + line) * other_stride + c)] = v;
          row[static_cast<size_t>(turned ? c * k + line : line * k + c)] = static_cast<double>(to_float(v));
        }
      for (int64_t i = 0; i < n; ++i)
        for (int64_t j = i; j < n; ++j) {
          const T c = z[static_cast<size_t>((b * n + i) * z_stride + j)] =
              z[static_cast<size_t>((b * n + j) * z_stride + i)] = drawn();
          double sum = 0;
          for (int64_t l = 0; l < k; ++l)
            sum += row[static_cast<size_t>(i * k + l)] * row[static_cast<size_t>(j * k + l)];
          double e = rounded<T>(static_cast<double>(alpha) * sum);
          if (with_z) e = rounded<T>(e + 0.5 * static_cast<double>(to_float(c)));
          expected[static_cast<size_t>((b * n + i) * n + j)] = expected[static_cast<size_t>((b * n + j) * n + i)] = e;
        }
    }
    ProductParams p{.a = x.data(), .b = x.data(), .a_stride = stride, .b_stride = stride, .out = out.data()};
    p.rows = p.columns = n, p.inner = k, p.batches = batches, p.a_apart = p.b_apart = apart;
    if (other) p.b = y.data(), p.b_stride = other_stride, p.b_apart = lines * other_stride;
    if (with_z) p.z = z.data(), p.z_stride = z_stride, p.z_apart = n * z_stride;
    p.layout = turned ? ProductLayout::tn : ProductLayout::nt, p.epilogue = Epilogue::symmetric;
    p.alpha = alpha, p.beta = 0.5f;
    p.dtype = std::is_same_v<T, bfloat16> ? Dtype::bfloat16 : Dtype::float16;
    under_every_seed([&] {
      out.poison();
      expect_ok(product_cuda(p, {find_product({p.layout, p.epilogue, false, kWideTile})}, nullptr));
      expect_close("out", out, expected, {});
    });
  }
};

// Several tiles a cluster; long sums, and short ones whose tiles are stored in few stages.
TEST(symmetric_products) {
  NEEDS_SM90_CODE;
  const SeedsAtMost few(3);
  on_machine(4, 90, [&] {
    Symmetric<bfloat16>{1, 8, 16, 0, false, false, false}.run_and_compare();
    Symmetric<bfloat16>{2, 264, 80, 8, true, false, true, 2}.run_and_compare();
    Symmetric<float16>{2, 520, 24, 0, false, true, true}.run_and_compare();
    Symmetric<bfloat16>{1, 264, 1736, 0, false, false, true, -1}.run_and_compare();
  });
}

RANDOM_TEST(symmetric_products_of_any_size) {
  NEEDS_SM90_CODE;
  const int64_t batches = random.integer(1, 3), n = 8 * random.size(1, 40), k = random.size(1, 140);
  const bool turned = random.coin(), other = random.coin(), with_z = random.coin();
  const float alpha = static_cast<float>(random.integer(-1, 2));
  on_machine(static_cast<int>(2 * random.integer(1, 3)), 90, [&] {
    random.coin() ? Symmetric<bfloat16>{batches, n, k, 0, turned, other, with_z, alpha}.run_and_compare()
                  : Symmetric<float16>{batches, n, k, 8, turned, other, with_z, alpha}.run_and_compare();
  });
}

TEST(units_of_a_triangle_are_visited_once) {
  for (int side = 1; side < 40; ++side) {
    std::map<std::pair<int, int>, int> seen;
    const int all = static_cast<int>(triangle_units(side));
    for (int unit = 2 * all; unit < 3 * all; ++unit) {
      const linear::TilePlace u = linear::triangle_unit(unit, side);
      expect(u.batch == 2 && 0 <= u.row && u.row <= u.column && u.column < side, "on or above the diagonal");
      ++seen[{u.row, u.column}];
    }
    expect_equal("units", static_cast<int>(seen.size()), all);
  }
}

TEST(symmetric_products_run_where_they_save_waves) {
  const auto ours = [](int64_t batches, int64_t n) {
    ProductProblem p{n, n, 2048, ProductLayout::nt, Epilogue::symmetric};
    p.batches = batches;
    const ProductPlan plan = choose_product(p);
    return plan.kernel != nullptr;
  };
  expect(ours(16, 2048) && ours(4, 4096) && ours(1, 8192), "large products are ours");
  expect(!ours(1, 2048) && !ours(1, 128), "half of one wave is a wave");
}

TEST(rows_beyond_element_2_31) {
  NEEDS_SM90_CODE;
  constexpr int64_t kRows = 100, kSize = 64;
  Problem<bfloat16> near(kProducts[0], kRows, kSize, kSize, 0, true, false);
  const int64_t first = first_far_row(kSize, kRows, 256);
  Far<bfloat16> a(near.a, first, kSize), out(near.out, first, kSize);
  ProductParams p = near.p;
  p.a = a.data(), p.out = out.data(), p.rows = first + kRows;
  const FarMachine machine(1);
  expect_ok(product_cuda(p, {&kProducts[0]}, nullptr));
  out.fetch();
  std::vector<double> expected;
  for (int64_t i = 0; i < kRows * kSize; ++i) expected.push_back(near.sum(i / kSize, i % kSize));
  expect_close("out", near.out, expected, {});
}

}  // namespace
}  // namespace warpsmith::test
