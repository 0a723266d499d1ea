// The Hopper products against plain loops: every kernel, every edge, both types; what Python's law cannot choose.
// links: csrc/kernels/linear/product.cu
// links: csrc/kernels/linear/hopper/product_nt_sm90a.cu
// links: csrc/kernels/linear/hopper/product_nn_sm90a.cu
// links: csrc/kernels/linear/hopper/product_tn_sm90a.cu
#include <map>

#include "far.h"
#include "kernels/linear/hopper/product_sm90_pipeline.cuh"
#include "kernels/linear/linear.h"

namespace warpsmith::test {
namespace {

using Epilogue = ProductEpilogue;

// A problem of small integers, whose sums are exact in any order. gap: elements between rows of a and b. other: the
// second form of an epilogue, which keeps z, sums columns or adds to out.
template <class T> struct Problem {
  ProductKernel kernel;
  bool a_turned, b_turned;
  ProductParams p;
  Buffer<T> a, b, bias, z, out, up, up_bias, up_z;
  Buffer<float> wide, partials, column_sums;

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
        column_sums(elements(1, n)) {
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
    if (e == Epilogue::derivative && other) p.partials = partials.data(), p.column_sums = column_sums.data();
  }
  static double rounded(double x) { return static_cast<double>(to_float(from_float<T>(static_cast<float>(x)))); }
  double at(const Buffer<T>& x, int64_t i) const { return static_cast<double>(to_float(x[static_cast<size_t>(i)])); }
  double sum(int64_t i, int64_t j) const {
    double s = p.bias ? at(bias, j) : 0;
    for (int64_t l = 0; l < p.inner; ++l)
      s += at(a, a_turned ? l * p.a_stride + i : i * p.a_stride + l) *
           at(b, b_turned ? l * p.b_stride + j : j * p.b_stride + l);
    return s;
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
                         : e == Epilogue::gated      ? rounded(std::max(s, 0.0) * u)
                         : e == Epilogue::residual   ? s + x
                         : e == Epilogue::derivative ? (x > 0 ? s : 0)
                         : e == Epilogue::wide       ? s + (p.add ? static_cast<double>(here % 5) : 0)
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
      if (!kernel.splits && multiprocessors > 4) continue;
      const int64_t m = 2 * kernel.tile.rows * kernel.tile.cluster_rows + 17, n = kernel.splits ? 24 : 264;
      on_machine(multiprocessors, 90, [&] {
        compare(kernel, true, m, n, 208, 0, true, true);
        compare(kernel, false, m, n, kernel.splits ? 300 : 72, 8, false, false);
      });
    }
}

// More stages than an epilogue has steps: z of the next tile is fetched before the sum ends.
TEST(every_epilogue_of_a_long_sum) {
  NEEDS_SM90_CODE;
  const SeedsAtMost few(3);
  for (const ProductKernel& kernel : kProducts)
    if (kernel.computes()) on_machine(2, 90, [&] { compare(kernel, true, 600, 200, 1480, 0, true, true); });
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
  on_machine(2, 90,
             [&] { compare(kernel, random.coin(), m, n, k, 8 * random.integer(0, 1), random.coin(), random.coin()); });
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
