#pragma once
#include <optional>
#include <tuple>

#include "warpsmith/op.h"

// The norms with gradients, one function per row of kernels/norm/norm_ops.h.
namespace warpsmith {
namespace detail {

// The raw backward leaves dresidual without elements where dx stands for it: no dropout, and one dtype.
inline variable_list add_norm_gradients(const Op& op, Backward& b) {
  variable_list gradients = raw_gradients(op, b);
  if (gradients[1].sizes() != b.outputs[1].sizes()) gradients[1] = gradients[0];
  return gradients;
}

}  // namespace detail

// With s = x, s = x + residual (add_*) or s = dropout(x) + residual (dropout_add_*), over the last dimension:
//
//   rms_norm:    y = s / sqrt(mean(s^2) + eps) * (weight + weight_offset)
//   layer_norm:  y = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias
//
// Returns y, or with a residual {y, residual_out}, residual_out = s. All outputs have gradients for x, residual, weight
// and bias.
//
// x: (..., D), float32, float16, bfloat16, or float64 on the CPU. residual: like x, or float32 beside a 16-bit x.
// weight, bias: (D,), both of the dtype of x, or both float32 beside a 16-bit x. weight_offset: 1.0 for weights stored
// around zero. eps: >= 0; an RMS norm without one takes the machine epsilon of float32 (float64 for float64).
// p: the probability that an element of x is dropped; the others are multiplied by 1 / (1 - p). The mask is never
// stored. Without `training` nothing is dropped. seed: int64, (2,), on the device of x; without one it is drawn from
// torch's generator.
//
// Sums are float32 (float64 for float64) in a fixed order: equal inputs give equal bits.
inline at::Tensor rms_norm(const at::Tensor& x, const std::optional<at::Tensor>& weight = std::nullopt,
                           std::optional<double> eps = std::nullopt, double weight_offset = 0.0) {
  static const detail::Op op({.name = "rms_norm"});
  return detail::call(op, {x, weight, detail::epsilon_of(x, eps), weight_offset})[0];
}

inline at::Tensor layer_norm(const at::Tensor& x, const std::optional<at::Tensor>& weight = std::nullopt,
                             const std::optional<at::Tensor>& bias = std::nullopt, double eps = 1e-5) {
  static const detail::Op op({.name = "layer_norm"});
  return detail::call(op, {x, weight, bias, eps})[0];
}

inline std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                                                       const std::optional<at::Tensor>& weight = std::nullopt,
                                                       std::optional<double> eps = std::nullopt,
                                                       double weight_offset = 0.0) {
  static const detail::Op op({.name = "add_rms_norm", .gradients = detail::add_norm_gradients});
  return detail::pair(detail::call(op, {x, residual, weight, detail::epsilon_of(x, eps), weight_offset}));
}

inline std::tuple<at::Tensor, at::Tensor> add_layer_norm(const at::Tensor& x, const at::Tensor& residual,
                                                         const std::optional<at::Tensor>& weight = std::nullopt,
                                                         const std::optional<at::Tensor>& bias = std::nullopt,
                                                         double eps = 1e-5) {
  static const detail::Op op({.name = "add_layer_norm", .gradients = detail::add_norm_gradients});
  return detail::pair(detail::call(op, {x, residual, weight, bias, eps}));
}

inline std::tuple<at::Tensor, at::Tensor> dropout_add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                                                               const std::optional<at::Tensor>& weight = std::nullopt,
                                                               double p = 0.5, std::optional<double> eps = std::nullopt,
                                                               bool training = true, double weight_offset = 0.0,
                                                               const std::optional<at::Tensor>& seed = std::nullopt) {
  static const detail::Op op({.name = "dropout_add_rms_norm", .gradients = detail::add_norm_gradients});
  return detail::pair(detail::call(op, {x, residual, weight, detail::dropout_seed(x, p, training, seed), p,
                                        detail::epsilon_of(x, eps), weight_offset}));
}

inline std::tuple<at::Tensor, at::Tensor> dropout_add_layer_norm(const at::Tensor& x, const at::Tensor& residual,
                                                                 const std::optional<at::Tensor>& weight = std::nullopt,
                                                                 const std::optional<at::Tensor>& bias = std::nullopt,
                                                                 double p = 0.5, double eps = 1e-5,
                                                                 bool training = true,
                                                                 const std::optional<at::Tensor>& seed = std::nullopt) {
  static const detail::Op op({.name = "dropout_add_layer_norm", .gradients = detail::add_norm_gradients});
  return detail::pair(
      detail::call(op, {x, residual, weight, bias, detail::dropout_seed(x, p, training, seed), p, eps}));
}

}  // namespace warpsmith
