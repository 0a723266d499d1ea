#pragma once
#include <optional>

#include "warpsmith/op.h"

// Batch norm with gradients, behind it a residual and ReLU.
namespace warpsmith {

struct BatchNormOptions {
  bool training = false;
  double momentum = 0.1, eps = 1e-5;
  std::optional<at::Tensor> residual = std::nullopt;  // shape and dtype of x
  bool relu = false;
};

namespace detail {

// The raw backward leaves dresidual without elements where dy stands for it: no ReLU.
inline variable_list batch_norm_gradients(const Op& op, Backward& b) {
  if (!b.grads[0].defined()) return variable_list(op.inputs.size());  // running statistics have no gradient
  variable_list gradients = raw_gradients(op, b);
  if (!b.arguments.back().toBool()) gradients[1] = b.grads[0];
  return gradients;
}

}  // namespace detail

// y = (x - mean) / sqrt(var + eps) * weight + bias, + residual, and with `relu` max(y, 0), for x (N, C) or (N, C, ...),
// best in channels_last, which y is in. In training mean and var are those of each channel over the batch, and the
// running statistics, if given, are updated in place. Gradients for x, weight, bias and residual. Everything else,
// errors included: as warpsmith.batch_norm in Python.
inline at::Tensor batch_norm(const at::Tensor& x, const std::optional<at::Tensor>& running_mean = std::nullopt,
                             const std::optional<at::Tensor>& running_var = std::nullopt,
                             const std::optional<at::Tensor>& weight = std::nullopt,
                             const std::optional<at::Tensor>& bias = std::nullopt,
                             const BatchNormOptions& options = {}) {
  static const detail::Op op({.name = "batch_norm", .gradients = detail::batch_norm_gradients});
  return detail::call(op, {x, options.residual, weight, bias, running_mean, running_var, options.training,
                           options.momentum, options.eps, options.relu})[0];
}

}  // namespace warpsmith
