// The add_rms_norm kernels on the host.
#include "kernels/norm/add_rms_norm.h"

#include "norm_residual_suite.h"

namespace warpsmith::test {
namespace {

constexpr NormSuite kSuite{{.layer = false,
                            .residual = true,
                            .dropout = false,
                            .forward = add_rms_norm_forward_cuda,
                            .partial_rows = add_rms_norm_partial_rows_cuda,
                            .backward = add_rms_norm_backward_cuda}};

const ResidualNormTests<kSuite> kTests;

}  // namespace
}  // namespace warpsmith::test
