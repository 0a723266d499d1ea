// What Python's tests do not ask of the linear family: who computes a product, column sums beyond 2^31 elements, and
// what launchers refuse.
#include <string>

#include "harness.h"
#include "kernels/linear/linear.h"
#include "sim/sparse_memory.h"

namespace warpsmith::test {
namespace {

LinearProblem with_gelu() {
  LinearProblem p{8192, 2048, 8192};
  p.activation = LinearActivation::gelu_tanh;
  return p;
}

TEST(epilogues_are_taken_where_they_pay) {
  expect(choose_linear(with_gelu()).epilogue, "GELU by tanh in bfloat16 on sm_90");
  const auto refused = [](const char* what, auto&& change) {
    LinearProblem p = with_gelu();
    change(p);
    const LinearPlan plan = choose_linear(p);
    expect(!plan.epilogue && !std::string(plan.why).empty(), what);
  };
  refused("no activation", [](LinearProblem& p) { p.activation = LinearActivation::none; });
  refused("exact GELU", [](LinearProblem& p) { p.activation = LinearActivation::gelu; });
  refused("SiLU", [](LinearProblem& p) { p.activation = LinearActivation::silu; });
  refused("ReLU", [](LinearProblem& p) { p.activation = LinearActivation::relu; });
  refused("a residual", [](LinearProblem& p) { p.residual = true; });
  refused("other dtypes", [](LinearProblem& p) { p.bfloat16 = false; });
  refused("misaligned", [](LinearProblem& p) { p.aligned = false; });
  refused("no library", [](LinearProblem& p) { p.library = false; });
  refused("code of sm_80", [](LinearProblem& p) { p.code_capability = 80; });
  refused("no rows", [](LinearProblem& p) { p.rows = 0; });
}

TEST(the_device_says_which_code_runs) {
  LinearProblem p = with_gelu();
  p.code_capability = 0;
  expect_ok(linear_problem_on_device(&p));
  expect(p.code_capability == 80 || p.code_capability == 90, "the code that runs");
}

TEST(column_sums_of_float64_are_refused) {
  Buffer<float> one(1);
  ColumnSumsParams sums{one.data(), one.data(), one.data(), 1, 1, 1, false, Dtype::float64, Dtype::float64};
  expect_refused(column_sums_cuda(sums, nullptr), "float64");
}

// Rows more than 2^31 elements apart in all: row starts need 64 bits.
TEST(column_sums_beyond_2_31_elements) {
  constexpr int64_t kRows = 3, kColumns = 64, kStride = int64_t{1} << 31;
  sim::SparseMemory<bfloat16> x(kRows * kStride);
  Buffer<float> sums(kColumns), partials(kColumns);
  for (int64_t r = 0; r < kRows; ++r)
    for (int64_t c = 0; c < kColumns; ++c)
      x.data()[r * kStride + c] = from_float<bfloat16>(static_cast<float>(c + 100 * (r + 1) % 37));
  expect_ok(column_sums_cuda(
      {x.data(), sums.data(), partials.data(), kRows, kColumns, kStride, false, Dtype::bfloat16, Dtype::float32},
      nullptr));
  for (int64_t c = 0; c < kColumns; ++c)
    expect_equal("sum", sums[static_cast<size_t>(c)], static_cast<float>(3 * c + 100 % 37 + 200 % 37 + 300 % 37));
}

}  // namespace
}  // namespace warpsmith::test
