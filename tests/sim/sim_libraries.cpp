// Libraries that are found at run time: the loader, and the product for which cuBLAS is asked, with a cuBLAS of our
// own.
#include "harness.h"
#include "libraries/cublas.h"

namespace {

// Column-major, as cuBLAS defines it. a_type and b_type are bfloat16 in this test.
float element(const void* matrix, int leading, int row, int column) {
  return warpsmith::to_float(static_cast<const warpsmith::bfloat16*>(matrix)[row + int64_t{column} * leading]);
}

}  // namespace

// Found among the symbols of the process.
extern "C" int cublasGemmEx(void* handle, int transpose_a, int transpose_b, int m, int n, int k, const void* alpha,
                            const void* a, int a_type, int lda, const void* b, int b_type, int ldb, const void* beta,
                            void* c, int c_type, int ldc, int compute_type, int algorithm) {
  constexpr int kN = 0, kT = 1, kFloat32 = 0, kBfloat16 = 14, kCompute32F = 68, kDefault = -1;
  if (a_type != kBfloat16 || b_type != kBfloat16 || c_type != kFloat32) return 1;
  if (transpose_a != kN || transpose_b != kT || compute_type != kCompute32F || algorithm != kDefault) return 2;
  if (handle == nullptr || lda < m || ldb < n || ldc < m) return 3;
  for (int column = 0; column < n; ++column)
    for (int row = 0; row < m; ++row) {
      float sum = 0, *out = static_cast<float*>(c) + row + int64_t{column} * ldc;
      for (int i = 0; i < k; ++i) sum += element(a, lda, row, i) * element(b, ldb, column, i);
      *out = *static_cast<const float*>(alpha) * sum + *static_cast<const float*>(beta) * *out;
    }
  return 0;
}

namespace warpsmith::test {
namespace {

TEST(functions_are_found_in_the_first_library_that_is_loaded) {
  const libraries::Loaded math({"libnone.so.1", "libm.so.6"}), none({"libnone.so.1"});
  auto* const cosine = math.find<double(double)>("cos");
  expect(cosine && cosine(0) == 1, "cos of libm");
  expect(!math.find<void()>("no_such_function") && !none.find<void()>("no_such_function"), "found what is not there");
  expect(none.find<double(double)>("cos") != nullptr, "cos among the symbols of the process");
}

TEST(outer_products_add_up) {
  constexpr int64_t kRows = 5, kA = 3, kB = 7, kStrideA = 4, kStrideB = 9;
  Buffer<bfloat16> a(kRows * kStrideA), b(kRows * kStrideB);
  fill_normal(a, 1);
  fill_normal(b, 2);
  for (const float beta : {0.f, 1.f}) {
    Buffer<float> sum(kA * kB);
    fill_normal(sum, 3);
    std::vector<double> expected(kA * kB);
    for (int64_t i = 0; i < kA; ++i)
      for (int64_t j = 0; j < kB; ++j) {
        double& e = expected[i * kB + j] = beta * double{sum[i * kB + j]};
        for (int64_t r = 0; r < kRows; ++r) e += double{to_float(a[r * kStrideA + i])} * to_float(b[r * kStrideB + j]);
      }
    int handle = 0;
    const auto add = [&](Dtype dtype, int64_t rows) {
      return add_outer_products_cuda(&handle, a.data(), kStrideA, kA, b.data(), kStrideB, kB, rows, dtype, sum.data(),
                                     beta);
    };
    expect_ok(add(Dtype::bfloat16, kRows));
    expect_close("sum", sum, expected, {.relative = 1e-5, .absolute = 1e-6});
    expect(!add(Dtype::float32, kRows).ok() && !add(Dtype::bfloat16, int64_t{1} << 31).ok(), "refused what it cannot");
  }
}

}  // namespace
}  // namespace warpsmith::test
