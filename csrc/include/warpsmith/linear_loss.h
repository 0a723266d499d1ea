#pragma once
#include <ATen/ops/div.h>
#include <torch/csrc/autograd/graph_task.h>

#include <optional>
#include <tuple>

#include "warpsmith/cross_entropy.h"
#include "warpsmith/op.h"

namespace warpsmith {

// What linear_cross_entropy computes, and how; the Python function's documentation says what each means.
struct LinearCrossEntropyOptions {
  std::optional<at::Tensor> class_weight = std::nullopt;  // (V,), not differentiable
  int64_t ignore_index = -100;
  Reduction reduction = Reduction::mean;
  double label_smoothing = 0, z_loss = 0, softcap = 0;
  bool check_labels = false;  // on CUDA: wait for the device, refuse targets out of range
  std::optional<int64_t> max_chunk_bytes =
      std::nullopt;  // logits in memory at a time: by default 1 GiB on CUDA, 64 MiB on the CPU
  std::optional<at::ScalarType> dw_dtype = std::nullopt;  // in which the weight's gradient is summed over chunks
};

// What linear_log_prob computes, and how.
struct LinearLogProbOptions {
  double temperature = 1;    // finite and > 0
  bool save_logits = false;  // keep all logits for the backward, which makes them again otherwise
  std::optional<int64_t> max_chunk_bytes = std::nullopt;  // as above
};

namespace detail {

// Gradients that the forward made, times the incoming one: in place where nobody will walk the graph again.
inline variable_list linear_cross_entropy_gradients(const Op& op, Backward& b) {
  if (at::GradMode::is_enabled()) refuse_second_derivative(op);
  using Scale = void(const at::Tensor&, const at::Tensor&, const OptionalTensor&);
  using Scaled = at::Tensor(const at::Tensor&, const at::Tensor&, const OptionalTensor&, at::ScalarType);
  static const auto scale = find_op<Scale>("warpsmith::linear_cross_entropy_scale_");
  static const auto scaled = find_op<Scaled>("warpsmith::linear_cross_entropy_scaled");
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const bool keep = torch::autograd::get_current_graph_task_keep_graph();
  constexpr size_t kDenominator = 4;  // of the outputs; the gradients follow
  const OptionalTensor denominator =
      b.outputs[kDenominator].numel() ? OptionalTensor(b.outputs[kDenominator]) : std::nullopt;
  variable_list result(op.inputs.size());
  for (size_t i = 0; i < result.size(); ++i) {
    if (!b.wanted[op.inputs[i]]) continue;
    const auto dtype = b.arguments[op.inputs[i]].toScalarType();
    result[i] = b.outputs[kDenominator + 1 + i];
    if (keep || result[i].scalar_type() != dtype)
      result[i] = scaled.call(result[i], b.grads[0], denominator, dtype);
    else
      scale.call(result[i], b.grads[0], denominator);
  }
  return result;
}

inline variable_list linear_rows_gradients(const Op& op, Backward& b) {
  if (at::GradMode::is_enabled()) refuse_second_derivative(op);
  return raw_gradients(op, b);
}

inline variable_list linear_log_prob_gradients(const Op& op, Backward& b) {
  if (at::GradMode::is_enabled()) refuse_second_derivative(op);
  constexpr size_t kTemperature = 4;
  const double temperature = b.arguments[kTemperature].toDouble();
  for (at::Tensor& grad : b.grads)
    if (grad.defined() && temperature != 1) grad = at::div(grad, temperature);
  return raw_gradients(op, b);
}

}  // namespace detail

// Cross-entropy of hidden @ weight^T + bias, without all logits in memory: float32 (float64 for float64), a scalar, or
// for Reduction::none of the shape of target. Gradients for hidden, weight and bias; those of a reduced loss are made
// in the forward and given away by the backward.
//
// hidden: (..., H), float32, float16, bfloat16, or float64 on the CPU. weight: (V, H), target: (...), int64 classes or
// ignore_index, bias: (V,); weight and bias in the dtype of hidden.
inline at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
                                       const std::optional<at::Tensor>& bias = std::nullopt,
                                       const LinearCrossEntropyOptions& options = {}) {
  using detail::Op;
  static const Op reduced({.name = "linear_cross_entropy",
                           .gradients = detail::linear_cross_entropy_gradients,
                           .inputs = {"hidden", "weight", "bias"},
                           .saved = {"denominator", "dhidden", "dweight", "dbias"},
                           .python_has_second_derivatives = false});
  static const Op rows({.name = "linear_cross_entropy",
                        .backward = "linear_cross_entropy_rows_backward",
                        .gradients = detail::linear_rows_gradients,
                        .python_has_second_derivatives = false});
  const auto& o = options;
  const auto wants = [](const at::Tensor& t) { return at::GradMode::is_enabled() && t.requires_grad(); };
  return detail::call(
      o.reduction == Reduction::none ? rows : reduced,
      {hidden, weight, target, bias, o.class_weight, o.ignore_index, static_cast<int64_t>(o.reduction),
       o.label_smoothing, o.z_loss, o.softcap, o.check_labels, /*return_stats=*/false, o.max_chunk_bytes.value_or(0),
       o.dw_dtype, /*main_grad=*/std::nullopt, wants(hidden), wants(weight), bias && wants(*bias)})[0];
}

// {log_prob, logsumexp, entropy} of softmax((hidden @ weight^T + bias) / temperature), without all logits in memory;
// each of the shape of target, float32 (float64 for float64), with gradients for hidden, weight and bias.
//
// hidden: (..., H), float32, float16, bfloat16, or float64 on the CPU. weight: (V, H), target: (...), int64 classes,
// bias: (V,); weight and bias in the dtype of hidden. A target that is not a class is refused on the CPU, and gives NaN
// on CUDA.
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_log_prob(
    const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
    const std::optional<at::Tensor>& bias = std::nullopt, const LinearLogProbOptions& options = {}) {
  static const detail::Op op({.name = "linear_log_prob",
                              .gradients = detail::linear_log_prob_gradients,
                              .python_has_second_derivatives = false});
  detail::Stack arguments{
      hidden, weight, target, bias, options.temperature, options.save_logits, options.max_chunk_bytes.value_or(0)};
  if (!detail::differentiable(op, arguments)) arguments[5] = false;  // save_logits
  const auto out = detail::call(op, std::move(arguments));
  return {out[0], out[1], out[2]};
}

}  // namespace warpsmith
