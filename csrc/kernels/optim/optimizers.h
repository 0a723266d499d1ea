#pragma once
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "common/host_device.h"
#include "kernels/optim/contraction.h"
#include "kernels/optim/optim_ops.h"

// The step of each optimizer on one element: functors for the CPU and for kernels.
//
// A functor has:
//   State, Hyper  enumerators that name its states and hyperparameters. They are indices into tables and launches
//   kVariants     masks (bit i: state i). A tensor has the states of one of them
//   kNotNegative  mask of the states that are never below 0
//   kPowers       number of hyperparameters, the first ones, that `scalars` needs a bias correction of
//   kDivides      whether `element` calls its Math
//   scalars       computes, once per chunk and in double, what all elements of a tensor share
//   element       updates one element. If torch has a fused CPU step, the order of operations is torch's
namespace warpsmith {

#define WARPSMITH_NAMES(Enum, ...)               \
  enum Enum : int { __VA_ARGS__, k##Enum##End }; \
  static constexpr const char* k##Enum##Names = #__VA_ARGS__;

constexpr int kOptimMaxStates = 3;

// The arguments of `scalars`.
struct OptimStep {
  const double* values;       // the group's hyperparameters
  const double* corrections;  // [kPowers] 1 - values[i]^step
  double lr;
  double grad_factor;  // gradients are multiplied by it: 1 / grad_scale, negated by maximize
  double step;         // the number of this step, from 1; 0 if the tensor has no counter
};

// NaN of NaN.
template <class T> WARPSMITH_HOST_DEVICE T sign(T x) { return x > T(0) ? T(1) : x < T(0) ? T(-1) : x; }
template <class T> WARPSMITH_HOST_DEVICE T larger_or_nan(T a, T b) { return a > b || a != a ? a : b; }

// Division and square root of optimizers, as IEEE 754 defines them. Kernels have a faster version (quick_math.h).
struct IeeeMath {
  template <class T> WARPSMITH_HOST_DEVICE static T root(T x) { return std::sqrt(x); }
  template <class T> WARPSMITH_HOST_DEVICE static T quotient(T a, T b) { return a / b; }
};

// m <- m + (1 - beta1) (g - m),  v <- beta2 v + (1 - beta2) g^2,  v_max <- max(v_max, v)
// p <- p - lr / (1 - beta1^t) m / (sqrt(v or v_max) / sqrt(1 - beta2^t) + eps)
// First the decay: decoupled p <- p (1 - lr weight_decay); otherwise g <- g + weight_decay p.
template <bool kDecoupled> struct AdamWithDecay {
  WARPSMITH_NAMES(State, exp_avg, exp_avg_sq, max_exp_avg_sq)
  WARPSMITH_NAMES(Hyper, beta1, beta2, eps, weight_decay)
  static constexpr unsigned kVariants[] = {0b011, 0b111};
  static constexpr unsigned kNotNegative = 0b110;
  static constexpr int kPowers = 2;
  static constexpr bool kDivides = true;

  template <class T> struct Scalars {
    T grad_factor, decay, weight1, beta2, weight2, step_size, bias2_sqrt, eps;
  };

  template <class T> WARPSMITH_HOST_DEVICE static Scalars<T> scalars(const OptimStep& s) {
    return {T(s.grad_factor),
            T(kDecoupled ? 1 - s.lr * s.values[weight_decay] : s.values[weight_decay]),
            T(1 - s.values[beta1]),
            T(s.values[beta2]),
            T(1 - s.values[beta2]),
            T(s.lr / s.corrections[0]),
            T(std::sqrt(s.corrections[1])),
            T(s.values[eps])};
  }

  template <unsigned kHas, class T, class Math = IeeeMath>
  WARPSMITH_HOST_DEVICE static void element(const Scalars<T>& s, T grad, T& p, T* state) {
    T &m = state[exp_avg], &v = state[exp_avg_sq];
    T g = product(grad, s.grad_factor);
    // An infinite p without a decay becomes NaN by quick arithmetic, which is then repeated with IeeeMath. A choice
    // there spilled two registers of 8-bit steps.
    if constexpr (!kDecoupled) g = !std::is_same_v<Math, IeeeMath> || s.decay != T(0) ? product_plus(p, s.decay, g) : g;
    m = lerp(m, g, s.weight1);
    v = product_plus(s.weight2 * g, g, v * s.beta2);
    T second = v;
    if constexpr ((kHas >> max_exp_avg_sq) & 1)
      second = state[max_exp_avg_sq] = larger_or_nan(v, state[max_exp_avg_sq]);
    const T update = Math::quotient(s.step_size * m, Math::quotient(Math::root(second), s.bias2_sqrt) + s.eps);
    p = kDecoupled ? product_plus(p, s.decay, -update) : p - update;
  }
};
using AdamW = AdamWithDecay<true>;
using Adam = AdamWithDecay<false>;

// g <- g + weight_decay p;  b <- momentum b + (1 - dampening) g, in the first step b <- g
// p <- p - lr (b, or with Nesterov g + momentum b, or without a buffer g)
// Steps are counted only with dampening: then the first step differs from a step whose buffer is zero.
struct SGD {
  WARPSMITH_NAMES(State, momentum_buffer)
  WARPSMITH_NAMES(Hyper, momentum, dampening, weight_decay, nesterov)
  static constexpr unsigned kVariants[] = {0b0, 0b1};
  static constexpr unsigned kNotNegative = 0;
  static constexpr int kPowers = 0;
  static constexpr bool kDivides = false;

  template <class T> struct Scalars {
    T grad_factor, minus_lr, momentum, weight, decay, nesterov;
  };

  template <class T> WARPSMITH_HOST_DEVICE static Scalars<T> scalars(const OptimStep& s) {
    return {T(s.grad_factor),          T(-s.lr),
            T(s.values[momentum]),     T(s.step == 1 ? 1 : 1 - s.values[dampening]),
            T(s.values[weight_decay]), T(s.values[nesterov])};
  }

  template <unsigned kHas, class T, class Math = IeeeMath>
  WARPSMITH_HOST_DEVICE static void element(const Scalars<T>& s, T grad, T& p, T* state) {
    T g = product(grad, s.grad_factor);
    g = s.decay != T(0) ? product_plus(p, s.decay, g) : g;
    if constexpr (kHas & 1) {
      T& b = state[momentum_buffer];
      b = product_plus(b, s.momentum, product(g, s.weight));
      g = s.nesterov != T(0) ? product_plus(b, s.momentum, g) : b;
    }
    p = product_plus(g, s.minus_lr, p);
  }
};

// p <- p (1 - lr weight_decay) - lr sign(beta1 m + (1 - beta1) g);  m <- beta2 m + (1 - beta2) g
struct Lion {
  WARPSMITH_NAMES(State, exp_avg)
  WARPSMITH_NAMES(Hyper, beta1, beta2, weight_decay)
  static constexpr unsigned kVariants[] = {0b1};
  static constexpr unsigned kNotNegative = 0;
  static constexpr int kPowers = 0;
  static constexpr bool kDivides = false;

  template <class T> struct Scalars {
    T grad_factor, decay, weight1, weight2, lr;
  };

  template <class T> WARPSMITH_HOST_DEVICE static Scalars<T> scalars(const OptimStep& s) {
    return {T(s.grad_factor), T(1 - s.lr * s.values[weight_decay]), T(1 - s.values[beta1]), T(1 - s.values[beta2]),
            T(s.lr)};
  }

  template <unsigned kHas, class T, class Math = IeeeMath>
  WARPSMITH_HOST_DEVICE static void element(const Scalars<T>& s, T grad, T& p, T* state) {
    T& m = state[exp_avg];
    const T g = product(grad, s.grad_factor);
    p = product_plus(p, s.decay, -s.lr * sign(lerp(m, g, s.weight1)));
    m = lerp(m, g, s.weight2);
  }
};

// g <- g + weight_decay p;  sum <- sum + g^2;  p <- p - lr / (1 + (t - 1) lr_decay) g / (sqrt(sum) + eps)
struct Adagrad {
  WARPSMITH_NAMES(State, sum)
  WARPSMITH_NAMES(Hyper, lr_decay, weight_decay, eps)
  static constexpr unsigned kVariants[] = {0b1};
  static constexpr unsigned kNotNegative = 0b1;
  static constexpr int kPowers = 0;
  static constexpr bool kDivides = true;

  template <class T> struct Scalars {
    T grad_factor, decay, step_size, eps;
  };

  template <class T> WARPSMITH_HOST_DEVICE static Scalars<T> scalars(const OptimStep& s) {
    return {T(s.grad_factor), T(s.values[weight_decay]), T(s.lr / (1 + (s.step - 1) * s.values[lr_decay])),
            T(s.values[eps])};
  }

  template <unsigned kHas, class T, class Math = IeeeMath>
  WARPSMITH_HOST_DEVICE static void element(const Scalars<T>& s, T grad, T& p, T* state) {
    T g = product(grad, s.grad_factor);
    g = s.decay != T(0) ? product_plus(p, s.decay, g) : g;
    state[sum] = product_plus(g, g, state[sum]);
    p -= Math::quotient(s.step_size * g, Math::root(state[sum]) + s.eps);
  }
};

// g <- g + weight_decay p;  v <- alpha v + (1 - alpha) g^2;  centered: a <- a + (1 - alpha) (g - a)
// u = g / (sqrt(v, centered v - a^2) + eps);  with momentum b <- momentum b + u;  p <- p - lr (b, or u)
struct RMSprop {
  WARPSMITH_NAMES(State, square_avg, momentum_buffer, grad_avg)
  WARPSMITH_NAMES(Hyper, alpha, eps, weight_decay, momentum)
  static constexpr unsigned kVariants[] = {0b001, 0b011, 0b101, 0b111};
  static constexpr unsigned kNotNegative = 0b001;
  static constexpr int kPowers = 0;
  static constexpr bool kDivides = true;

  template <class T> struct Scalars {
    T grad_factor, decay, alpha, weight, eps, momentum, lr;
  };

  template <class T> WARPSMITH_HOST_DEVICE static Scalars<T> scalars(const OptimStep& s) {
    return {T(s.grad_factor),
            T(s.values[weight_decay]),
            T(s.values[alpha]),
            T(1 - s.values[alpha]),
            T(s.values[eps]),
            T(s.values[momentum]),
            T(s.lr)};
  }

  template <unsigned kHas, class T, class Math = IeeeMath>
  WARPSMITH_HOST_DEVICE static void element(const Scalars<T>& s, T grad, T& p, T* state) {
    T g = product(grad, s.grad_factor);
    g = s.decay != T(0) ? product_plus(p, s.decay, g) : g;
    T& v = state[square_avg];
    v = product_plus(s.weight * g, g, v * s.alpha);
    T second = v;
    if constexpr ((kHas >> grad_avg) & 1) {
      T& a = state[grad_avg];
      a = lerp(a, g, s.weight);
      // The product is rounded as v is: with alpha 0 their difference is 0, never below it. Of infinities it is none.
      if (v < std::numeric_limits<T>::infinity()) second = v - product(a, a);
    }
    T update = Math::quotient(g, Math::root(second) + s.eps);
    if constexpr ((kHas >> momentum_buffer) & 1)
      update = state[momentum_buffer] = product_plus(state[momentum_buffer], s.momentum, update);
    p = product_plus(-s.lr, update, p);
  }
};

enum class Optimizer : uint8_t {
#define WARPSMITH_ROW(optimizer, F) optimizer,
  WARPSMITH_OPTIMIZERS(WARPSMITH_ROW) WARPSMITH_LAYERWISE_OPTIMIZERS(WARPSMITH_ROW)
#undef WARPSMITH_ROW
};

// Calls visit.template operator()<F>() with an optimizer's functor F, unless it is layerwise (layerwise.h).
template <class Visit> auto visit_optimizer(Optimizer optimizer, Visit&& visit) {
  switch (optimizer) {
#define WARPSMITH_ROW(optimizer, F) \
  case Optimizer::optimizer: return visit.template operator()<F>();
    WARPSMITH_OPTIMIZERS(WARPSMITH_ROW)
#undef WARPSMITH_ROW
    default: break;
  }
  return visit.template operator()<AdamW>();
}

}  // namespace warpsmith
