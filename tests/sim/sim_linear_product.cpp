// The Hopper products against plain loops: every kernel, every edge, both types; what Python's law cannot choose.
// links: csrc/kernels/linear/product.cu
// links: csrc/kernels/linear/hopper/product_nt_sm90a.cu
// links: csrc/kernels/linear/hopper/product_nn_sm90a.cu
// links: csrc/kernels/linear/hopper/product_tn_sm90a.cu
#include "far.h"
#include "kernels/linear/linear.h"

namespace warpsmith::test {
namespace {

using Layout = ProductLayout;
using Epilogue = ProductEpilogue;

// A problem of small integers, whose sums are exact in any order, and its strides.
template <class T> struct Problem {
  const ProductKernel& kernel;
  int64_t m, n, k, a_stride, b_stride;
  Buffer<T> a, b, bias, z, out;
  Buffer<float> wide, partials;
  ProductParams p{};

  static bool a_turned(const ProductKernel& x) { return x.layout == Layout::tn; }
  static bool b_turned(const ProductKernel& x) { return x.layout != Layout::nt; }
  Problem(const ProductKernel& which, int64_t rows, int64_t columns, int64_t inner, int64_t gap, bool with_bias,
          bool other)
      : kernel(which),
        m(rows),
        n(columns),
        k(inner),
        a_stride(((a_turned(which) ? m : k) + 7) / 8 * 8 + gap),
        b_stride(((b_turned(which) ? n : k) + 7) / 8 * 8 + gap),
        a(static_cast<size_t>((a_turned(which) ? k : m) * a_stride)),
        b(static_cast<size_t>((b_turned(which) ? k : n) * b_stride)),
        bias(static_cast<size_t>(n)),
        z(static_cast<size_t>(m * n)),
        out(static_cast<size_t>(m * n)),
        wide(static_cast<size_t>(m * n)),
        partials(static_cast<size_t>((m + 15) / 16 * n)) {
    uint64_t seed = 0;
    for (Buffer<T>* x : {&a, &b, &bias, &z}) {
      Random random(++seed);
      for (size_t i = 0; i < x->size(); ++i) (*x)[i] = from_float<T>(static_cast<float>(random.bits() % 3) - 1.0f);
    }
    for (size_t i = 0; i < wide.size(); ++i) wide[i] = static_cast<float>(i % 5);
    const Epilogue e = kernel.epilogue;
    p.a = a.data(), p.b = b.data(), p.out = out.data();
    p.a_stride = a_stride, p.b_stride = b_stride, p.z_stride = n;
    p.rows = m, p.columns = n, p.inner = k;
    p.layout = kernel.layout;
    p.epilogue = e;
    p.activation = LinearActivation::relu;
    p.dtype = std::is_same_v<T, bfloat16> ? Dtype::bfloat16 : Dtype::float16;
    if (with_bias && kernel.takes_bias()) p.bias = bias.data();
    if (kernel.reads() || (e == Epilogue::activate && other)) p.z = z.data();
    if (e == Epilogue::derivative && other) p.partials = partials.data();
    if (e == Epilogue::wide) p.out = wide.data();
    p.add = other;
  }
  double at(const Buffer<T>& x, int64_t i) const { return static_cast<double>(to_float(x[static_cast<size_t>(i)])); }
  double sum(int64_t i, int64_t j) const {
    double s = p.bias ? at(bias, j) : 0;
    for (int64_t l = 0; l < k; ++l)
      s += at(a, a_turned(kernel) ? l * a_stride + i : i * a_stride + l) *
           at(b, b_turned(kernel) ? l * b_stride + j : j * b_stride + l);
    return s;
  }
  void run_and_compare() {
    const Epilogue e = kernel.epilogue;
    std::vector<double> expected(out.size()), kept(out.size()), sums(partials.size());
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n; ++j) {
        const auto at_ij = static_cast<size_t>(i * n + j);
        const double s = sum(i, j), x = at(z, i * n + j);
        kept[at_ij] = s;
        double& y = expected[at_ij];
        y = e == Epilogue::activate     ? std::max(s, 0.0)
            : e == Epilogue::residual   ? s + x
            : e == Epilogue::derivative ? (x > 0 ? s : 0)
            : e == Epilogue::wide       ? s + (p.add ? static_cast<double>((i * n + j) % 5) : 0)
                                        : s;
        sums[static_cast<size_t>(i / 16 * n + j)] += y;
      }
    Buffer<float> before(wide.size());
    std::memcpy(before.data(), wide.data(), wide.size() * 4);
    under_every_seed([&] {
      out.poison();
      partials.poison();
      std::memcpy(wide.data(), before.data(), wide.size() * 4);
      ProductPlan plan{&kernel};
      expect_ok(product_workspace_cuda(p, &plan));
      Buffer<float> shares(static_cast<size_t>(plan.sums));
      std::vector<int> flags(static_cast<size_t>(plan.flags));
      p.sums = shares.data();
      p.flags = flags.data();
      expect_ok(product_cuda(p, plan, nullptr));
      if (e == Epilogue::wide)
        expect_close("wide", wide, expected, {});
      else
        expect_close("out", out, expected, {});
      if (e == Epilogue::activate && p.z) expect_close("z", z, kept, {});
      if (p.partials) expect_close("partials", partials, sums, {});
    });
  }
};

void compare(const ProductKernel& kernel, bool bf16, int64_t m, int64_t n, int64_t k, int64_t gap, bool bias,
             bool other) {
  if (bf16)
    Problem<bfloat16>(kernel, m, n, k, gap, bias, other).run_and_compare();
  else
    Problem<float16>(kernel, m, n, k, gap, bias, other).run_and_compare();
}

// Two clusters: several tiles each, so that a tile is stored under the next one's products; both forms of each kernel.
TEST(every_product_of_several_tiles) {
  NEEDS_SM90_CODE;
  const SeedsAtMost few(3);
  on_machine(4, 90, [] {
    for (const ProductKernel& kernel : kProducts) {
      if (kernel.splits) continue;
      const int64_t m = 2 * kernel.tile.rows * kernel.tile.cluster_rows + 17;
      compare(kernel, true, m, 264, 208, 0, true, true);
      compare(kernel, false, m, 264, 72, 8, false, false);
    }
  });
}

// One to five units for two to seven clusters: whole units, fronts, and a pool of what they leave.
RANDOM_TEST(split_sums) {
  NEEDS_SM90_CODE;
  const SeedsAtMost few(3);
  const auto kernel = ProductKernel{kWideTile, Layout::tn, random.coin() ? Epilogue::wide : Epilogue::store, true};
  const int64_t m = random.integer(1, 5) * 256 - 3, k = random.size(1, 700);
  on_machine(2 * static_cast<int>(random.integer(2, 7)), 90,
             [&] { compare(*find_product(kernel), random.coin(), m, 24, k, 0, false, random.coin()); });
}

RANDOM_TEST(products_of_any_size) {
  NEEDS_SM90_CODE;
  const SeedsAtMost few(2);
  const auto kernel = static_cast<size_t>(random.integer(0, std::size(kProducts) - 1));
  const int64_t m = random.size(1, 300), n = 8 * random.size(1, 40), k = random.size(1, 140);
  on_machine(2, 90, [&] {
    compare(kProducts[kernel], random.coin(), m, n, k, 8 * random.integer(0, 1), random.coin(), random.coin());
  });
}

// Rows beyond element 2^31 of a and out.
TEST(far_rows_of_a_product) {
  NEEDS_SM90_CODE;
  const SeedsAtMost few(2);
  constexpr int64_t kRows = 100, kSize = 64;
  Problem<bfloat16> near(kProducts[0], kRows, kSize, kSize, 0, true, false);
  const int64_t first = first_far_row(kSize, kRows, 256);
  Far<bfloat16> a(near.a, first, kSize), out(near.out, first, kSize);
  ProductParams p = near.p;
  p.a = a.data();
  p.out = out.data();
  p.rows = first + kRows;
  std::vector<double> expected;
  for (int64_t i = 0; i < kRows * kSize; ++i) expected.push_back(near.sum(i / kSize, i % kSize));
  const FarMachine machine(1);
  under_every_seed([&] {
    out.poison();
    expect_ok(product_cuda(p, {&kProducts[0], ""}, nullptr));
    out.fetch();
    expect_close("out", near.out, expected, {});
  });
}

TEST(the_chooser_fills_waves) {
  ProductProblem p{8192, 3072, 2048};
  expect(!choose_product(p).kernel, "not asked for");
  p.asked = true;
  expect(choose_product(p).kernel->tile == kWideTile, "the forward");
  p = {3072, 2048, 8192, Layout::tn, Epilogue::wide};
  p.asked = true;
  expect(choose_product(p).kernel->tile == kLargeTile, "66 units of 256 x 192");
  p.rows = 2048;
  expect(choose_product(p).kernel->tile == kWideTile, "64 units of 128 x 256");
  p.rows = 768;
  expect(choose_product(p).kernel->splits, "24 units");
  for (bool ProductProblem::* need : {&ProductProblem::half, &ProductProblem::aligned, &ProductProblem::sm90a_code}) {
    ProductProblem lacks = p;
    lacks.*need = false;
    expect(!choose_product(lacks).kernel, "a need that is not met");
  }
}

}  // namespace
}  // namespace warpsmith::test
