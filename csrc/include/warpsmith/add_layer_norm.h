#pragma once
#include <optional>
#include <tuple>

#include "warpsmith/norm.h"

namespace warpsmith {
namespace detail {

struct AddLayerNorm {
  static constexpr const char* name = "add_layer_norm";
  static constexpr bool layer = true, residual = true, dropout = false;
};

}  // namespace detail

// {y, residual_out}: residual_out = x + residual, y = layer_norm(residual_out) over the last dimension. Both have
// gradients for x, residual, weight and bias.
//
// x: (..., D), float32, float16, bfloat16, or float64 on the CPU. residual: like x, or float32 beside a 16-bit x.
// weight, bias: (D,), both of the dtype of x, or both float32 beside a 16-bit x. eps: >= 0.
//
// Sums are float32 (float64 for float64) in a fixed order: equal inputs give equal bits. Input that does not fit throws
// an error that names op, argument, what was expected and what came.
inline std::tuple<at::Tensor, at::Tensor> add_layer_norm(const at::Tensor& x, const at::Tensor& residual,
                                                         const std::optional<at::Tensor>& weight,
                                                         const std::optional<at::Tensor>& bias = std::nullopt,
                                                         double eps = 1e-5) {
  const auto out = detail::Norm<detail::AddLayerNorm>::run(x, residual, weight, bias, std::nullopt, 0.0, eps, 0.0);
  return {out[0], out[1]};
}

}  // namespace warpsmith
