// The add_rms_norm kernels on the host.
#include "kernels/norm/add_rms_norm.h"

#include "norm_suite.h"

namespace warpsmith::test {
namespace {

constexpr NormSuite kSuite{{.layer = false,
                            .residual = true,
                            .dropout = false,
                            .forward = add_rms_norm_forward_cuda,
                            .partial_rows = add_rms_norm_partial_rows_cuda,
                            .backward = add_rms_norm_backward_cuda}};

TEST(every_kernel) { kSuite.every_kernel(); }
TEST(storage_types) { kSuite.storage_types(); }
TEST(rows_that_are_not_vectors) { kSuite.rows_that_are_not_vectors(); }
TEST(misaligned_and_strided_rows) { kSuite.misaligned_and_strided_rows(); }
TEST(rows_of_a_cluster) { kSuite.rows_of_a_cluster(); }
TEST(rows_too_long_for_the_chip) { kSuite.rows_too_long_for_the_chip(); }
TEST(more_rows_than_units) { kSuite.more_rows_than_units(); }
TEST(no_weight_or_bias) { kSuite.no_weight_or_bias(); }
TEST(no_gradient_of_the_residual) { kSuite.no_gradient_of_the_residual(); }
TEST(each_gradient_alone) { kSuite.each_gradient_alone(); }
TEST(unknown_dtype_is_refused) { kSuite.unknown_dtype_is_refused(); }
TEST(beyond_2_31_elements) { kSuite.beyond_2_31_elements(); }
TEST(bytes_moved) {
  kSuite.bytes_moved(136, 128);
  kSuite.bytes_moved(20, 1032);
  on_machine(16, 90, [] { kSuite.bytes_moved(5, 12296); });
}

RANDOM_TEST(random_problems) { kSuite.run_random(random); }

}  // namespace
}  // namespace warpsmith::test
