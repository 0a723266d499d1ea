// The norms' kernels on the host, against their formulas in double precision. Each row of norm_ops.h gives the tests of
// its op, which has kernels of its own.
#include "norm_choosers.h"
#include "norm_suite.h"

namespace warpsmith::test {
namespace {

#define NORM_TESTS(op, layer, residual, dropout)                                                \
  TEST(op##_every_kernel) { NormSuite{Norm::op}.every_kernel(); }                               \
  TEST(op##_storage_types) { NormSuite{Norm::op}.storage_types(); }                             \
  TEST(op##_rows_that_are_not_vectors) { NormSuite{Norm::op}.rows_that_are_not_vectors(); }     \
  TEST(op##_misaligned_and_strided_rows) { NormSuite{Norm::op}.misaligned_and_strided_rows(); } \
  TEST(op##_rows_of_a_cluster) { NormSuite{Norm::op}.rows_of_a_cluster(); }                     \
  TEST(op##_rows_too_long_for_the_chip) { NormSuite{Norm::op}.rows_too_long_for_the_chip(); }   \
  TEST(op##_more_rows_than_units) { NormSuite{Norm::op}.more_rows_than_units(); }               \
  TEST(op##_no_weight_or_bias) { NormSuite{Norm::op}.no_weight_or_bias(); }                     \
  TEST(op##_each_gradient_alone) { NormSuite{Norm::op}.each_gradient_alone(); }                 \
  TEST(op##_unknown_dtype_is_refused) { NormSuite{Norm::op}.unknown_dtype_is_refused(); }       \
  TEST(op##_beyond_2_31_elements) { NormSuite{Norm::op}.beyond_2_31_elements(); }               \
  TEST(op##_far_rows) { NormSuite{Norm::op}.far_rows(); }                                       \
  TEST(op##_bytes_moved) {                                                                      \
    NormSuite{Norm::op}.bytes_moved(136, 128);                                                  \
    NormSuite{Norm::op}.bytes_moved(20, 1032);                                                  \
  }                                                                                             \
  TEST(op##_bytes_moved_in_a_cluster) {                                                         \
    NEEDS_SM90_CODE;                                                                            \
    on_machine(16, 90, [] { NormSuite{Norm::op}.bytes_moved(5, 12296); });                      \
  }                                                                                             \
  RANDOM_TEST(op##_random_problems) { NormSuite{Norm::op}.run_random(random); }                 \
  WARPSMITH_IF_##residual(RESIDUAL_TESTS(op)) WARPSMITH_UNLESS_##residual(PLAIN_TESTS(op))
#define RESIDUAL_TESTS(op) \
  TEST(op##_no_gradient_of_the_residual) { NormSuite{Norm::op}.no_gradient_of_the_residual(); }
#define PLAIN_TESTS(op)                                               \
  TEST(op##_precise_rstd) { NormSuite{Norm::op}.precise_rstd(); }     \
  TEST(op##_rows_of_a_warp) { NormSuite{Norm::op}.rows_of_a_warp(); } \
  TEST(op##_rows_in_shared_memory) {                                  \
    NEEDS_SM90_CODE;                                                  \
    NormSuite{Norm::op}.rows_in_shared_memory();                      \
  }                                                                   \
  RANDOM_TEST(op##_random_problems_of_few_multiprocessors) {          \
    NormSuite{Norm::op}.run_random_of_few_multiprocessors(random);    \
  }
WARPSMITH_NORM_OPS(NORM_TESTS)

TEST(rms_norm_bytes_moved_by_several_rows_a_block) {
  on_machine(2, 90, [] { NormSuite{Norm::rms_norm}.bytes_moved(70, 264); });
}
TEST(rms_norm_bytes_of_long_rows_as_code_of_sm80) {
  on_machine(16, 80, [] { NormSuite{Norm::rms_norm}.bytes_moved(5, 12296); });
}

// Every forward kernel stores rstd once a row, or not at all where it is not wanted.
TEST(rstd_is_stored_once_a_row_where_it_is_wanted) {
  const SeedsAtMost few(NormSuite::kSeedsOfNumbers);
  for (const int64_t columns : {16, 264, 1032, 8200, 33, 4097}) {
    NormCase<bfloat16> p(Norm::rms_norm, {.rows = 5, .columns = columns});
    const int64_t y_bytes = 5 * columns * 2;
    under_every_seed([&] {
      sim::counters() = {};
      p.forward.rstd = p.rstd.data();
      expect_ok(norm_forward_cuda(p.forward, nullptr));
      expect_equal("bytes written, with rstd", sim::counters().global_bytes_written, y_bytes + 5 * 4);
      sim::counters() = {};
      p.forward.rstd = nullptr;
      p.y.poison();
      expect_ok(norm_forward_cuda(p.forward, nullptr));
      expect_equal("bytes written, without", sim::counters().global_bytes_written, y_bytes);
      p.check_forward();
    });
  }
}

// ---- layer_norm alone

const NormSuite kLayerNorm{Norm::layer_norm};

TEST(layer_norm_rows_of_a_block) { kLayerNorm.rows_of_a_block(); }

// Each number of threads and vectors that the chooser may ask for has its instance: rows that fill it, and rows that do
// not.
TEST(the_instances_of_a_block) {
  const SeedsAtMost few(1);
  int number = 0;
  for (int64_t columns : {1032, 1536, 1544, 2048, 2056, 2304, 2560, 2568,  3072,  3080,  3584,  3592,  3840,  4096,
                          4104, 5120, 6144, 6152, 7168, 8200, 9216, 10240, 10248, 11264, 12296, 13312, 14336, 16384}) {
    if (++number % 2)
      kLayerNorm.in_a_block<bfloat16>({.rows = 1, .columns = columns}, 0);
    else
      kLayerNorm.in_a_block<float16>({.rows = 1, .columns = columns}, 0);
  }
}

// mean(s^2) - mean^2 would lose every digit of the variance here.
TEST(a_mean_that_dwarfs_the_variance) {
  const SeedsAtMost few(NormSuite::kSeedsOfNumbers);
  for (int64_t columns : {16, 512, 516, 4096, 4099})
    kLayerNorm.run<float>({.rows = 2, .columns = columns, .mean = 1000});
  for (int64_t columns : {128, 768}) kLayerNorm.run<float16>({.rows = 2, .columns = columns, .mean = 1000});
}

TEST(constant_rows) {
  const SeedsAtMost few(NormSuite::kSeedsOfNumbers);
  for (int64_t columns : {16, 128, 520, 768, 4096, 1600, 1025}) {
    NormCase<bfloat16> p(Norm::layer_norm, {.rows = 2, .columns = columns});
    for (size_t i = 0; i < p.x.size(); ++i) p.x[i] = from_float<bfloat16>(i < p.x.size() / 2 ? 3.f : -1e4f);
    p.compute_oracle();
    p.run();
  }
}

// Rows of a block are summed about the mean of four elements.
TEST(four_equal_elements_whose_sum_overflows) {
  const SeedsAtMost few(NormSuite::kSeedsOfNumbers);
  for (int64_t columns : {1536, 1600, 5120}) {
    NormCase<bfloat16> p(Norm::layer_norm, {.rows = 1, .columns = columns});
    for (size_t i = 0; i < p.x.size(); ++i) p.x[i] = from_float<bfloat16>(3e38f);
    p.compute_oracle();
    under_every_seed([&] {
      p.poison_outputs();
      expect_ok(norm_forward_cuda(p.forward, nullptr));
      NormSuite::check_forward_and_statistics(p);
    });
  }
}

}  // namespace
}  // namespace warpsmith::test
