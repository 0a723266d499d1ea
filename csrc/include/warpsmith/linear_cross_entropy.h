#pragma once
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "warpsmith/op.h"

namespace warpsmith {

// What linear_cross_entropy computes, and how; the Python function's documentation says what each means.
struct LinearCrossEntropyOptions {
  std::optional<at::Tensor> class_weight = std::nullopt;  // (V,), not differentiable
  int64_t ignore_index = -100;
  std::string reduction = "mean";  // or "sum", "none"
  double label_smoothing = 0, z_loss = 0, softcap = 0;
  bool check_labels = false;  // on CUDA: wait for the device, refuse targets out of range
  std::optional<int64_t> max_chunk_bytes =
      std::nullopt;  // logits in memory at a time: by default 1 GiB on CUDA, 64 MiB on the CPU
  std::optional<at::ScalarType> dw_dtype = std::nullopt;  // in which the weight's gradient is summed over chunks
};

namespace detail {

using LinearLossOutputs =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using OptionalTensor = std::optional<at::Tensor>;

struct LinearWants {
  bool hidden = false, weight = false, bias = false;
};

inline LinearLossOutputs linear_cross_entropy_forward(const at::Tensor& hidden, const at::Tensor& weight,
                                                      const at::Tensor& target, const OptionalTensor& bias,
                                                      const LinearCrossEntropyOptions& o, const LinearWants& wants) {
  using Signature =
      LinearLossOutputs(const at::Tensor&, const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                        const OptionalTensor&, int64_t, c10::string_view, double, double, double, bool, bool, int64_t,
                        std::optional<at::ScalarType>, const OptionalTensor&, bool, bool, bool);
  static const auto op = find_op<Signature>("warpsmith::linear_cross_entropy_forward");
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return op.call(hidden, weight, target, bias, o.class_weight, o.ignore_index, o.reduction, o.label_smoothing, o.z_loss,
                 o.softcap, o.check_labels, false, o.max_chunk_bytes.value_or(0), o.dw_dtype, std::nullopt,
                 wants.hidden, wants.weight, wants.bias);
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
  using Tensors = torch::autograd::variable_list;

  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& hidden, const at::Tensor& weight,
                            const at::Tensor& target, const OptionalTensor& bias, const LinearCrossEntropyOptions& o,
                            const LinearWants& wants) {
    const LinearLossOutputs out = linear_cross_entropy_forward(hidden, weight, target, bias, o, wants);
    ctx->saved_data["rows"] = o.reduction == "none";
    if (o.reduction == "none") {
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

  static Tensors backward(torch::autograd::AutogradContext* ctx, const Tensors& grads) {
    if (at::GradMode::is_enabled())
      throw std::runtime_error("linear_cross_entropy: second derivatives are not available");
    Tensors result(6);  // one for each input of forward
    const at::Tensor& dloss = grads[0];
    if (!dloss.defined()) return result;
    const LinearWants wants{ctx->needs_input_grad(0), ctx->needs_input_grad(1),
                            ctx->saved_data["bias"].toBool() && ctx->needs_input_grad(3)};
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (ctx->saved_data["rows"].toBool())
      rows_gradients(ctx, dloss, wants, result);
    else
      reduced_gradients(ctx, dloss, wants, result);
    return result;
  }

 private:
  static void reduced_gradients(torch::autograd::AutogradContext* ctx, const at::Tensor& dloss,
                                const LinearWants& wants, Tensors& result) {
    const Tensors saved = ctx->get_saved_variables();
    const OptionalTensor denominator = saved[0].numel() ? OptionalTensor(saved[0]) : std::nullopt;
    const auto dtype = static_cast<at::ScalarType>(ctx->saved_data["dtype"].toInt());
    if (wants.hidden) result[0] = linear_cross_entropy_finished(saved[1], dloss, denominator, dtype);
    if (wants.weight) result[1] = linear_cross_entropy_finished(saved[2], dloss, denominator, dtype);
    if (wants.bias) result[3] = linear_cross_entropy_finished(saved[3], dloss, denominator, dtype);
  }

  static void rows_gradients(torch::autograd::AutogradContext* ctx, const at::Tensor& dloss, const LinearWants& wants,
                             Tensors& result) {
    using Signature = std::tuple<at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const OptionalTensor&,
        const OptionalTensor&, int64_t, double, double, double, int64_t, std::optional<at::ScalarType>, bool, bool,
        bool);
    static const auto op = find_op<Signature>("warpsmith::linear_cross_entropy_rows_backward");
    const Tensors saved = ctx->get_saved_variables();
    const auto optional = [](const at::Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; };
    const int64_t dw = ctx->saved_data["dw_dtype"].toInt();
    const auto call = [&](const std::optional<at::ScalarType>& dw_dtype) {
      return op.call(dloss, saved[0], saved[1], saved[2], optional(saved[3]), optional(saved[4]),
                     ctx->saved_data["ignore_index"].toInt(), ctx->saved_data["label_smoothing"].toDouble(),
                     ctx->saved_data["z_loss"].toDouble(), ctx->saved_data["softcap"].toDouble(),
                     ctx->saved_data["max_chunk_bytes"].toInt(), dw_dtype, wants.hidden, wants.weight, wants.bias);
    };
    auto [dhidden, dweight, dbias] = dw < 0 ? call(std::nullopt) : call(static_cast<at::ScalarType>(dw));
    if (wants.hidden) result[0] = dhidden;
    if (wants.weight) result[1] = dweight;
    if (wants.bias) result[3] = dbias;
  }
};

}  // namespace detail

// Cross-entropy of hidden @ weight^T + bias, without all logits in memory: float32 (float64 for float64), a scalar, or
// for reduction "none" of the shape of target. Gradients for hidden, weight and bias; those of a reduced loss are made
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
  if (detail::has_derivative(hidden) || detail::has_derivative(weight) || (bias && detail::has_derivative(*bias)))
    return detail::LinearCrossEntropy::apply(hidden, weight, target, bias, options, wants);
  return std::get<0>(detail::linear_cross_entropy_forward(hidden, weight, target, bias, options, {}));
}

}  // namespace warpsmith
