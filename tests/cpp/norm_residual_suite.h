#pragma once
#include "norm_suite.h"

// The tests of an op that adds a residual and normalises the sum: the four of them have the same.
namespace warpsmith::test {

template <const NormSuite& suite> struct ResidualNormTests {
  ResidualNormTests() {
    add<&NormSuite::every_kernel>("every_kernel");
    add<&NormSuite::storage_types>("storage_types");
    add<&NormSuite::rows_that_are_not_vectors>("rows_that_are_not_vectors");
    add<&NormSuite::misaligned_and_strided_rows>("misaligned_and_strided_rows");
    add<&NormSuite::rows_of_a_cluster>("rows_of_a_cluster");
    add<&NormSuite::rows_too_long_for_the_chip>("rows_too_long_for_the_chip");
    add<&NormSuite::more_rows_than_units>("more_rows_than_units");
    add<&NormSuite::no_weight_or_bias>("no_weight_or_bias");
    add<&NormSuite::no_gradient_of_the_residual>("no_gradient_of_the_residual");
    add<&NormSuite::each_gradient_alone>("each_gradient_alone");
    add<&NormSuite::unknown_dtype_is_refused>("unknown_dtype_is_refused");
    add<&NormSuite::beyond_2_31_elements>("beyond_2_31_elements");
    Registration("bytes_moved", bytes_moved, false);
    Registration("random_problems", [](Random* random) { suite.run_random(*random); }, true);
  }

 private:
  template <void (NormSuite::*body)() const> static void add(const char* name) {
    Registration(name, [](Random*) { (suite.*body)(); }, false);
  }
  static void bytes_moved(Random*) {
    suite.bytes_moved(136, 128);
    suite.bytes_moved(20, 1032);
    on_machine(16, 90, [] { suite.bytes_moved(5, 12296); });
  }
};

}  // namespace warpsmith::test
