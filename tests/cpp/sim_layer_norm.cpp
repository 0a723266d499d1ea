// The layer_norm kernels on the host.
#include "kernels/norm/layer_norm.h"

#include "norm_suite.h"

namespace warpsmith::test {
namespace {

constexpr NormSuite kSuite{{.layer = true,
                            .residual = false,
                            .dropout = false,
                            .forward = layer_norm_forward_cuda,
                            .partial_rows = layer_norm_partial_rows_cuda,
                            .backward = layer_norm_backward_cuda}};

TEST(every_kernel) { kSuite.every_kernel(); }
TEST(storage_types) { kSuite.storage_types(); }
TEST(rows_that_are_not_vectors) { kSuite.rows_that_are_not_vectors(); }
TEST(misaligned_and_strided_rows) { kSuite.misaligned_and_strided_rows(); }
TEST(rows_of_a_cluster) { kSuite.rows_of_a_cluster(); }
TEST(rows_of_a_warp) { kSuite.rows_of_a_warp(); }
TEST(rows_of_a_block) { kSuite.rows_of_a_block(); }
TEST(rows_in_shared_memory) { kSuite.rows_in_shared_memory(); }
TEST(rows_too_long_for_the_chip) { kSuite.rows_too_long_for_the_chip(); }
TEST(more_rows_than_units) { kSuite.more_rows_than_units(); }
TEST(no_weight_or_bias) { kSuite.no_weight_or_bias(); }
TEST(each_gradient_alone) { kSuite.each_gradient_alone(); }
TEST(unknown_dtype_is_refused) { kSuite.unknown_dtype_is_refused(); }
TEST(beyond_2_31_elements) { kSuite.beyond_2_31_elements(); }
TEST(bytes_moved) {
  kSuite.bytes_moved(136, 128);
  kSuite.bytes_moved(20, 1032);
  on_machine(16, 90, [] { kSuite.bytes_moved(5, 12296); });
}

TEST(the_chooser_of_rows_of_a_block) {
  const auto plan = [](int64_t columns) {
    NormProblem p;
    p.rows = 4096, p.columns = columns, p.layer = true;
    return p;
  };
  struct Choice {
    int64_t columns;
    int vectors, threads;
  };
  for (const Choice& expected :
       {Choice{1032, 2, 96}, {1536, 2, 96},   {1544, 2, 128},  {2304, 3, 96},   {2560, 2, 160},  {3840, 3, 160},
        {4088, 2, 256},      {4096, 2, 256},  {4104, 4, 192},  {5120, 4, 160},  {5376, 4, 192},  {6144, 4, 192},
        {6152, 4, 256},      {7168, 4, 224},  {8184, 4, 256},  {8200, 4, 320},  {9216, 4, 288},  {10240, 4, 320},
        {10248, 4, 384},     {11264, 4, 352}, {13312, 4, 416}, {12280, 4, 384}, {12296, 4, 512}, {14336, 4, 448},
        {14344, 4, 512},     {16384, 4, 512}}) {
    const NormConfig c = choose_norm_forward(plan(expected.columns));
    const std::string text = std::to_string(expected.columns) + ": " + name(c.kernel) + " " +
                             std::to_string(c.vectors) + " " + std::to_string(c.threads);
    expect(c.kernel == NormKernel::block && c.vectors == expected.vectors && c.threads == expected.threads, text);
    const auto is = [&](NormKernel kernel, const auto& change) {
      NormProblem p = plan(expected.columns);
      change(p);
      expect(choose_norm_forward(p).kernel == kernel, text + " and a change: " + name(choose_norm_forward(p).kernel));
    };
    is(NormKernel::registers, [](NormProblem& p) { p.layer = false; });
    is(NormKernel::registers, [](NormProblem& p) { p.residual_bytes = 2; });
    is(NormKernel::registers, [](NormProblem& p) { p.affine_as_x = false; });
    is(NormKernel::looped, [](NormProblem& p) { p.aligned = false; });
  }
  for (const int64_t columns : {1024, 8192, 12288, 16392})
    expect(choose_norm_forward(plan(columns)).kernel != NormKernel::block, std::to_string(columns));
}

// Each number of threads and vectors that the chooser may ask for has its instance: rows that fill it, and rows that do
// not.
TEST(the_instances_of_a_block) {
  const SeedsAtMost few(1);
  int number = 0;
  for (int64_t columns : {1032, 1536, 1544, 2048, 2056, 2304, 2560, 2568,  3072,  3080,  3584,  3592,  3840,  4096,
                          4104, 5120, 6144, 6152, 7168, 8200, 9216, 10240, 10248, 11264, 12296, 13312, 14336, 16384}) {
    if (++number % 2)
      kSuite.in_a_block<bfloat16>({.rows = 1, .columns = columns}, 0);
    else
      kSuite.in_a_block<float16>({.rows = 1, .columns = columns}, 0);
  }
}

// mean(s^2) - mean^2 would lose every digit of the variance here.
TEST(a_mean_that_dwarfs_the_variance) {
  const SeedsAtMost few(NormSuite::kSeedsOfNumbers);
  for (int64_t columns : {16, 512, 516, 4096, 4099}) kSuite.run<float>({.rows = 2, .columns = columns, .mean = 1000});
  for (int64_t columns : {128, 768}) kSuite.run<float16>({.rows = 2, .columns = columns, .mean = 1000});
}

TEST(constant_rows) {
  const SeedsAtMost few(NormSuite::kSeedsOfNumbers);
  for (int64_t columns : {16, 128, 520, 768, 4096, 1600, 1025}) {
    NormCase<bfloat16> p(kSuite.op, {.rows = 2, .columns = columns});
    for (size_t i = 0; i < p.x.size(); ++i) p.x[i] = from_float<bfloat16>(i < p.x.size() / 2 ? 3.f : -1e4f);
    p.compute_oracle();
    p.run();
  }
}

// Rows of a block are summed about the mean of four elements.
TEST(four_equal_elements_whose_sum_overflows) {
  const SeedsAtMost few(NormSuite::kSeedsOfNumbers);
  for (int64_t columns : {1536, 1600, 5120}) {
    NormCase<bfloat16> p(kSuite.op, {.rows = 1, .columns = columns});
    for (size_t i = 0; i < p.x.size(); ++i) p.x[i] = from_float<bfloat16>(3e38f);
    p.compute_oracle();
    under_every_seed([&] {
      p.poison_outputs();
      expect_ok(kSuite.op.forward(p.forward, nullptr));
      NormSuite::check_forward_and_statistics(p);
    });
  }
}

RANDOM_TEST(random_problems) { kSuite.run_random(random); }
RANDOM_TEST(random_problems_of_few_multiprocessors) { kSuite.run_random_of_few_multiprocessors(random); }

}  // namespace
}  // namespace warpsmith::test
