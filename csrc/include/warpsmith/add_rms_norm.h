#pragma once
#include <optional>
#include <tuple>

#include "warpsmith/norm.h"

namespace warpsmith {
namespace detail {

struct AddRmsNorm {
  static constexpr const char* name = "add_rms_norm";
  static constexpr bool layer = false, residual = true, dropout = false;
};

}  // namespace detail

// {y, residual_out}: residual_out = x + residual, y = residual_out / sqrt(mean(residual_out^2) + eps) * (weight +
// weight_offset) over the last dimension. Both have gradients for x, residual and weight.
//
// x: (..., D), float32, float16, bfloat16, or float64 on the CPU. residual: like x, or float32 beside a 16-bit x.
// weight: (D,), the dtype of x, or float32 beside a 16-bit x. eps: >= 0.
//
// Sums are float32 (float64 for float64) in a fixed order: equal inputs give equal bits. Input that does not fit throws
// an error that names op, argument, what was expected and what came.
inline std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                                                       const std::optional<at::Tensor>& weight, double eps = 1e-6,
                                                       double weight_offset = 0.0) {
  const auto out =
      detail::Norm<detail::AddRmsNorm>::run(x, residual, weight, std::nullopt, std::nullopt, 0.0, eps, weight_offset);
  return {out[0], out[1]};
}

}  // namespace warpsmith
