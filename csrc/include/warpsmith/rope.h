#pragma once
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "warpsmith/op.h"

// Rotary position embedding with gradients: rope and qk_norm_rope.
//
// Input that does not fit throws an error that names op, argument, what was expected and what came.
namespace warpsmith {

struct RopeOptions {
  bool interleaved = false;
  std::optional<at::Tensor> cu_seqlens = std::nullopt;
  int64_t position_offset = 0;
  std::optional<at::Tensor> position_offsets = std::nullopt;  // on the device; instead of position_offset
};

namespace detail {

using OptionalTensor = std::optional<at::Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

inline void save_rope_options(AutogradContext* ctx, variable_list tensors, const RopeOptions& options) {
  tensors.push_back(options.cu_seqlens.value_or(at::Tensor()));
  tensors.push_back(options.position_offsets.value_or(at::Tensor()));
  ctx->save_for_backward(std::move(tensors));
  ctx->saved_data["interleaved"] = options.interleaved;
  ctx->saved_data["position_offset"] = options.position_offset;
  ctx->set_materialize_grads(false);
}

// Takes the two tensors of the options off the end of `saved`.
inline RopeOptions saved_rope_options(AutogradContext* ctx, variable_list& saved) {
  const auto take = [&] {
    const at::Tensor t = saved.back();
    saved.pop_back();
    return t.defined() ? OptionalTensor(t) : std::nullopt;
  };
  OptionalTensor position_offsets = take(), cu_seqlens = take();
  return {ctx->saved_data["interleaved"].toBool(), std::move(cu_seqlens), ctx->saved_data["position_offset"].toInt(),
          std::move(position_offsets)};
}

inline void refuse_gradients_of_angles(const std::string& op, const at::Tensor& cos, const at::Tensor& sin) {
  const auto check = [&](const char* argument, const at::Tensor& t) {
    TORCH_CHECK_VALUE(!at::GradMode::is_enabled() || !t.requires_grad(), op, ": ", argument,
                      ": expected a tensor that requires no gradient, got one that does");
  };
  check("cos", cos);
  check("sin", sin);
}

// ---- rope

inline variable_list rope_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos,
                                  const at::Tensor& sin, const RopeOptions& options, bool inverse) {
  using Signature =
      std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                         bool, const OptionalTensor&, const OptionalTensor&, c10::SymInt, bool);
  static const auto op = find_op<Signature>("warpsmith::rope_forward");
  auto [q_out, k_out] = op.call(q, k, cos, sin, options.interleaved, options.cu_seqlens, options.position_offsets,
                                options.position_offset, inverse);
  return {std::move(q_out), std::move(k_out)};
}

struct Rope : torch::autograd::Function<Rope> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos,
                               const at::Tensor& sin, const RopeOptions& options, bool inverse) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    variable_list out = rope_forward(q, k, cos, sin, options, inverse);
    save_rope_options(ctx, {cos, sin}, options);
    ctx->saved_data["inverse"] = inverse;
    return out;
  }

  // The same rotation by the negative angle, so derivatives of every order exist.
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(6);  // one for each input of forward
    const bool want_q = grads[0].defined() && ctx->needs_input_grad(0);
    const bool want_k = grads[1].defined() && ctx->needs_input_grad(1);
    if (!want_q && !want_k) return result;
    const at::Tensor dq = want_q ? grads[0] : grads[1].narrow(-2, 0, 0);
    const at::Tensor dk = want_k ? grads[1] : grads[0].narrow(-2, 0, 0);
    variable_list saved = ctx->get_saved_variables();
    const RopeOptions options = saved_rope_options(ctx, saved);
    const bool inverse = !ctx->saved_data["inverse"].toBool();
    const variable_list g = at::GradMode::is_enabled() ? Rope::apply(dq, dk, saved[0], saved[1], options, inverse)
                                                       : rope_forward(dq, dk, saved[0], saved[1], options, inverse);
    if (want_q) result[0] = g[0];
    if (want_k) result[1] = g[1];
    return result;
  }
};

// ---- qk_norm_rope. Lists of tensors are in the order of the op's arguments: q, k, q_weight, k_weight, cos, sin.

inline variable_list qk_norm_rope_forward(const variable_list& t, double eps, const RopeOptions& options) {
  using Signature = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                       const at::Tensor&, const at::Tensor&, const at::Tensor&, double,
                                                       bool, const OptionalTensor&, const OptionalTensor&, c10::SymInt);
  static const auto op = find_op<Signature>("warpsmith::qk_norm_rope_forward");
  auto [q_out, k_out] = op.call(t[0], t[1], t[2], t[3], t[4], t[5], eps, options.interleaved, options.cu_seqlens,
                                options.position_offsets, options.position_offset);
  return {std::move(q_out), std::move(k_out)};
}

// {dq, dk, dq_weight, dk_weight}; a gradient that is not wanted has no elements.
inline variable_list qk_norm_rope_backward(const at::Tensor& dq_out, const at::Tensor& dk_out, const variable_list& t,
                                           double eps, const RopeOptions& options, const std::array<bool, 4>& wants) {
  using Signature = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
      const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
      const at::Tensor&, const at::Tensor&, double, bool, const OptionalTensor&, const OptionalTensor&, c10::SymInt,
      bool, bool, bool, bool);
  static const auto op = find_op<Signature>("warpsmith::qk_norm_rope_backward");
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto [dq, dk, dq_weight, dk_weight] =
      op.call(dq_out, dk_out, t[0], t[1], t[2], t[3], t[4], t[5], eps, options.interleaved, options.cu_seqlens,
              options.position_offsets, options.position_offset, wants[0], wants[1], wants[2], wants[3]);
  return {std::move(dq), std::move(dk), std::move(dq_weight), std::move(dk_weight)};
}

// The gradients as a function of their own, for create_graph alone: their derivative is refused, never silently zero.
struct QkNormRopeBackward : torch::autograd::Function<QkNormRopeBackward> {
  // One argument a tensor: tensors in a list would have no edges in the graph.
  static variable_list forward(AutogradContext*, const at::Tensor& dq_out, const at::Tensor& dk_out,
                               const at::Tensor& q, const at::Tensor& k, const at::Tensor& q_weight,
                               const at::Tensor& k_weight, const at::Tensor& cos, const at::Tensor& sin, double eps,
                               const RopeOptions& options, const std::array<bool, 4>& wants) {
    return qk_norm_rope_backward(dq_out, dk_out, {q, k, q_weight, k_weight, cos, sin}, eps, options, wants);
  }

  static variable_list backward(AutogradContext*, variable_list) { refuse_second_derivative("qk_norm_rope"); }
};

struct QkNormRope : torch::autograd::Function<QkNormRope> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& q_weight, const at::Tensor& k_weight, const at::Tensor& cos,
                               const at::Tensor& sin, double eps, const RopeOptions& options) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const variable_list inputs{q, k, q_weight, k_weight, cos, sin};
    variable_list out = qk_norm_rope_forward(inputs, eps, options);
    save_rope_options(ctx, inputs, options);
    ctx->saved_data["eps"] = eps;
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(8);  // one for each input of forward
    std::array<bool, 4> wants;
    for (size_t i = 0; i < 4; ++i) wants[i] = grads[i % 2].defined() && ctx->needs_input_grad(i);
    if (!wants[0] && !wants[1] && !wants[2] && !wants[3]) return result;
    variable_list t = ctx->get_saved_variables();
    const RopeOptions options = saved_rope_options(ctx, t);
    const double eps = ctx->saved_data["eps"].toDouble();
    for (size_t i = 0; i < 2; ++i)  // where no gradient of q, or of k, is wanted: no heads to read
      if (!wants[i] && !wants[i + 2]) grads[i] = t[i] = t[i].narrow(-2, 0, 0);
    const variable_list g =
        at::GradMode::is_enabled()
            ? QkNormRopeBackward::apply(grads[0], grads[1], t[0], t[1], t[2], t[3], t[4], t[5], eps, options, wants)
            : qk_norm_rope_backward(grads[0], grads[1], t, eps, options, wants);
    for (size_t i = 0; i < 4; ++i)
      if (wants[i]) result[i] = g[i];
    return result;
  }
};

}  // namespace detail

// Rotary position embedding of q (B, S, Hq, D) or (T, Hq, D) and k (as q, any number of heads), in one launch. cos,
// sin: a table (positions, rotary_dim / 2), or (B or 1, S, rotary_dim), a row for each token. Gradients of every order
// for q and k; cos and sin have none. Everything else, errors included: as warpsmith.rope in Python.
inline std::pair<at::Tensor, at::Tensor> rope(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos,
                                              const at::Tensor& sin, const RopeOptions& options = {}) {
  detail::refuse_gradients_of_angles("rope", cos, sin);
  const auto out = detail::has_derivative(q) || detail::has_derivative(k)
                       ? detail::Rope::apply(q, k, cos, sin, options, /*inverse=*/false)
                       : detail::rope_forward(q, k, cos, sin, options, /*inverse=*/false);
  return {out[0], out[1]};
}

// RMS normalisation of each head of q and k over the last dimension, with weights (D,), and their rotary position
// embedding, in one pass. epsilon: as eps of warpsmith::rms_norm. Gradients for q, k and both weights. Shapes, angles
// and options as warpsmith::rope; errors as warpsmith.qk_norm_rope in Python.
inline std::pair<at::Tensor, at::Tensor> qk_norm_rope(const at::Tensor& q, const at::Tensor& k,
                                                      const at::Tensor& q_weight, const at::Tensor& k_weight,
                                                      const at::Tensor& cos, const at::Tensor& sin,
                                                      std::optional<double> epsilon = std::nullopt,
                                                      const RopeOptions& options = {}) {
  const double eps = detail::epsilon_of(q, epsilon);
  detail::refuse_gradients_of_angles("qk_norm_rope", cos, sin);
  const bool differentiable = detail::has_derivative(q) || detail::has_derivative(k) ||
                              detail::has_derivative(q_weight) || detail::has_derivative(k_weight);
  const auto out = differentiable ? detail::QkNormRope::apply(q, k, q_weight, k_weight, cos, sin, eps, options)
                                  : detail::qk_norm_rope_forward({q, k, q_weight, k_weight, cos, sin}, eps, options);
  return {out[0], out[1]};
}

}  // namespace warpsmith
