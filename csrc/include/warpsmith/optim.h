#pragma once
#include <ATen/core/grad_mode.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "warpsmith/op.h"

namespace warpsmith {

// Hyperparameters of one AdamW step, with torch's defaults.
struct AdamWOptions {
  double lr = 1e-3;  // used where no tensor is given
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;
  bool maximize = false;
};

// One step of Adam with decoupled weight decay over lists of tensors, in place; on CUDA one launch, and the host does
// not wait. The lists have one entry for each parameter:
//
// params, exp_avgs, exp_avg_sqs: float32, or float64 on the CPU, of the parameter's shape and strides; written to.
// grads: like params; only read. max_exp_avg_sqs: like params for amsgrad, or an empty list.
// steps: one float32 element each, the number of steps taken so far; written to.
// grad_scale: one float32 element that gradients are divided by. found_inf: one float32 element; where it is not zero,
// nothing changes, not even steps. lr: a tensor of one element, read where it lies, in place of options.lr.
//
// Throws, with nothing changed, when a length, dtype, device, shape, strides or number does not fit.
inline void adamw(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
                  at::TensorList max_exp_avg_sqs, at::TensorList steps, const AdamWOptions& options = {},
                  const std::optional<at::Tensor>& grad_scale = std::nullopt,
                  const std::optional<at::Tensor>& found_inf = std::nullopt,
                  const std::optional<at::Tensor>& lr = std::nullopt) {
  using Signature = void(at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList,
                         const at::Tensor&, double, double, double, double, bool, const std::optional<at::Tensor>&,
                         const std::optional<at::Tensor>&);
  static const auto op = detail::find_op<Signature>("warpsmith::adamw");
  const bool has_lr = detail::is_given(lr);
  if (!has_lr && !(options.lr >= 0))
    throw std::invalid_argument("adamw: lr: expected a number >= 0, got " + std::to_string(options.lr));
  const auto given = [](const std::optional<at::Tensor>& t) { return detail::is_given(t) ? t : std::nullopt; };
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  op.call(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps,
          has_lr ? *lr : at::scalar_tensor(options.lr, at::kDouble), options.beta1, options.beta2, options.eps,
          options.weight_decay, options.maximize, given(grad_scale), given(found_inf));
  // As torch's own in-place operations do, so that a backward that still needs the old values is refused.
  const auto written = [](at::TensorList tensors) {
    for (const at::Tensor& t : tensors)
      if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
  };
  for (const at::TensorList list : {params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps}) written(list);
}

// What is known about the gradients of a loss that was multiplied by a scale; each of one element, on their device.
struct CheckedGradients {
  at::Tensor norm;        // 2-norm of all gradients once they are divided by the scale
  at::Tensor grad_scale;  // float32: what `adamw` divides by to unscale and clip
  at::Tensor found_inf;   // float32: 1 if an unscaled gradient is infinite or NaN, or their norm is, else 0
};

// Reads the gradients once, on CUDA in two launches, and the host does not wait. They are only read, and stay scaled.
//
// grads: float32, float16 or bfloat16, or float64 on the CPU, of one device; elements without gaps. scale: one float32
// element there. max_norm: the norm to clip to; without it nothing is clipped.
//
// Throws when a dtype, device, layout or number does not fit.
inline CheckedGradients check_gradients(at::TensorList grads, const at::Tensor& scale, double max_norm = HUGE_VAL) {
  using Signature =
      std::tuple<at::Tensor, at::Tensor, at::Tensor>(at::TensorList, double, const at::Tensor&, double, at::Tensor&,
                                                     at::Tensor&, int64_t, const std::optional<at::Tensor>&);
  static const auto op = detail::find_op<Signature>("warpsmith::grad_check");
  if (!(max_norm >= 0))
    throw std::invalid_argument("check_gradients: max_norm: expected a number >= 0, got " + std::to_string(max_norm));
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::Tensor found_inf = at::zeros({}, scale.options().dtype(at::kFloat));
  at::Tensor bad_counts = at::zeros({static_cast<int64_t>(grads.size())}, scale.options().dtype(at::kLong));
  auto [norm, power_sum, grad_scale] =
      op.call(grads, /*p=*/2, scale, max_norm, found_inf, bad_counts, /*total_elems=*/0, std::nullopt);
  return {norm, grad_scale, found_inf};
}

}  // namespace warpsmith
