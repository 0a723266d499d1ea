#pragma once
#include <ATen/ops/div.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <array>
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

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<at::Tensor>;
using LinearGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

inline OptionalTensor if_defined(const at::Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }

inline bool has_derivative(const at::Tensor& hidden, const at::Tensor& weight, const OptionalTensor& bias) {
  return has_derivative(hidden) || has_derivative(weight) || (bias && has_derivative(*bias));
}

// Which of hidden, weight and bias want a gradient.
struct LinearWants {
  bool hidden = false, weight = false, bias = false;

  // In a backward whose forward took (hidden, weight, target, bias, ...). Edges count tensors, and there is none for an
  // absent bias.
  static LinearWants in(AutogradContext* ctx, bool has_bias) {
    return {ctx->needs_input_grad(0), ctx->needs_input_grad(1), has_bias && ctx->needs_input_grad(3)};
  }
  // What that backward returns, one for each of `count` inputs of the forward.
  variable_list returned(int count, const LinearGradients& gradients) const {
    variable_list result(count);
    if (hidden) result[0] = std::get<0>(gradients);
    if (weight) result[1] = std::get<1>(gradients);
    if (bias) result[3] = std::get<2>(gradients);
    return result;
  }
};

// ---- linear_cross_entropy

using LinearLossOutputs =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

inline LinearLossOutputs linear_cross_entropy_forward(const at::Tensor& hidden, const at::Tensor& weight,
                                                      const at::Tensor& target, const OptionalTensor& bias,
                                                      const LinearCrossEntropyOptions& o, const LinearWants& wants) {
  using Signature = LinearLossOutputs(const at::Tensor&, const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                                      const OptionalTensor&, int64_t, int64_t, double, double, double, bool, bool,
                                      int64_t, std::optional<at::ScalarType>, const OptionalTensor&, bool, bool, bool);
  static const auto op = find_op<Signature>("warpsmith::linear_cross_entropy_forward");
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return op.call(hidden, weight, target, bias, o.class_weight, o.ignore_index, static_cast<int64_t>(o.reduction),
                 o.label_smoothing, o.z_loss, o.softcap, o.check_labels, false, o.max_chunk_bytes.value_or(0),
                 o.dw_dtype, std::nullopt, wants.hidden, wants.weight, wants.bias);
}

// Gradients that the forward made, times the incoming one: in place where nobody will walk the graph again.
inline at::Tensor linear_cross_entropy_finished(const at::Tensor& grad, const at::Tensor& dloss,
                                                const OptionalTensor& denominator, at::ScalarType dtype) {
  using Scale = void(const at::Tensor&, const at::Tensor&, const OptionalTensor&);
  using Scaled = at::Tensor(const at::Tensor&, const at::Tensor&, const OptionalTensor&, at::ScalarType);
  static const auto scale = find_op<Scale>("warpsmith::linear_cross_entropy_scale_");
  static const auto scaled = find_op<Scaled>("warpsmith::linear_cross_entropy_scaled");
  if (grad.scalar_type() != dtype || torch::autograd::get_current_graph_task_keep_graph())
    return scaled.call(grad, dloss, denominator, dtype);
  scale.call(grad, dloss, denominator);
  return grad;
}

struct LinearCrossEntropy : torch::autograd::Function<LinearCrossEntropy> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& hidden, const at::Tensor& weight,
                            const at::Tensor& target, const OptionalTensor& bias, const LinearCrossEntropyOptions& o,
                            const LinearWants& wants) {
    const LinearLossOutputs out = linear_cross_entropy_forward(hidden, weight, target, bias, o, wants);
    const bool rows = o.reduction == Reduction::none;
    ctx->saved_data["rows"] = rows;
    if (rows) {
      ctx->save_for_backward(
          {hidden, weight, target, bias.value_or(at::Tensor()), o.class_weight.value_or(at::Tensor())});
      ctx->saved_data["ignore_index"] = o.ignore_index;
      ctx->saved_data["label_smoothing"] = o.label_smoothing;
      ctx->saved_data["z_loss"] = o.z_loss;
      ctx->saved_data["softcap"] = o.softcap;
      ctx->saved_data["max_chunk_bytes"] = o.max_chunk_bytes.value_or(0);
      ctx->saved_data["dw_dtype"] = o.dw_dtype ? static_cast<int64_t>(*o.dw_dtype) : -1;
    } else {
      ctx->save_for_backward({std::get<4>(out), std::get<5>(out), std::get<6>(out), std::get<7>(out)});
      ctx->saved_data["dtype"] = static_cast<int64_t>(weight.scalar_type());
    }
    ctx->saved_data["bias"] = bias.has_value();
    ctx->set_materialize_grads(false);
    return std::get<0>(out);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (at::GradMode::is_enabled()) refuse_second_derivative("linear_cross_entropy", /*python_has_them=*/false);
    constexpr int kInputs = 6;
    const at::Tensor& dloss = grads[0];
    if (!dloss.defined()) return variable_list(kInputs);
    const LinearWants wants = LinearWants::in(ctx, ctx->saved_data["bias"].toBool());
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const bool rows = ctx->saved_data["rows"].toBool();
    return wants.returned(kInputs, rows ? of_rows(ctx, dloss, wants) : of_reduced(ctx, dloss, wants));
  }

 private:
  static LinearGradients of_reduced(AutogradContext* ctx, const at::Tensor& dloss, const LinearWants& wants) {
    const variable_list saved = ctx->get_saved_variables();
    const OptionalTensor denominator = saved[0].numel() ? OptionalTensor(saved[0]) : std::nullopt;
    const auto dtype = static_cast<at::ScalarType>(ctx->saved_data["dtype"].toInt());
    const auto finished = [&](bool want, const at::Tensor& grad) {
      return want ? linear_cross_entropy_finished(grad, dloss, denominator, dtype) : at::Tensor();
    };
    return {finished(wants.hidden, saved[1]), finished(wants.weight, saved[2]), finished(wants.bias, saved[3])};
  }

  static LinearGradients of_rows(AutogradContext* ctx, const at::Tensor& dloss, const LinearWants& wants) {
    using Signature = LinearGradients(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                      const OptionalTensor&, const OptionalTensor&, int64_t, double, double, double,
                                      int64_t, std::optional<at::ScalarType>, bool, bool, bool);
    static const auto op = find_op<Signature>("warpsmith::linear_cross_entropy_rows_backward");
    const variable_list saved = ctx->get_saved_variables();
    std::optional<at::ScalarType> dw_dtype;
    if (const int64_t code = ctx->saved_data["dw_dtype"].toInt(); code >= 0)
      dw_dtype = static_cast<at::ScalarType>(code);
    return op.call(dloss, saved[0], saved[1], saved[2], if_defined(saved[3]), if_defined(saved[4]),
                   ctx->saved_data["ignore_index"].toInt(), ctx->saved_data["label_smoothing"].toDouble(),
                   ctx->saved_data["z_loss"].toDouble(), ctx->saved_data["softcap"].toDouble(),
                   ctx->saved_data["max_chunk_bytes"].toInt(), dw_dtype, wants.hidden, wants.weight, wants.bias);
  }
};

// ---- linear_log_prob

struct LinearLogProb : torch::autograd::Function<LinearLogProb> {
  using Outputs = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

  static Outputs call(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
                      const OptionalTensor& bias, const LinearLogProbOptions& o, bool save_logits) {
    using Signature =
        Outputs(const at::Tensor&, const at::Tensor&, const at::Tensor&, const OptionalTensor&, double, bool, int64_t);
    static const auto op = find_op<Signature>("warpsmith::linear_log_prob_forward");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return op.call(hidden, weight, target, bias, o.temperature, save_logits, o.max_chunk_bytes.value_or(0));
  }

  static variable_list forward(AutogradContext* ctx, const at::Tensor& hidden, const at::Tensor& weight,
                               const at::Tensor& target, const OptionalTensor& bias, const LinearLogProbOptions& o) {
    auto [log_prob, lse, entropy, row_max, row_sum, logits] = call(hidden, weight, target, bias, o, o.save_logits);
    ctx->save_for_backward({hidden, weight, target, bias.value_or(at::Tensor()), row_max, row_sum, entropy, logits});
    ctx->saved_data["temperature"] = o.temperature;
    ctx->saved_data["max_chunk_bytes"] = o.max_chunk_bytes.value_or(0);
    ctx->set_materialize_grads(false);
    return {log_prob, lse, entropy};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (at::GradMode::is_enabled()) refuse_second_derivative("linear_log_prob", /*python_has_them=*/false);
    using Signature =
        LinearGradients(const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const at::Tensor&,
                        const at::Tensor&, const at::Tensor&, const OptionalTensor&, const at::Tensor&,
                        const at::Tensor&, const at::Tensor&, const at::Tensor&, double, int64_t, bool, bool, bool);
    static const auto op = find_op<Signature>("warpsmith::linear_log_prob_backward");
    constexpr int kInputs = 5;
    const double temperature = ctx->saved_data["temperature"].toDouble();
    std::array<OptionalTensor, 3> up;
    for (size_t i = 0; i < up.size(); ++i)
      if (grads[i].defined()) up[i] = temperature == 1 ? grads[i] : at::div(grads[i], temperature);
    if (!up[0] && !up[1] && !up[2]) return variable_list(kInputs);
    const variable_list saved = ctx->get_saved_variables();
    const OptionalTensor bias = if_defined(saved[3]);
    const LinearWants wants = LinearWants::in(ctx, bias.has_value());
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return wants.returned(kInputs, op.call(up[0], up[1], up[2], saved[0], saved[1], saved[2], bias, saved[4], saved[5],
                                           saved[6], saved[7], temperature, ctx->saved_data["max_chunk_bytes"].toInt(),
                                           wants.hidden, wants.weight, wants.bias));
  }
};

}  // namespace detail

// Cross-entropy of hidden @ weight^T + bias, without all logits in memory: float32 (float64 for float64), a scalar, or
// for Reduction::none of the shape of target. Gradients for hidden, weight and bias; those of a reduced loss are made
// in the forward and given away by the backward.
//
// hidden: (..., H), float32, float16, bfloat16, or float64 on the CPU. weight: (V, H), target: (...), int64 classes or
// ignore_index, bias: (V,); weight and bias in the dtype of hidden.
//
// Input that does not fit throws an error that names op, argument, what was expected and what came.
inline at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
                                       const std::optional<at::Tensor>& bias = std::nullopt,
                                       const LinearCrossEntropyOptions& options = {}) {
  const bool graded = at::GradMode::is_enabled();
  const detail::LinearWants wants{graded && hidden.requires_grad(), graded && weight.requires_grad(),
                                  graded && bias && bias->requires_grad()};
  if (detail::has_derivative(hidden, weight, bias))
    return detail::LinearCrossEntropy::apply(hidden, weight, target, bias, options, wants);
  return std::get<0>(detail::linear_cross_entropy_forward(hidden, weight, target, bias, options, {}));
}

// {log_prob, logsumexp, entropy} of softmax((hidden @ weight^T + bias) / temperature), without all logits in memory;
// each of the shape of target, float32 (float64 for float64), with gradients for hidden, weight and bias.
//
// hidden: (..., H), float32, float16, bfloat16, or float64 on the CPU. weight: (V, H), target: (...), int64 classes,
// bias: (V,); weight and bias in the dtype of hidden. A target that is not a class is refused on the CPU, and gives NaN
// on CUDA.
//
// Input that does not fit throws an error that names op, argument, what was expected and what came.
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_log_prob(
    const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
    const std::optional<at::Tensor>& bias = std::nullopt, const LinearLogProbOptions& options = {}) {
  if (detail::has_derivative(hidden, weight, bias)) {
    const auto out = detail::LinearLogProb::apply(hidden, weight, target, bias, options);
    return {out[0], out[1], out[2]};
  }
  const auto out = detail::LinearLogProb::call(hidden, weight, target, bias, options, /*save_logits=*/false);
  return {std::get<0>(out), std::get<1>(out), std::get<2>(out)};
}

}  // namespace warpsmith
