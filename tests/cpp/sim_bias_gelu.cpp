// The bias_gelu kernels on the host, against the formulas in double precision.
#include "biased.h"
#include "kernels/activation/bias_gelu.h"

namespace warpsmith::test {
namespace {

double gelu(double x) { return 0.5 * x * std::erfc(-x / std::sqrt(2.0)); }
double gelu_derivative(double x) {
  return 0.5 * std::erfc(-x / std::sqrt(2.0)) + x * std::exp(-0.5 * x * x) / std::sqrt(2 * M_PI);
}

double inner(double x) { return std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x); }
double gelu_tanh(double x) { return 0.5 * x * (1 + std::tanh(inner(x))); }
double gelu_tanh_derivative(double x) {
  const double t = std::tanh(inner(x));
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
}

const BiasedOp kExact{&bias_gelu_forward_cuda, &bias_gelu_backward_cuda, &bias_gelu_partial_rows_cuda, &gelu,
                      &gelu_derivative};
const BiasedOp kTanh{&bias_gelu_forward_cuda,      &bias_gelu_backward_cuda,
                     &bias_gelu_partial_rows_cuda, &gelu_tanh,
                     &gelu_tanh_derivative,        true};

WARPSMITH_BIASED_TESTS(kTanh)

TEST(every_path_exact) { biased_paths(kExact); }
RANDOM_TEST(random_problems_exact) { biased_random(kExact, random); }

}  // namespace
}  // namespace warpsmith::test
