#pragma once
#include <ATen/ops/div.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <optional>
#include <stdexcept>
#include <tuple>

#include "warpsmith/op.h"

namespace warpsmith {

// What linear_log_prob computes, and how.
struct LinearLogProbOptions {
  double temperature = 1;    // finite and > 0
  bool save_logits = false;  // keep all logits for the backward, which makes them again otherwise
  std::optional<int64_t> max_chunk_bytes =
      std::nullopt;  // logits in memory at a time: by default 1 GiB on CUDA, 64 MiB on the CPU
};

namespace detail {

struct LinearLogProb : torch::autograd::Function<LinearLogProb> {
  using Tensors = torch::autograd::variable_list;
  using Optional = std::optional<at::Tensor>;
  using Outputs = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

  static Outputs call(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
                      const Optional& bias, const LinearLogProbOptions& o) {
    using Signature =
        Outputs(const at::Tensor&, const at::Tensor&, const at::Tensor&, const Optional&, double, bool, int64_t);
    static const auto op = find_op<Signature>("warpsmith::linear_log_prob_forward");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return op.call(hidden, weight, target, bias, o.temperature, o.save_logits, o.max_chunk_bytes.value_or(0));
  }

  static Tensors forward(torch::autograd::AutogradContext* ctx, const at::Tensor& hidden, const at::Tensor& weight,
                         const at::Tensor& target, const Optional& bias, const LinearLogProbOptions& o) {
    auto [log_prob, lse, entropy, row_max, row_sum, logits] = call(hidden, weight, target, bias, o);
    ctx->save_for_backward({hidden, weight, target, bias.value_or(at::Tensor()), row_max, row_sum, entropy, logits});
    ctx->saved_data["temperature"] = o.temperature;
    ctx->saved_data["max_chunk_bytes"] = o.max_chunk_bytes.value_or(0);
    ctx->set_materialize_grads(false);
    return {log_prob, lse, entropy};
  }

  static Tensors backward(torch::autograd::AutogradContext* ctx, const Tensors& grads) {
    if (at::GradMode::is_enabled()) throw std::runtime_error("linear_log_prob: second derivatives are not available");
    using Signature = std::tuple<at::Tensor, at::Tensor, at::Tensor>(
        const Optional&, const Optional&, const Optional&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
        const Optional&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, double, int64_t,
        bool, bool, bool);
    static const auto op = find_op<Signature>("warpsmith::linear_log_prob_backward");
    Tensors result(5);  // one for each input of forward
    const double temperature = ctx->saved_data["temperature"].toDouble();
    std::array<Optional, 3> up;
    for (size_t i = 0; i < up.size(); ++i)
      if (grads[i].defined()) up[i] = temperature == 1 ? grads[i] : at::div(grads[i], temperature);
    if (!up[0] && !up[1] && !up[2]) return result;
    const Tensors saved = ctx->get_saved_variables();
    const Optional bias = saved[3].defined() ? Optional(saved[3]) : std::nullopt;
    // Edges count tensors, and there is none for an absent bias.
    const std::array<bool, 3> wants = {ctx->needs_input_grad(0), ctx->needs_input_grad(1),
                                       bias && ctx->needs_input_grad(3)};
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [dhidden, dweight, dbias] =
        op.call(up[0], up[1], up[2], saved[0], saved[1], saved[2], bias, saved[4], saved[5], saved[6], saved[7],
                temperature, ctx->saved_data["max_chunk_bytes"].toInt(), wants[0], wants[1], wants[2]);
    if (wants[0]) result[0] = dhidden;
    if (wants[1]) result[1] = dweight;
    if (wants[2]) result[3] = dbias;
    return result;
  }
};

}  // namespace detail

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
  if (detail::has_derivative(hidden) || detail::has_derivative(weight) || (bias && detail::has_derivative(*bias))) {
    const auto out = detail::LinearLogProb::apply(hidden, weight, target, bias, options);
    return {out[0], out[1], out[2]};
  }
  LinearLogProbOptions without_backward = options;
  without_backward.save_logits = false;
  const auto out = detail::LinearLogProb::call(hidden, weight, target, bias, without_backward);
  return {std::get<0>(out), std::get<1>(out), std::get<2>(out)};
}

}  // namespace warpsmith
