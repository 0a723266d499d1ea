// The bias_silu kernels on the host, against the formula in double precision.
#include "biased.h"
#include "kernels/activation/bias_silu.h"

namespace warpsmith::test {
namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double silu(double x) { return x * sigmoid(x); }
double silu_derivative(double x) { return sigmoid(x) * (1 + x * (1 - sigmoid(x))); }

const BiasedOp kOp{&bias_silu_forward_cuda, &bias_silu_backward_cuda, &bias_silu_partial_rows_cuda, &silu,
                   &silu_derivative};

WARPSMITH_BIASED_TESTS(kOp)

}  // namespace
}  // namespace warpsmith::test
