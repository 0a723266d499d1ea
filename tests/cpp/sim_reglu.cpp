// The reglu kernels on the host, against the formula in double precision.
#include "gated.h"
#include "kernels/activation/reglu.h"

namespace warpsmith::test {
namespace {

double relu(double x) { return x > 0 ? x : 0; }
double relu_derivative(double x) { return x > 0; }

const GatedOp kOp{&reglu_forward_cuda, &reglu_backward_cuda, &relu, &relu_derivative};

WARPSMITH_GATED_TESTS(kOp)

}  // namespace
}  // namespace warpsmith::test
