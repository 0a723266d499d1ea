#pragma once
#include <array>
#include <optional>

#include "warpsmith/op.h"

// Images on their way into a model.
namespace warpsmith {

struct NormalizeImageOptions {
  std::optional<at::Tensor> flip = std::nullopt;  // (N,), bool: samples to be mirrored
  at::ScalarType dtype = at::kHalf;               // float32, float16 or bfloat16
};

// (x / 255 - mean) / std by channel, for x (N, H, W, 3), uint8; the result is (N, 3, H, W) in channels_last.
inline at::Tensor normalize_image(const at::Tensor& x, const std::array<double, 3>& mean,
                                  const std::array<double, 3>& std, const NormalizeImageOptions& options = {}) {
  using Signature = at::Tensor(const at::Tensor&, at::ArrayRef<double>, at::ArrayRef<double>,
                               const std::optional<at::Tensor>&, at::ScalarType);
  static const auto op = detail::find_op<Signature>("warpsmith::normalize_image");
  const auto flip = detail::is_given(options.flip) ? options.flip : std::nullopt;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return op.call(x, mean, std, flip, options.dtype);
}

}  // namespace warpsmith
