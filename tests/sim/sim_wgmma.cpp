// wgmma in every form the vocabulary has, against a plain product: operands from shared memory in both majors and all
// swizzles, from registers, several groups in flight.
#include <vector>

#include "../../tools/gpu/conformance/wgmma_product.cuh"
#include "harness.h"

namespace warpsmith::test {
namespace {

using device::Major;
using device::Swizzle;
using wgmma_product::kDepth;
using wgmma_product::product;

template <class T, int N, Swizzle kSwizzle, Major AMajor, Major BMajor, bool ARegisters> void product_matches() {
  Buffer<T> a(64 * kDepth), b(N * kDepth);
  Buffer<float> d(64 * N);
  for (size_t i = 0; i < a.size(); ++i) a[i] = from_float<T>(static_cast<float>(static_cast<int>(i * 29 % 13) - 6));
  for (size_t i = 0; i < b.size(); ++i) b[i] = from_float<T>(static_cast<float>(static_cast<int>(i * 31 % 11) - 5));
  std::vector<double> expected(64 * N);
  for (int m = 0; m < 64; ++m)
    for (int n = 0; n < N; ++n) {
      double sum = 0;
      for (int k = 0; k < kDepth; ++k)
        sum += static_cast<double>(to_float(a[m * kDepth + k]) * to_float(b[n * kDepth + k]));
      expected[static_cast<size_t>(m * N + n)] = sum;
    }
  under_every_seed([&] {
    d.poison();
    const LaunchConfig config{.block = 128, .dynamic_shared_bytes = (64 + N) * kDepth * 2};
    expect_ok(
        launch(product<T, N, kSwizzle, AMajor, BMajor, ARegisters>, config, nullptr, a.data(), b.data(), d.data()));
    expect_close("d", d, expected, {});
    expect_equal("flops", sim::counters().flops, int64_t{2} * 64 * N * kDepth);
  });
}

template <class T, int N, Swizzle kSwizzle> void all_majors_match() {
  product_matches<T, N, kSwizzle, Major::k, Major::k, false>();
  product_matches<T, N, kSwizzle, Major::k, Major::mn, false>();
  product_matches<T, N, kSwizzle, Major::mn, Major::k, false>();
  product_matches<T, N, kSwizzle, Major::mn, Major::mn, false>();
  product_matches<T, N, kSwizzle, Major::k, Major::k, true>();
  product_matches<T, N, kSwizzle, Major::k, Major::mn, true>();
}

TEST(swizzle_128_bytes) {
  NEEDS_SM90_CODE;
  all_majors_match<bfloat16, 64, Swizzle::bytes128>();
}
TEST(swizzle_64_bytes) {
  NEEDS_SM90_CODE;
  all_majors_match<bfloat16, 64, Swizzle::bytes64>();
}
TEST(swizzle_32_bytes) {
  NEEDS_SM90_CODE;
  all_majors_match<bfloat16, 64, Swizzle::bytes32>();
}
TEST(no_swizzle) {
  NEEDS_SM90_CODE;
  all_majors_match<bfloat16, 64, Swizzle::none>();
}
TEST(float16_inputs) {
  NEEDS_SM90_CODE;
  product_matches<float16, 64, Swizzle::bytes128, Major::k, Major::mn, false>();
}
TEST(every_n_in_use) {
  NEEDS_SM90_CODE;
  product_matches<bfloat16, 8, Swizzle::none, Major::k, Major::k, false>();
  product_matches<bfloat16, 16, Swizzle::bytes32, Major::k, Major::mn, false>();
  product_matches<bfloat16, 32, Swizzle::bytes64, Major::k, Major::mn, true>();
  product_matches<bfloat16, 96, Swizzle::bytes128, Major::k, Major::k, true>();
  product_matches<bfloat16, 128, Swizzle::bytes128, Major::k, Major::mn, true>();
  product_matches<bfloat16, 80, Swizzle::bytes32, Major::k, Major::k, false>();
  product_matches<float16, 80, Swizzle::bytes128, Major::k, Major::k, true>();
  product_matches<float16, 144, Swizzle::bytes32, Major::mn, Major::mn, false>();
  product_matches<bfloat16, 144, Swizzle::bytes64, Major::k, Major::k, true>();
  product_matches<bfloat16, 160, Swizzle::bytes64, Major::k, Major::mn, false>();
  product_matches<float16, 160, Swizzle::bytes32, Major::k, Major::mn, true>();
  product_matches<float16, 176, Swizzle::none, Major::k, Major::k, false>();
  product_matches<bfloat16, 176, Swizzle::bytes32, Major::k, Major::mn, true>();
  product_matches<bfloat16, 192, Swizzle::bytes128, Major::mn, Major::mn, false>();
  product_matches<bfloat16, 256, Swizzle::bytes128, Major::k, Major::k, false>();
}

}  // namespace
}  // namespace warpsmith::test
