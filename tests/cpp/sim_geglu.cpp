// The geglu kernels on the host, against the formulas in double precision.
#include "gated.h"
#include "kernels/activation/geglu.h"

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

const GatedOp kExact{&geglu_forward_cuda, &geglu_backward_cuda, &gelu, &gelu_derivative};
const GatedOp kTanh{&geglu_forward_cuda, &geglu_backward_cuda, &gelu_tanh, &gelu_tanh_derivative, true};

WARPSMITH_GATED_TESTS(kExact)

TEST(every_path_by_tanh) { gated_paths(kTanh); }
TEST(bytes_moved_by_tanh) { gated_bytes(kTanh); }
RANDOM_TEST(random_problems_by_tanh) { gated_random(kTanh, random); }

}  // namespace
}  // namespace warpsmith::test
