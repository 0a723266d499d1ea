#pragma once
#include <optional>
#include <tuple>

#include "warpsmith/norm.h"

namespace warpsmith {
namespace detail {

struct DropoutAddRmsNorm {
  static constexpr const char* name = "dropout_add_rms_norm";
  static constexpr bool layer = false, residual = true, dropout = true;
};

}  // namespace detail

// {y, residual_out} of add_rms_norm, with dropout(x) in place of x: each element is dropped with probability p, the
// others are multiplied by 1 / (1 - p). Without `training` nothing is dropped. seed: int64, (2,), on the device of x;
// without one it is drawn from torch's generator. The mask is never stored.
//
// Sums are float32 (float64 for float64) in a fixed order: equal inputs give equal bits. Input that does not fit throws
// an error that names op, argument, what was expected and what came.
inline std::tuple<at::Tensor, at::Tensor> dropout_add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                                                               const std::optional<at::Tensor>& weight, double p,
                                                               double eps = 1e-6, bool training = true,
                                                               double weight_offset = 0.0,
                                                               const std::optional<at::Tensor>& seed = std::nullopt) {
  const auto out = detail::Norm<detail::DropoutAddRmsNorm>::run(
      x, residual, weight, std::nullopt, detail::dropout_seed(x, p, training, seed), p, eps, weight_offset);
  return {out[0], out[1]};
}

}  // namespace warpsmith
