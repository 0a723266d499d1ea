// The swiglu kernels on the host, against the formula in double precision.
#include "gated.h"
#include "kernels/activation/swiglu.h"

namespace warpsmith::test {
namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double silu(double x) { return x * sigmoid(x); }
double silu_derivative(double x) { return sigmoid(x) * (1 + x * (1 - sigmoid(x))); }

const GatedOp kOp{&swiglu_forward_cuda, &swiglu_backward_cuda, &silu, &silu_derivative};

WARPSMITH_GATED_TESTS(kOp)

}  // namespace
}  // namespace warpsmith::test
