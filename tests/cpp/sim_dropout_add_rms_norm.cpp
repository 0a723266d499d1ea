// The dropout_add_rms_norm kernels on the host.
#include "kernels/norm/dropout_add_rms_norm.h"

#include "norm_residual_suite.h"

namespace warpsmith::test {
namespace {

constexpr NormSuite kSuite{{.layer = false,
                            .residual = true,
                            .dropout = true,
                            .forward = dropout_add_rms_norm_forward_cuda,
                            .partial_rows = dropout_add_rms_norm_partial_rows_cuda,
                            .backward = dropout_add_rms_norm_backward_cuda}};

const ResidualNormTests<kSuite> kTests;

}  // namespace
}  // namespace warpsmith::test
