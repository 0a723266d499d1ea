// 8-bit floats: every code and every rounding against their definition, mma and wgmma against plain products.
#include <cmath>
#include <limits>

#include "../../tools/gpu/conformance/float8_product.cuh"
#include "device/float8.h"
#include "device/mma.h"
#include "device/tensor_copy.h"
#include "device/tensor_map.h"
#include "harness.h"

namespace warpsmith::test {
namespace {

using device::Swizzle;
using e4m3 = float8_e4m3;
using e5m2 = float8_e5m2;

// OCP 8-bit floating point specification, table 1.
template <class T> struct Definition;
template <> struct Definition<e4m3> {
  static constexpr int mantissa = 3, bias = 7;
  static constexpr double largest = 448;
};
template <> struct Definition<e5m2> {
  static constexpr int mantissa = 2, bias = 15;
  static constexpr double largest = 57344;
};

template <class T> double value_of(int code) {
  using D = Definition<T>;
  const int exponent = (code & 0x7f) >> D::mantissa, fraction = code & ((1 << D::mantissa) - 1);
  const double sign = code & 0x80 ? -1.0 : 1.0;
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - D::bias - D::mantissa);
  if (D::mantissa == 3 && (code & 0x7f) == 0x7f) return std::nan("");
  if (D::mantissa == 2 && exponent == 31)
    return fraction ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  return sign * std::ldexp(fraction + (1 << D::mantissa), exponent - D::bias - D::mantissa);
}

template <class T> void every_code_widens() {
  for (int code = 0; code < 256; ++code) {
    const double expected = value_of<T>(code);
    const auto actual = static_cast<double>(device::to_float(T{static_cast<uint8_t>(code)}));
    expect(
        std::isnan(expected) ? std::isnan(actual) : actual == expected && std::signbit(actual) == (code >= 128),
        "code " + std::to_string(code) + ": expected " + std::to_string(expected) + ", got " + std::to_string(actual));
  }
}
TEST(every_code_of_e4m3_widens) { every_code_widens<e4m3>(); }
TEST(every_code_of_e5m2_widens) { every_code_widens<e5m2>(); }

template <class T> int largest_code() { return std::is_same_v<T, e4m3> ? 0x7e : 0x7b; }

// Between each pair of neighbours: the midpoint goes to the even code, what lies beside it to the nearer one.
template <class T> void rounding_is_to_nearest_even() {
  const auto expect_code = [](float x, int code) {
    for (const int sign : {0, 0x80}) {
      const int actual = device::from_float<T>(sign ? -x : x).bits;
      expect(actual == (code | sign),
             std::to_string(x) + ": expected code " + std::to_string(code | sign) + ", got " + std::to_string(actual));
    }
  };
  for (int code = 0; code < largest_code<T>(); ++code) {
    const auto low = static_cast<float>(value_of<T>(code)), high = static_cast<float>(value_of<T>(code + 1));
    const float middle = (low + high) / 2;
    expect_code(low, code);
    expect_code(std::nextafterf(low, high), code);
    expect_code(std::nextafterf(middle, low), code);
    expect_code(middle, code % 2 ? code + 1 : code);
    expect_code(std::nextafterf(middle, high), code + 1);
    expect_code(std::nextafterf(high, low), code + 1);
  }
  const auto largest = static_cast<float>(Definition<T>::largest);
  for (const float x : {largest, std::nextafterf(largest, INFINITY), largest * 1.06f, largest * 1.5f, 3e38f,
                        std::numeric_limits<float>::infinity()})
    expect_code(x, largest_code<T>());
  expect_code(std::numeric_limits<float>::denorm_min(), 0);
  for (const uint32_t nan : {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xffffffffu})
    expect_equal("NaN", int{device::from_float<T>(std::bit_cast<float>(nan)).bits}, 0x7f);
}
TEST(e4m3_rounds_to_nearest_even) { rounding_is_to_nearest_even<e4m3>(); }
TEST(e5m2_rounds_to_nearest_even) { rounding_is_to_nearest_even<e5m2>(); }

TEST(pack_puts_the_first_value_lowest) {
  expect_equal("e4m3", device::pack<e4m3>(1.0f, 2.0f, -1.0f, 0.0f), 0x00b84038u);
  expect_equal("e5m2", device::pack<e5m2>(1.0f, 2.0f, -1.0f, 0.0f), 0x00bc403cu);
}

// The share of upward roundings is the distance from below: counted over evenly spread random bits.
template <class T> void stochastic_rounding_is_fair(Random& random) {
  const int code = static_cast<int>(random.integer(0, largest_code<T>() - 1));
  const double low = value_of<T>(code), high = value_of<T>(code + 1);
  const double share = static_cast<double>(random.integer(0, 16)) / 16;
  const bool negative = random.coin();
  const auto x = static_cast<float>(low + share * (high - low));
  int up = 0;
  constexpr int kDraws = 1024;
  for (uint32_t i = 0; i < kDraws; ++i) {
    // The low bits of 21: whichever of them a format uses, they run through evenly spaced values.
    const int bits = std::is_same_v<T, e4m3> && x >= 0x1p-6f ? 20 : 21;
    const uint32_t draw = (i << (bits - 10)) + (1u << (bits - 11));
    const int rounded = device::round_stochastic<T>(negative ? -x : x, draw).bits;
    expect(rounded == (code | (negative ? 0x80 : 0)) || rounded == ((code + 1) | (negative ? 0x80 : 0)),
           "rounds to a neighbour");
    up += (rounded & 0x7f) == code + 1;
  }
  expect_equal("upward", up, static_cast<int>(share * kDraws));
}
RANDOM_TEST(stochastic_rounding_of_e4m3) { stochastic_rounding_is_fair<e4m3>(random); }
RANDOM_TEST(stochastic_rounding_of_e5m2) { stochastic_rounding_is_fair<e5m2>(random); }
TEST(stochastic_rounding_saturates) {
  expect_equal("e4m3", int{device::round_stochastic<e4m3>(449.0f, 0xffffffffu).bits}, 0x7e);
  expect_equal("e4m3", int{device::round_stochastic<e4m3>(-INFINITY, 0).bits}, 0xfe);
  expect_equal("e5m2", int{device::round_stochastic<e5m2>(60000.0f, 0xffffffffu).bits}, 0x7b);
  expect_equal("e5m2", int{device::round_stochastic<e5m2>(NAN, 0).bits}, 0x7f);
}

template <class T> void fill_small(Buffer<T>& x, int step) {
  for (size_t i = 0; i < x.size(); ++i)
    x[i] = device::from_float<T>(static_cast<float>(static_cast<int>(i * static_cast<size_t>(step) % 9) - 4));
}
template <class A, class B>
std::vector<double> plain_product(const Buffer<A>& a, const Buffer<B>& b, size_t depth, double start) {
  const size_t rows = a.size() / depth, columns = b.size() / depth;
  std::vector<double> d(rows * columns, start);
  for (size_t m = 0; m < rows; ++m)
    for (size_t n = 0; n < columns; ++n)
      for (size_t k = 0; k < depth; ++k)
        d[m * columns + n] +=
            static_cast<double>(device::to_float(a[m * depth + k]) * device::to_float(b[n * depth + k]));
  return d;
}

// A fragment by its definition in device/mma.h.
template <class A, class B> __global__ void multiply(const A* a, const B* b, float* d) {
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  uint32_t fa[4], fb[2];
  const auto four = [](const auto* p) {
    uint32_t u = 0;
    for (int i = 3; i >= 0; --i) u = u << 8 | p[i].bits;
    return u;
  };
  for (int i = 0; i < 4; ++i) fa[i] = four(a + (g + 8 * (i & 1)) * 32 + 4 * t + 16 * (i >> 1));
  for (int i = 0; i < 2; ++i) fb[i] = four(b + g * 32 + 4 * t + 16 * i);
  float acc[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  device::mma_m16n8k32<A, B>(acc, fa, fb);
  for (int i = 0; i < 4; ++i) d[(g + 8 * (i >> 1)) * 8 + 2 * t + (i & 1)] = acc[i];
}
template <class A, class B> void mma_matches() {
  Buffer<A> a(16 * 32);
  Buffer<B> b(8 * 32);
  Buffer<float> d(16 * 8);
  fill_small(a, 5);
  fill_small(b, 7);
  under_every_seed([&] {
    d.poison();
    expect_ok(launch(multiply<A, B>, {.block = 32}, nullptr, a.data(), b.data(), d.data()));
    expect_close("d", d, plain_product(a, b, 32, 1.0), {});
    expect_equal("flops", sim::counters().flops, int64_t{2} * 16 * 8 * 32);
  });
}
TEST(mma_of_every_pair) {
  NEEDS_SM90_CODE;
  mma_matches<e4m3, e4m3>();
  mma_matches<e4m3, e5m2>();
  mma_matches<e5m2, e4m3>();
  mma_matches<e5m2, e5m2>();
}

template <class A, class B, int N, Swizzle kSwizzle, bool ARegisters> void wgmma_matches() {
  using float8_product::kDepth;
  Buffer<A> a(64 * kDepth);
  Buffer<B> b(N * kDepth);
  Buffer<float> d(64 * N);
  fill_small(a, 5);
  fill_small(b, 7);
  const std::vector<double> expected = plain_product(a, b, kDepth, 0.0);
  under_every_seed([&] {
    d.poison();
    const LaunchConfig config{.block = 128, .dynamic_shared_bytes = (64 + N) * kDepth};
    expect_ok(
        launch(float8_product::product<A, B, N, kSwizzle, ARegisters>, config, nullptr, a.data(), b.data(), d.data()));
    expect_close("d", d, expected, {});
    expect_equal("flops", sim::counters().flops, int64_t{2} * 64 * N * kDepth);
  });
}
TEST(wgmma_of_every_pair) {
  NEEDS_SM90_CODE;
  wgmma_matches<e4m3, e4m3, 64, Swizzle::bytes128, false>();
  wgmma_matches<e4m3, e5m2, 64, Swizzle::bytes64, false>();
  wgmma_matches<e5m2, e4m3, 64, Swizzle::bytes32, false>();
  wgmma_matches<e5m2, e5m2, 64, Swizzle::none, false>();
}
TEST(wgmma_with_a_in_registers) {
  NEEDS_SM90_CODE;
  wgmma_matches<e4m3, e4m3, 64, Swizzle::bytes128, true>();
  wgmma_matches<e5m2, e4m3, 32, Swizzle::bytes64, true>();
}
// Tiles that arrive by tensor copies: pairs of 8-bit elements travel as 16-bit ones (device/tensor_map.h).
__global__ void copied_product(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, float* d) {
  WARPSMITH_DYNAMIC_SHARED(memory);
  WARPSMITH_SHARED(device::Mbarrier, full, 1);
  const int t = threadIdx.x, lane = t % 32, row0 = t / 32 * 16 + lane / 4;
  constexpr int kTileBytes = 64 * float8_product::kDepth;
  if (t == 0) {
    device::mbarrier_init(full, 1);
    device::mbarrier_init_fence();
    device::mbarrier_arrive_expect(full, 2 * kTileBytes);
    device::tensor_load(memory, &a, full, {0, 0});
    device::tensor_load(memory + kTileBytes, &b, full, {0, 0});
  }
  __syncthreads();
  device::mbarrier_wait(full, 0);
  float acc[32];
  device::wgmma_fence();
  for (int k = 0; k < float8_product::kDepth; k += 32)
    device::wgmma_float8<e4m3, e5m2, 64>(acc, float8_product::describe(Swizzle::bytes128, 64, memory, k),
                                         float8_product::describe(Swizzle::bytes128, 64, memory + kTileBytes, k),
                                         k > 0);
  device::wgmma_commit();
  device::wgmma_wait<0>();
  for (int j = 0; j < 32; ++j) d[(row0 + 8 * (j >> 1 & 1)) * 64 + 8 * (j >> 2) + 2 * (lane % 4) + (j & 1)] = acc[j];
}
TEST(tiles_arrive_by_tensor_copies) {
  NEEDS_SM90_CODE;
  using float8_product::kDepth;
  Buffer<e4m3> a(50 * kDepth);  // the last rows are outside the tensor
  Buffer<e5m2> b(64 * kDepth);
  Buffer<float> d(64 * 64);
  fill_small(a, 5);
  fill_small(b, 7);
  std::vector<double> expected = plain_product(a, b, kDepth, 0.0);
  expected.resize(64 * 64, 0.0);
  const auto map_of = [](TensorMap& map, const void* base, int rows) {
    return make_tensor_map(map, {.base = base,
                                 .dtype = Dtype::float16,
                                 .rank = 2,
                                 .sizes = {kDepth / 2, rows},
                                 .strides_bytes = {0, kDepth},
                                 .box = {kDepth / 2, 64},
                                 .swizzle = Swizzle::bytes128});
  };
  TensorMap map_a, map_b;
  expect_ok(map_of(map_a, a.data(), 50));
  expect_ok(map_of(map_b, b.data(), 64));
  under_every_seed([&] {
    d.poison();
    const LaunchConfig config{.block = 128, .dynamic_shared_bytes = 2 * 64 * kDepth};
    expect_ok(launch(copied_product, config, nullptr, map_a, map_b, d.data()));
    expect_close("d", d, expected, {});
    expect_bytes({.read = (50 + 64) * kDepth, .written = 0});
  });
}
TEST(wgmma_of_every_width) {
  NEEDS_SM90_CODE;
  wgmma_matches<e4m3, e4m3, 8, Swizzle::none, false>();
  wgmma_matches<e4m3, e4m3, 16, Swizzle::bytes32, false>();
  wgmma_matches<e4m3, e4m3, 256, Swizzle::bytes128, false>();
}

}  // namespace
}  // namespace warpsmith::test
