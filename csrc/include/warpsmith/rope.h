#pragma once
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <tuple>
#include <utility>

#include "warpsmith/op.h"

namespace warpsmith {

struct RopeOptions {
  bool interleaved = false;
  std::optional<at::Tensor> cu_seqlens = std::nullopt;
  int64_t position_offset = 0;
  std::optional<at::Tensor> position_offsets = std::nullopt;  // on the device; instead of position_offset
};

namespace detail {

using OptionalTensor = std::optional<at::Tensor>;

inline std::tuple<at::Tensor, at::Tensor> rope_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos,
                                                       const at::Tensor& sin, const RopeOptions& options,
                                                       bool inverse) {
  using Signature =
      std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                         bool, const OptionalTensor&, const OptionalTensor&, c10::SymInt, bool);
  static const auto op = find_op<Signature>("warpsmith::rope_forward");
  return op.call(q, k, cos, sin, options.interleaved, options.cu_seqlens, options.position_offsets,
                 options.position_offset, inverse);
}

struct Rope : torch::autograd::Function<Rope> {
  using variable_list = torch::autograd::variable_list;

  static variable_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& cos, const at::Tensor& sin, const RopeOptions& options, bool inverse) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [q_out, k_out] = rope_forward(q, k, cos, sin, options, inverse);
    ctx->save_for_backward(
        {cos, sin, options.cu_seqlens.value_or(at::Tensor()), options.position_offsets.value_or(at::Tensor())});
    ctx->saved_data["interleaved"] = options.interleaved;
    ctx->saved_data["position_offset"] = options.position_offset;
    ctx->saved_data["inverse"] = inverse;
    ctx->set_materialize_grads(false);
    return {std::move(q_out), std::move(k_out)};
  }

  // The same rotation by the negative angle, so derivatives of every order exist.
  static variable_list backward(torch::autograd::AutogradContext* ctx, variable_list grads) {
    variable_list result(6);  // one for each input of forward
    const bool want_q = grads[0].defined() && ctx->needs_input_grad(0);
    const bool want_k = grads[1].defined() && ctx->needs_input_grad(1);
    if (!want_q && !want_k) return result;
    const at::Tensor dq = want_q ? grads[0] : grads[1].narrow(-2, 0, 0);
    const at::Tensor dk = want_k ? grads[1] : grads[0].narrow(-2, 0, 0);
    const variable_list saved = ctx->get_saved_variables();
    const auto optional = [](const at::Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; };
    const RopeOptions options{ctx->saved_data["interleaved"].toBool(), optional(saved[2]),
                              ctx->saved_data["position_offset"].toInt(), optional(saved[3])};
    const bool inverse = !ctx->saved_data["inverse"].toBool();
    variable_list g;
    if (at::GradMode::is_enabled()) {
      g = Rope::apply(dq, dk, saved[0], saved[1], options, inverse);
    } else {
      auto [q, k] = rope_forward(dq, dk, saved[0], saved[1], options, inverse);
      g = {std::move(q), std::move(k)};
    }
    if (want_q) result[0] = g[0];
    if (want_k) result[1] = g[1];
    return result;
  }
};

}  // namespace detail

// Rotary position embedding of q (B, S, Hq, D) or (T, Hq, D) and k (as q, any number of heads), in one launch. cos,
// sin: a table (positions, rotary_dim / 2), or (B or 1, S, rotary_dim), a row for each token. Gradients of every order
// for q and k, none for cos and sin. Everything else as warpsmith.rope in Python, whose errors these are.
inline std::pair<at::Tensor, at::Tensor> rope(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos,
                                              const at::Tensor& sin, const RopeOptions& options = {}) {
  TORCH_CHECK_VALUE(!at::GradMode::is_enabled() || !cos.requires_grad(),
                    "rope: cos: expected a tensor that requires no gradient, got one that does");
  TORCH_CHECK_VALUE(!at::GradMode::is_enabled() || !sin.requires_grad(),
                    "rope: sin: expected a tensor that requires no gradient, got one that does");
  if (detail::has_derivative(q) || detail::has_derivative(k)) {
    auto out = detail::Rope::apply(q, k, cos, sin, options, /*inverse=*/false);
    return {out[0], out[1]};
  }
  auto [q_out, k_out] = detail::rope_forward(q, k, cos, sin, options, /*inverse=*/false);
  return {std::move(q_out), std::move(k_out)};
}

}  // namespace warpsmith
