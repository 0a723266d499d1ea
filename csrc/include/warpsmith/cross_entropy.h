#pragma once
#include <cstdint>
#include <optional>

#include "warpsmith/detail/cross_entropy_ops.h"
#include "warpsmith/op.h"

namespace warpsmith {

// What becomes of the losses of rows, numbered as torch does: none, mean, sum.
#define WARPSMITH_ROW(name) name,
enum class Reduction : int64_t { WARPSMITH_REDUCTIONS(WARPSMITH_ROW) };
#undef WARPSMITH_ROW

// Options of cross_entropy, as the Python function has them.
struct CrossEntropyOptions {
  int64_t ignore_index = -100;
  Reduction reduction = Reduction::mean;
  double label_smoothing = 0, z_loss = 0, softcap = 0;
};

namespace detail {

// The gradient that the forward made, times the incoming one. It is handed out once; a second backward computes it
// anew, to the same bits.
inline variable_list cross_entropy_gradients(const Op& op, Backward& b) {
  const auto early = b.ctx->saved_data.find("early_gradient");
  if (at::GradMode::is_enabled() || early == b.ctx->saved_data.end()) return raw_gradients(op, b);
  static const auto scale = find_op<void(const at::Tensor&, const at::Tensor&)>("warpsmith::cross_entropy_scale_");
  const at::Tensor gradient = early->second.toTensor();
  b.ctx->saved_data.erase(early);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  scale.call(gradient, b.grads[0]);
  return {gradient};
}

}  // namespace detail

// Cross-entropy of logits (..., V), classes last, and int64 targets (...), with a gradient for the logits that is
// computed in the same pass; warpsmith.cross_entropy in Python has the formula and says what the options mean.
//
// The loss is float32 (float64 for float64 logits), whatever the dtype of the logits. class_weight: (V,), float32
// (float64), without gradient. Sums have a fixed order: equal inputs give equal bits.
inline at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& target,
                                const std::optional<at::Tensor>& class_weight = std::nullopt,
                                const CrossEntropyOptions& options = {}) {
  using detail::Op, detail::cross_entropy_gradients;
  static const Op early({.name = "cross_entropy",
                         .forward = "cross_entropy_with_gradient",
                         .direct = "cross_entropy_forward",
                         .gradients = cross_entropy_gradients,
                         .constants = {{"late", true}},
                         .early_gradient = true,
                         .python_has_second_derivatives = false});
  static const Op later({.name = "cross_entropy",
                         .gradients = cross_entropy_gradients,
                         .constants = {{"late", false}},
                         .python_has_second_derivatives = false});
  // Float16 would lose small gradients before a loss scale comes in, and with reduction none each row has its own
  // scale.
  const bool is_early = options.reduction != Reduction::none && logits.scalar_type() != at::kHalf;
  return detail::call(is_early ? early : later,
                      {logits, target, class_weight, options.ignore_index, static_cast<int64_t>(options.reduction),
                       options.label_smoothing, options.z_loss, options.softcap, /*stats=*/false})[0];
}

}  // namespace warpsmith
