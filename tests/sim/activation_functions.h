#pragma once
#include <algorithm>
#include <cmath>

// The functions of kernels/activation/functions.h and their derivatives, from their formulas in double precision: the
// oracle of the sim tests. By the names that rows give.
namespace warpsmith::test::exact {

struct Silu {
  static double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
  static double value(double x) { return x * sigmoid(x); }
  static double derivative(double x) { return sigmoid(x) * (1 + x * (1 - sigmoid(x))); }
};

struct Gelu {
  static double value(double x) { return 0.5 * x * std::erfc(-x / std::sqrt(2.0)); }
  static double derivative(double x) {
    return 0.5 * std::erfc(-x / std::sqrt(2.0)) + x * std::exp(-0.5 * x * x) / std::sqrt(2 * M_PI);
  }
};

struct GeluTanh {
  static double inner(double x) { return std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x); }
  static double value(double x) { return 0.5 * x * (1 + std::tanh(inner(x))); }
  static double derivative(double x) {
    const double t = std::tanh(inner(x));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
  }
};

struct Relu {
  static double value(double x) { return std::max(x, 0.0); }
  static double derivative(double x) { return x > 0; }
};

struct ReluSquared {
  static double value(double x) { return std::max(x, 0.0) * std::max(x, 0.0); }
  static double derivative(double x) { return 2 * std::max(x, 0.0); }
};

}  // namespace warpsmith::test::exact
