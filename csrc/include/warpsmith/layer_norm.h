#pragma once
#include <optional>

#include "warpsmith/norm.h"

namespace warpsmith {
namespace detail {

struct LayerNorm {
  static constexpr const char* name = "layer_norm";
  static constexpr bool layer = true, residual = false, dropout = false;
};

}  // namespace detail

// y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension, with gradients for x, weight and
// bias.
//
// x: (..., D), float32, float16, bfloat16, or float64 on the CPU. weight, bias: (D,), both of the dtype of x, or both
// float32 beside a 16-bit x. eps: >= 0.
//
// Sums are float32 (float64 for float64) in a fixed order: equal inputs give equal bits. Input that does not fit throws
// an error that names op, argument, what was expected and what came.
inline at::Tensor layer_norm(const at::Tensor& x, const std::optional<at::Tensor>& weight = std::nullopt,
                             const std::optional<at::Tensor>& bias = std::nullopt, double eps = 1e-5) {
  return detail::Norm<detail::LayerNorm>::run(x, std::nullopt, weight, bias, std::nullopt, 0.0, eps, 0.0)[0];
}

}  // namespace warpsmith
