// The elementary functions of CPU kernels and of device code against the standard library in double precision, and the
// lanes of the dropout mask by the vector against those one by one.
#include <utility>

#include "common/dropout.h"
#include "common/vectorize.h"
#include "cpu/dropout_lanes.h"
#include "cpu/vector_math.h"
#include "device/fast_divide.h"
#include "device/math.h"
#include "harness.h"

namespace warpsmith::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity(), kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kTiny = std::numeric_limits<float>::denorm_min(), kSmall = std::numeric_limits<float>::min();

// Every 4096th float (every bit pattern family: both signs, subnormals, infinities, NaN), and many near the places
// where the functions change their formula.
std::vector<float> dense() {
  std::vector<float> x = {0.0f, -0.0f, kTiny, -kTiny, kSmall, -kSmall, kInf, -kInf, kNaN};
  for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += 4093)
    x.push_back(std::bit_cast<float>(static_cast<uint32_t>(bits)));
  for (float a = -20.0f; a < 20.0f; a += 0.00137f) x.push_back(a);
  for (float a = -110.0f; a < 100.0f; a += 0.0173f) x.push_back(a);
  for (float center : {0.625f, 1.0f, 0.70710678f, 1.41421356f, 88.72283f, -87.33654f, -103.97208f})
    for (int k = -200; k <= 200; ++k)
      for (float sign : {1.0f, -1.0f}) x.push_back(sign * (center + static_cast<float>(k) * 6e-8f * std::fabs(center)));
  return x;
}

double ulp_of(double value) {
  if (!std::isfinite(value)) return 0;
  const int exponent = std::max(std::ilogb(std::max(std::fabs(value), 1e-300)), -126);
  return std::ldexp(1.0, exponent - 23);
}

// `allowed(x, exact)` is the largest error at x.
template <class Exact, class Allowed> void compare(const std::string& what, const std::vector<float>& x,
                                                   const std::vector<float>& y, Exact&& exact, Allowed&& allowed) {
  int reported = 0;
  for (size_t i = 0; i < x.size() && reported < 5; ++i) {
    const double want = exact(static_cast<double>(x[i])), got = y[i];
    const float rounded = static_cast<float>(want);
    const bool special = !std::isfinite(rounded) || !std::isfinite(got);
    const bool ok = special ? (std::isnan(rounded) && std::isnan(got)) || rounded == y[i] ||
                                  (std::isinf(rounded) && std::isfinite(want) &&
                                   std::fabs(got - want) <= allowed(static_cast<double>(x[i]), want)) ||
                                  (std::isinf(rounded) && std::fabs(got) >= 0x1.fffffcp127)
                            : got == want || std::fabs(got - want) <= allowed(static_cast<double>(x[i]), want);
    if (ok) continue;
    ++reported;
    fail(what + "(" + std::to_string(x[i]) + "): expected " + std::to_string(want) + ", got " + std::to_string(got) +
         ", error in ulp " + std::to_string(std::fabs(got - want) / ulp_of(want)));
  }
}

auto ulps(double count) {
  return [count](double, double want) { return count * ulp_of(want); };
}

#define VECTOR_LOOP(name, expression)                                                                 \
  WARPSMITH_VECTORIZE __attribute__((optimize("O3,no-math-errno,no-trapping-math"))) void all_##name( \
      const float* from, float* to, size_t count) {                                                   \
    for (size_t i = 0; i < count; ++i) {                                                              \
      const float x = from[i];                                                                        \
      to[i] = expression;                                                                             \
    }                                                                                                 \
  }                                                                                                   \
  std::vector<float> apply_##name(const std::vector<float>& x) {                                      \
    std::vector<float> y(x.size());                                                                   \
    all_##name(x.data(), y.data(), x.size());                                                         \
    return y;                                                                                         \
  }
VECTOR_LOOP(exp, math::exp(x))
VECTOR_LOOP(exp_nonpositive, math::exp_nonpositive(-std::fabs(x)))
VECTOR_LOOP(log, math::log(x))
VECTOR_LOOP(tanh, math::tanh(x))
VECTOR_LOOP(erf, math::erf(x))
VECTOR_LOOP(sigmoid, math::sigmoid(x))
VECTOR_LOOP(normal_cdf, math::normal_cdf(x, math::normal_bell(x)))
#undef VECTOR_LOOP

double exact_sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double exact_cdf(double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }
double (*const exact_exp)(double) = std::exp;
double (*const exact_log)(double) = std::log;
double (*const exact_tanh)(double) = std::tanh;
double (*const exact_erf)(double) = std::erf;

TEST(vector_math_against_the_standard_library) {
  const std::vector<float> x = dense();
  compare("exp", x, apply_exp(x), exact_exp, ulps(1));
  compare(
      "exp_nonpositive of -", x, apply_exp_nonpositive(x), [](double at) { return std::exp(-std::fabs(at)); },
      [](double at, double want) { return std::fabs(at) <= 87 ? ulp_of(want) : want; });
  compare("log", x, apply_log(x), exact_log, ulps(1));
  compare("tanh", x, apply_tanh(x), exact_tanh, ulps(2));
  compare("erf", x, apply_erf(x), exact_erf, ulps(2));
  compare("sigmoid", x, apply_sigmoid(x), exact_sigmoid, ulps(2.5));
  compare("normal_cdf", x, apply_normal_cdf(x), exact_cdf, [](double at, double want) {
    if (at < -13) return want;  // not a normal number: may be 0
    return at > -1 ? 4 * ulp_of(want) : want * (10 + at * at / 2) * 0x1p-24;
  });
}

TEST(vector_math_in_double_is_that_of_the_standard_library) {
  for (double x : {-3.0, -0.1, 0.0, 1e-9, 0.7, 40.0}) {
    expect_equal("exp", math::exp(x), std::exp(x));
    expect_equal("exp_nonpositive", math::exp_nonpositive(-x * x), std::exp(-x * x));
    expect_equal("log", math::log(x + 4), std::log(x + 4));
    expect_equal("tanh", math::tanh(x), std::tanh(x));
    expect_equal("erf", math::erf(x), std::erf(x));
    expect(std::fabs(math::sigmoid(x) - exact_sigmoid(x)) <= 1e-15, "sigmoid");
    expect(std::fabs(math::normal_cdf(x, math::normal_bell(x)) - exact_cdf(x)) <= 1e-15, "normal_cdf");
  }
}

template <class F> std::vector<float> apply(const std::vector<float>& x, F&& f) {
  std::vector<float> y;
  for (float v : x) y.push_back(f(v));
  return y;
}

// Of exact primitives the bounds are those of the composition; of primitives with the largest errors that they may have
// (Options::approximation) those that device/math.h states.
void check_device_math(uint64_t approximation) {
  const std::vector<float> x = dense();
  const double flushed = static_cast<double>(kSmall);
  const double own = approximation ? 2 : 1;  // errors that the primitives add to the composition's
  const uint64_t saved = std::exchange(sim::options().approximation, approximation);
  const auto relative = [&](double constant, double slope) {
    return [=](double at, double want) { return std::fabs(want) * (constant + slope * std::fabs(at)) + flushed; };
  };
  compare("exp", x, apply(x, device::exp), exact_exp, relative(own * 0x1p-23, 0x1p-23));
  compare("sigmoid", x, apply(x, device::sigmoid), exact_sigmoid,
          [&](double at, double want) { return want * (own * 0x1p-22 + (at < 0 ? -at * 0x1p-23 : 0)) + flushed; });
  compare("tanh", x, apply(x, device::tanh), exact_tanh, relative(own * 0x1p-22, 0));
  const auto below_zero = [&](double at, double want) { return want * (0x1p-20 + at * at * 0x1p-23) + flushed; };
  compare("fast_normal_cdf", x, apply(x, [](float v) { return device::fast_normal_cdf(v, device::normal_bell(v)); }),
          exact_cdf, [&](double at, double want) { return at > 0 ? 0x1p-21 : below_zero(at, want); });
  compare("normal_cdf", x, apply(x, [](float v) { return device::normal_cdf(v, device::normal_bell(v)); }), exact_cdf,
          [&](double at, double want) { return at > -1 ? want * 0x1p-21 : below_zero(at, want); });
  sim::options().approximation = saved;
}
TEST(device_math_of_exact_primitives) { check_device_math(0); }
TEST(device_math_of_primitives_at_their_bounds) {
  for (const uint64_t approximation : {1, 2, 3}) check_device_math(approximation);
}

TEST(fast_division_is_division) {
  Random random(1);
  for (int64_t divisor : {int64_t{1}, int64_t{2}, int64_t{3}, int64_t{7}, int64_t{96}, int64_t{641}, int64_t{4096},
                          (int64_t{1} << 31) - 1, (int64_t{1} << 31) + 1, int64_t{1} << 40, (int64_t{1} << 62) - 1}) {
    const device::FastDivide divide(divisor);
    std::vector<int64_t> dividends = {0, 1, divisor - 1, divisor, divisor + 1, std::numeric_limits<int64_t>::max()};
    for (int i = 0; i < 1000; ++i) {
      const int64_t any = static_cast<int64_t>(random.bits() >> (1 + random.bits() % 60));
      dividends.push_back(any);
      dividends.push_back(any / divisor * divisor);
      dividends.push_back(std::max<int64_t>(0, any / divisor * divisor - 1));
    }
    for (int64_t n : dividends) expect_equal("quotient", divide.quotient(n), n / divisor);
  }
}

TEST(dropout_lanes_by_the_vector) {
  for (const uint64_t call : {uint64_t{0}, uint64_t{1000}, (uint64_t{1} << 32) - 3, (uint64_t{1} << 60) - 5})
    for (const uint64_t seed : {uint64_t{0}, uint64_t{0x299f31d0a4093822}, ~uint64_t{0}}) {
      uint16_t lanes[cpu::kLaneCount];
      cpu::fill_lanes(cpu::LaneCalls(seed, ~seed / 3), call, lanes);
      for (int i = 0; i < cpu::kLaneCount; ++i) {
        const PhiloxCounter one = dropout_lanes(seed, ~seed / 3, call + static_cast<uint64_t>(i / kDropoutLanes));
        expect(dropout_keeps(one, i % kDropoutLanes, lanes[i]) && !dropout_keeps(one, i % kDropoutLanes, lanes[i] + 1u),
               "lane " + std::to_string(i));
      }
    }
}

TEST(dropout_thresholds) {
  expect_equal("p = 0", make_dropout(nullptr, 0).threshold, 0u);
  expect_equal("p = 0.5", make_dropout(nullptr, 0.5).threshold, 32768u);
  expect_equal("p = 1", make_dropout(nullptr, 1).threshold, 65536u);
  expect_equal("scale of 0.5", make_dropout(nullptr, 0.5).scale, 2.0);
  expect_equal("scale of 1", make_dropout(nullptr, 1).scale, 0.0);
  const PhiloxCounter lanes = {{~0u, ~0u, ~0u, ~0u}};
  expect(!dropout_keeps(lanes, 7, 65536), "p = 1 drops the largest lane");
  expect(dropout_keeps({{0, 0, 0, 0}}, 0, 0), "p = 0 keeps the smallest lane");
}

}  // namespace
}  // namespace warpsmith::test
