#pragma once
#include <cmath>
#include <string>
#include <vector>

#include "harness.h"

// How far a right kernel may be from double precision.
//
// A rounding of x is off by at most h |x|, with h half a step of the type, anywhere in between: its variance is
// (h x)^2 / 3 or less. Roundings are independent, so that variances add. A result may be off by six standard deviations
// of what follows, and by one step for its own rounding; all elements together by one, in the mean square.
//
//   sums of n floats x, in any order: each addition rounds a partial sum. Partial sums of random terms grow like a
//   random
//       walk, those of equal ones in proportion: h^2 n (sum of x^2 / 6 + (sum of x)^2 / 9).
//   p = exp(s - lse): relative, the logit's sum, its products, and the exponential, 2^-22. `lse` is common to a row:
//   four
//       roundings, its logarithm and the sum of exponentials. What approximate instructions are off by may have one
//       sign: that part is the same for all terms, and is a part of the result: `bias`.
//   w = p kept / (1 - dropout) is rounded to T before it meets dout (not in float).
//   dS = p (dP - delta), where delta = sum of p dP, so that errors e of the keys' p dP are off by
//       (1 - p[j]) e[j] - sum over other k of p[j] / p[k] * p[k] e[k], and by roundings of delta itself. In dq the
//       latter and the former meet as sum over j of p[j] e[j] (k[j] - mean), mean = sum over j of p[j] k[j].
//   dS is rounded to T before it meets q and k (not in float).
//
// Portable kernels may leave a delta in dq that is off by an eighth of T's half step times the row's sum of |dS|
// (kDeltaCounts). Hopper kernels take delta from the rounded out, and dS from the rounded P. The oracle takes their
// delta from the same rounded out: its roundings are no random ones where rows see one key, and so have one out.
namespace warpsmith::test {

constexpr double kExponentialError = 0x1p-22, kTanhError = 0x1p-21;  // relative, of device/math.h
template <class T> constexpr double kHalfStep = 1.0 / static_cast<double>(int64_t{2} << kMantissaBits<T>);

inline double square(double x) { return x * x; }
// Below the least normal number steps do not shrink.
template <class T> double rounding(double x) {
  return square(kHalfStep<T> * std::max(std::fabs(x), std::ldexp(1.0, kLeastExponent<T>))) / 3;
}
template <class T> double rounding_of_operand(double x) { return std::is_same_v<T, float> ? 0.0 : rounding<T>(x); }
inline double additions(double n, double squares, double sum) {
  return square(kHalfStep<float>) * n * (squares / 6 + square(sum) / 9);
}

// Of one row: variances of lse and of delta, and what the keys add to that of delta.
struct RowDeviations {
  double lse = 0, delta = 0, of_keys = 0, weight = 0, weight_squares = 0;

  // Of p (dP - delta), where `own` is what its key adds.
  double of_gradient(double p, double ds, double own, bool delta_of_rounded_out) const {
    const double of_delta = delta + (delta_of_rounded_out ? 0 : of_keys - own);
    return square(delta_of_rounded_out ? 1 : 1 - p) * own + square(p) * of_delta + square(ds) * lse;
  }
};

// Of every element of a result: variances of its terms, the terms' squares, of which there are at most `terms`, and
// what it may be off by beside. The `dim` elements of a row share the roundings of one weight a term.
struct Deviations {
  std::vector<double> variance, squares, slack;
  double terms = 0, bias = 0;
  size_t dim = 1, added = 0;

  Deviations() = default;
  Deviations(size_t elements, int64_t row, double most_terms, double most_keys)
      : variance(elements),
        squares(elements),
        slack(elements),
        terms(most_terms),
        bias(kExponentialError * (2 + std::log(std::max(1.0, most_keys)))),
        dim(static_cast<size_t>(row)) {}
  void add(size_t element, double term, double of_term) {
    variance[element] += of_term;
    squares[element] += term * term;
    ++added;
  }
  // At least so many errors do not depend on each other.
  size_t independent() const { return std::min(variance.size(), added / dim); }
  double allowed(size_t i, double expected) const {
    return 6 * std::sqrt(variance[i] + additions(terms, squares[i], expected)) + slack[i] + bias * std::fabs(expected);
  }
};

// The root of the mean square of errors over standard deviations, the result's own rounding included. Variances above
// are upper bounds, so that a right kernel stays below 1: a fault that moves all elements by less than six standard
// deviations does not.
template <class T>
double root_mean_square(const Buffer<T>& actual, const std::vector<double>& expected, const Deviations& deviations) {
  double sum = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double variance = deviations.variance[i] + additions(deviations.terms, deviations.squares[i], expected[i]) +
                            rounding<T>(expected[i]);
    const double error = std::fabs(static_cast<double>(to_float(actual[i])) - expected[i]);
    const double beside = deviations.slack[i] + deviations.bias * std::fabs(expected[i]);
    sum += square(std::max(0.0, error - beside)) / variance;
  }
  return actual.size() == 0 ? 0 : std::sqrt(sum / static_cast<double>(actual.size()));
}

// Independent errors of which the mean square is compared. A uniform error's square is spread by 0.9 of its mean: the
// mean of so many by 0.02, and of the 24 of a problem with one key by 0.18.
constexpr size_t kMany = 2000;

// Reports through `differ(index, allowed error)`; returns the root of the mean square.
template <class T, class Differ> double compare(const Buffer<T>& actual, const std::vector<double>& expected,
                                                const Deviations& deviations, Differ&& differ) {
  for (size_t i = 0; i < actual.size(); ++i) {
    const int exponent = expected[i] == 0 ? kLeastExponent<T> : std::max(std::ilogb(expected[i]), kLeastExponent<T>);
    const double allowed = std::ldexp(1.0, exponent - kMantissaBits<T>) + deviations.allowed(i, expected[i]);
    if (!(std::fabs(static_cast<double>(to_float(actual[i])) - expected[i]) <= allowed)) differ(i, allowed);
  }
  return deviations.independent() < kMany ? 0 : root_mean_square(actual, expected, deviations);
}

template <class T>
bool is_within(const Buffer<T>& actual, const std::vector<double>& expected, const Deviations& deviations) {
  bool within = true;
  const double of_all = compare(actual, expected, deviations, [&](size_t, double) { within = false; });
  return within && of_all <= 1;
}

template <class T> void expect_within(const std::string& name, const Buffer<T>& actual,
                                      const std::vector<double>& expected, const Deviations& deviations) {
  int reported = 0;
  const double of_all = compare(actual, expected, deviations, [&](size_t i, double allowed) {
    expect_close_element(name, i, static_cast<double>(to_float(actual[i])), expected[i], kMantissaBits<T>,
                         kLeastExponent<T>, {.ulps = 0, .relative = 0, .absolute = allowed}, reported);
  });
  expect(of_all <= 1, name + ": errors are " + std::to_string(of_all) + " standard deviations in the mean square");
}

}  // namespace warpsmith::test
