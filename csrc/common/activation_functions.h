#pragma once
#include "common/host_device.h"

// The activation functions, for CPU and device code. An object is made for one x; it gives the value and the derivative
// times a factor, and shares what both need. Math provides Float and the elementary functions.
namespace warpsmith::activation {

// sigmoid(x) and 1 - sigmoid(x). Subtracting would lose digits that x times the difference needs.
template <class Float> struct SigmoidAndRest {
  Float value, complement;
};

// x sigmoid(x)
template <class Math> struct Silu {
  using Float = typename Math::Float;
  Float x;
  SigmoidAndRest<Float> s;
  WARPSMITH_HOST_DEVICE explicit Silu(Float at) : x(at), s(Math::sigmoid(at)) {}
  WARPSMITH_HOST_DEVICE Float value() const { return x * s.value; }
  WARPSMITH_HOST_DEVICE Float times_derivative(Float g) const { return g * (s.value + x * s.value * s.complement); }
};

// x Phi(x), Phi the standard normal distribution function
template <class Math> struct Gelu {
  using Float = typename Math::Float;
  Float x, bell, cdf;
  WARPSMITH_HOST_DEVICE explicit Gelu(Float at) : x(at), bell(Math::normal_bell(at)), cdf(Math::normal_cdf(at, bell)) {}
  WARPSMITH_HOST_DEVICE Float value() const { return x * cdf; }
  WARPSMITH_HOST_DEVICE Float times_derivative(Float g) const {
    return g * (cdf + x * (Float(0.39894228040143267794) * bell));
  }
};

// x (1 + tanh u) / 2 = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3). The sigmoid loses no digits for x < 0.
template <class Math> struct GeluTanh {
  using Float = typename Math::Float;
  static constexpr Float kTwice = Float(1.5957691216057307117), kCubic = Float(0.044715);  // 2 sqrt(2 / pi)
  Float x, square;
  SigmoidAndRest<Float> s;
  WARPSMITH_HOST_DEVICE explicit GeluTanh(Float at)
      : x(at), square(at * at), s(Math::sigmoid(at * (kTwice + kTwice * kCubic * square))) {}
  WARPSMITH_HOST_DEVICE Float value() const { return x * s.value; }
  WARPSMITH_HOST_DEVICE Float times_derivative(Float g) const {
    return g * (s.value + x * s.value * s.complement * (kTwice + Float(3) * kTwice * kCubic * square));
  }
};

// max(x, 0). The derivative is 0 at 0, and 0 times an infinite or NaN factor is 0, as in torch. NaN stays NaN.
template <class Math> struct Relu {
  using Float = typename Math::Float;
  Float x;
  WARPSMITH_HOST_DEVICE explicit Relu(Float at) : x(at) {}
  WARPSMITH_HOST_DEVICE Float value() const { return x <= Float(0) ? Float(0) : x; }
  WARPSMITH_HOST_DEVICE Float times_derivative(Float g) const { return x <= Float(0) ? Float(0) : g; }
};

// max(x, 0)^2
template <class Math> struct ReluSquared {
  using Float = typename Math::Float;
  Float x;
  WARPSMITH_HOST_DEVICE explicit ReluSquared(Float at) : x(at) {}
  WARPSMITH_HOST_DEVICE Float value() const { return x <= Float(0) ? Float(0) : x * x; }
  WARPSMITH_HOST_DEVICE Float times_derivative(Float g) const { return x <= Float(0) ? Float(0) : g * (x + x); }
};

}  // namespace warpsmith::activation
