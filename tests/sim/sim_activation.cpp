// The activations' kernels on the host, against their formulas in double precision. Each row of activation_ops.h gives
// its tests; what no function can change is tested once a body.
#include "activation_biased.h"
#include "activation_dropout_add.h"
#include "activation_functions.h"
#include "activation_gated.h"
#include "activation_unary.h"

namespace warpsmith::test {
namespace {

// The row's function, and where it has a flag the function that the flag selects.
#define ORACLE(F) &exact::F::value, &exact::F::derivative

#define GATED_TESTS(op, F, flag)                                                      \
  TEST(op##_every_path) { gated_paths({Gated::op, ORACLE(F)}); }                      \
  TEST(op##_bytes_moved) { gated_bytes({Gated::op, ORACLE(F)}); }                     \
  TEST(op##_output_again) { gated_output_again({Gated::op, ORACLE(F)}); }             \
  TEST(op##_refuses_float64) { gated_refuses_float64({Gated::op, ORACLE(F)}); }       \
  RANDOM_TEST(op##_random_problems) { gated_random({Gated::op, ORACLE(F)}, random); } \
  GATED_TESTS_##flag(op, F)
#define GATED_TESTS_plain(op, F)
#define GATED_TESTS_tanh(op, F)                                           \
  TEST(op##_by_tanh) { gated_paths({Gated::op, ORACLE(F##Tanh), true}); } \
  RANDOM_TEST(op##_by_tanh_random_problems) { gated_random({Gated::op, ORACLE(F##Tanh), true}, random); }
WARPSMITH_GATED_OPS(GATED_TESTS)

const GatedOp kGated{Gated::swiglu, ORACLE(Silu)};
TEST(gated_layouts) { gated_layouts(kGated); }
TEST(gated_gradients_in_place_and_alone) { gated_gradients(kGated); }
TEST(gated_beyond_2_31_elements) { gated_beyond_2_31(kGated); }
TEST(gated_far_rows) { gated_far_rows(kGated); }

#define BIASED_TESTS(op, F, flag)                                                       \
  TEST(op##_every_path) { biased_paths({Biased::op, ORACLE(F)}); }                      \
  TEST(op##_bytes_moved) { biased_bytes({Biased::op, ORACLE(F)}); }                     \
  TEST(op##_refuses_float64) { biased_refuses_float64({Biased::op, ORACLE(F)}); }       \
  RANDOM_TEST(op##_random_problems) { biased_random({Biased::op, ORACLE(F)}, random); } \
  BIASED_TESTS_##flag(op, F)
#define BIASED_TESTS_plain(op, F)
#define BIASED_TESTS_tanh(op, F)                                            \
  TEST(op##_by_tanh) { biased_paths({Biased::op, ORACLE(F##Tanh), true}); } \
  RANDOM_TEST(op##_by_tanh_random_problems) { biased_random({Biased::op, ORACLE(F##Tanh), true}, random); }
WARPSMITH_BIASED_OPS(BIASED_TESTS)

const BiasedOp kBiased{Biased::bias_silu, ORACLE(Silu)};
TEST(biased_layouts) { biased_layouts(kBiased); }
TEST(biased_loops_over_rows) { biased_loops(kBiased); }
TEST(biased_only_one_gradient) { biased_one_gradient(kBiased); }
TEST(biased_beyond_2_31_elements) { biased_beyond_2_31(kBiased); }
TEST(biased_far_rows) { biased_far_rows(kBiased); }

#define UNARY_TESTS(op, F, flag)                                                \
  TEST(op##_every_path_and_its_bytes) { unary_paths({Unary::op, ORACLE(F)}); }  \
  TEST(op##_refuses_float64) { unary_refuses_float64({Unary::op, ORACLE(F)}); } \
  RANDOM_TEST(op##_random_problems) { unary_random({Unary::op, ORACLE(F)}, random); }
WARPSMITH_UNARY_OPS(UNARY_TESTS)

}  // namespace
}  // namespace warpsmith::test
