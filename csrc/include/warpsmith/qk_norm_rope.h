#pragma once
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "warpsmith/op.h"
#include "warpsmith/rope.h"

namespace warpsmith {
namespace detail {

// {dq, dk, dq_weight, dk_weight}; what is not wanted has no elements.
inline torch::autograd::variable_list qk_norm_rope_backward(const torch::autograd::variable_list& grads_and_inputs,
                                                            double eps, const RopeOptions& options,
                                                            const std::array<bool, 4>& wants) {
  using Signature = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
      const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
      const at::Tensor&, const at::Tensor&, double, bool, const OptionalTensor&, const OptionalTensor&, c10::SymInt,
      bool, bool, bool, bool);
  static const auto op = find_op<Signature>("warpsmith::qk_norm_rope_backward");
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto& t = grads_and_inputs;
  auto [dq, dk, dq_weight, dk_weight] =
      op.call(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], eps, options.interleaved, options.cu_seqlens,
              options.position_offsets, options.position_offset, wants[0], wants[1], wants[2], wants[3]);
  return {std::move(dq), std::move(dk), std::move(dq_weight), std::move(dk_weight)};
}

// The gradients as a function of their own, for create_graph alone: their derivative is refused, never silently zero.
struct QkNormRopeBackward : torch::autograd::Function<QkNormRopeBackward> {
  using variable_list = torch::autograd::variable_list;

  // One argument a tensor: tensors in a list would have no edges in the graph.
  static variable_list forward(torch::autograd::AutogradContext*, const at::Tensor& dq_out, const at::Tensor& dk_out,
                               const at::Tensor& q, const at::Tensor& k, const at::Tensor& q_weight,
                               const at::Tensor& k_weight, const at::Tensor& cos, const at::Tensor& sin, double eps,
                               const RopeOptions& options, const std::array<bool, 4>& wants) {
    return qk_norm_rope_backward({dq_out, dk_out, q, k, q_weight, k_weight, cos, sin}, eps, options, wants);
  }

  static variable_list backward(torch::autograd::AutogradContext*, variable_list) {
    throw std::runtime_error("qk_norm_rope: second derivatives are not available in C++; the Python function has them");
  }
};

inline std::tuple<at::Tensor, at::Tensor> qk_norm_rope_forward(const at::Tensor& q, const at::Tensor& k,
                                                               const at::Tensor& q_weight, const at::Tensor& k_weight,
                                                               const at::Tensor& cos, const at::Tensor& sin, double eps,
                                                               const RopeOptions& options) {
  using Signature = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                       const at::Tensor&, const at::Tensor&, const at::Tensor&, double,
                                                       bool, const OptionalTensor&, const OptionalTensor&, c10::SymInt);
  static const auto op = find_op<Signature>("warpsmith::qk_norm_rope_forward");
  return op.call(q, k, q_weight, k_weight, cos, sin, eps, options.interleaved, options.cu_seqlens,
                 options.position_offsets, options.position_offset);
}

struct QkNormRope : torch::autograd::Function<QkNormRope> {
  using variable_list = torch::autograd::variable_list;

  static variable_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& q_weight, const at::Tensor& k_weight, const at::Tensor& cos,
                               const at::Tensor& sin, double eps, const RopeOptions& options) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [q_out, k_out] = qk_norm_rope_forward(q, k, q_weight, k_weight, cos, sin, eps, options);
    ctx->save_for_backward({q, k, q_weight, k_weight, cos, sin, options.cu_seqlens.value_or(at::Tensor()),
                            options.position_offsets.value_or(at::Tensor())});
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["interleaved"] = options.interleaved;
    ctx->saved_data["position_offset"] = options.position_offset;
    ctx->set_materialize_grads(false);
    return {std::move(q_out), std::move(k_out)};
  }

  static variable_list backward(torch::autograd::AutogradContext* ctx, variable_list grads) {
    variable_list result(8);  // one for each input of forward
    std::array<bool, 4> wants;
    for (size_t i = 0; i < 4; ++i) wants[i] = grads[i % 2].defined() && ctx->needs_input_grad(i);
    if (!wants[0] && !wants[1] && !wants[2] && !wants[3]) return result;
    const variable_list saved = ctx->get_saved_variables();
    const auto optional = [](const at::Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; };
    const RopeOptions options{ctx->saved_data["interleaved"].toBool(), optional(saved[6]),
                              ctx->saved_data["position_offset"].toInt(), optional(saved[7])};
    const double eps = ctx->saved_data["eps"].toDouble();
    variable_list inputs = {grads[0], grads[1], saved[0], saved[1], saved[2], saved[3], saved[4], saved[5]};
    for (size_t i = 0; i < 2; ++i)  // nothing of q, or of k, is read
      if (!wants[i] && !wants[i + 2]) inputs[i] = inputs[2 + i] = inputs[2 + i].narrow(-2, 0, 0);
    const variable_list g = at::GradMode::is_enabled()
                                ? QkNormRopeBackward::apply(inputs[0], inputs[1], inputs[2], inputs[3], inputs[4],
                                                            inputs[5], inputs[6], inputs[7], eps, options, wants)
                                : qk_norm_rope_backward(inputs, eps, options, wants);
    for (size_t i = 0; i < 4; ++i)
      if (wants[i]) result[i] = g[i];
    return result;
  }
};

}  // namespace detail

// RMS normalisation of each head of q and k over the last dimension, with weights (D,), and their rotary position
// embedding, in one pass; with gradients for q, k and both weights. Shapes, angles and options as warpsmith::rope;
// errors as warpsmith.qk_norm_rope in Python.
inline std::pair<at::Tensor, at::Tensor> qk_norm_rope(const at::Tensor& q, const at::Tensor& k,
                                                      const at::Tensor& q_weight, const at::Tensor& k_weight,
                                                      const at::Tensor& cos, const at::Tensor& sin, double eps = 1e-6,
                                                      const RopeOptions& options = {}) {
  TORCH_CHECK_VALUE(!at::GradMode::is_enabled() || !cos.requires_grad(),
                    "qk_norm_rope: cos: expected a tensor that requires no gradient, got one that does");
  TORCH_CHECK_VALUE(!at::GradMode::is_enabled() || !sin.requires_grad(),
                    "qk_norm_rope: sin: expected a tensor that requires no gradient, got one that does");
  for (const at::Tensor* t : {&q, &k, &q_weight, &k_weight})
    if (detail::has_derivative(*t)) {
      auto out = detail::QkNormRope::apply(q, k, q_weight, k_weight, cos, sin, eps, options);
      return {out[0], out[1]};
    }
  auto [q_out, k_out] = detail::qk_norm_rope_forward(q, k, q_weight, k_weight, cos, sin, eps, options);
  return {std::move(q_out), std::move(k_out)};
}

}  // namespace warpsmith
