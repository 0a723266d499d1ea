#pragma once
#include <cmath>
#include <cstdint>

#include "kernels/optim/optim.h"

// Optimizers whose step also depends on norms of whole tensors. A step has two passes: the first updates the states and
// sums squares, the second moves the parameters. The second pass reads the states and no gradient.
//
// A functor names states and hyperparameters as in optimizers.h. `moments` updates the states of one element,
// `direction` is its update before the tensor's ratio, and `adapts` says whether the group has a ratio at all.
namespace warpsmith {

// m <- beta1 m + beta3 g,  v <- beta2 v + (1 - beta2) g^2
// u = m / (1 - beta1^t) / (sqrt(v) / sqrt(1 - beta2^t) + eps) + weight_decay p
// p <- p - lr ratio u;  ratio = |p| / |u| of the whole tensor; 1 where a norm is 0, or weight_decay is 0 without
// use_nvlamb
struct LAMB {
  WARPSMITH_NAMES(State, exp_avg, exp_avg_sq)
  WARPSMITH_NAMES(Hyper, beta1, beta2, beta3, eps, weight_decay, use_nvlamb)
  static constexpr unsigned kVariants[] = {0b11};
  static constexpr unsigned kNotNegative = 0b10;
  static constexpr int kPowers = 2;

  template <class T> struct Scalars {
    T grad_factor, beta1, beta3, beta2, weight2, unbias1, bias2_sqrt, eps, decay, lr;
  };

  template <class T> WARPSMITH_HOST_DEVICE static Scalars<T> scalars(const OptimStep& s) {
    return {T(s.grad_factor),
            T(s.values[beta1]),
            T(s.values[beta3]),
            T(s.values[beta2]),
            T(1 - s.values[beta2]),
            T(1 / s.corrections[0]),
            T(std::sqrt(s.corrections[1])),
            T(s.values[eps]),
            T(s.values[weight_decay]),
            T(s.lr)};
  }

  template <class T> WARPSMITH_HOST_DEVICE static void moments(const Scalars<T>& s, T grad, T& m, T& v) {
    const T g = grad * s.grad_factor;
    m = m * s.beta1 + g * s.beta3;
    v = v * s.beta2 + s.weight2 * g * g;
  }

  template <class T> WARPSMITH_HOST_DEVICE static T direction(const Scalars<T>& s, T p, T m, T v) {
    return m * s.unbias1 / (std::sqrt(v) / s.bias2_sqrt + s.eps) + s.decay * p;
  }

  WARPSMITH_HOST_DEVICE static bool adapts(const double* values) {
    return values[weight_decay] != 0 || values[use_nvlamb] != 0;
  }
};

// The factor of a tensor's step, from the sums of squares of its parameter and of its direction. Keeps a NaN.
WARPSMITH_HOST_DEVICE double trust_ratio(bool adapts, double params_squared, double directions_squared) {
  return adapts && params_squared != 0 && directions_squared != 0 ? std::sqrt(params_squared / directions_squared) : 1;
}

constexpr bool is_layerwise(Optimizer optimizer) { return optimizer == Optimizer::lamb; }

// The storages of layerwise optimizers. The second pass must read exactly the states that the first pass computed.
constexpr bool layerwise_takes(Storage s) { return s == Storage::float32 || s == Storage::float64 || has_master(s); }

// Calls visit.template operator()<F>() with the functor F of any optimizer, layerwise or not.
template <class Visit> auto visit_any_optimizer(Optimizer optimizer, Visit&& visit) {
  return is_layerwise(optimizer) ? visit.template operator()<LAMB>() : visit_optimizer(optimizer, visit);
}

// As OptimParams: nothing changes if found_inf is not zero, or for a tensor without a gradient.
struct LayerwiseParams {
  OptimParams step;
  double* partials;  // [2 chunk_count], scratch: the sums of squares of a chunk's parameters and directions
  double* ratios;    // [tensor_count], scratch
};

Status layerwise_cuda(const LayerwiseParams& params, void* stream);
Status layerwise_cpu(const LayerwiseParams& params, const Parallel& parallel);

}  // namespace warpsmith
