#pragma once
#include <optional>

#include "warpsmith/op.h"

// Group norm with gradients, behind it SiLU.
namespace warpsmith {

// y = (x - mean) / sqrt(var + eps) * weight + bias, and with `silu` y * sigmoid(y), for x (N, C) or (N, C, ...), best
// in channels_last, which y is in, with mean and var of each of num_groups groups of channels of a sample. Gradients
// for x, weight and bias. Everything else, errors included: as warpsmith.group_norm in Python.
inline at::Tensor group_norm(const at::Tensor& x, int64_t num_groups,
                             const std::optional<at::Tensor>& weight = std::nullopt,
                             const std::optional<at::Tensor>& bias = std::nullopt, double eps = 1e-5,
                             bool silu = false) {
  static const detail::Op op({.name = "group_norm"});
  return detail::call(op, {x, num_groups, weight, bias, eps, silu})[0];
}

}  // namespace warpsmith
