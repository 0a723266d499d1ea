#pragma once
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "warpsmith/op.h"

// What the gated activations share. Op: kName, and kTanh, whether its raw ops take the flag `tanh` last.
namespace warpsmith::detail {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

template <class Op> std::string gated_name(const char* suffix) {
  return std::string("warpsmith::") + Op::kName + suffix;
}

template <class Op, class... Tanh>
at::Tensor gated_forward_with(const at::Tensor& gate, const std::optional<at::Tensor>& up, Tanh... tanh) {
  using Signature = at::Tensor(const at::Tensor&, const std::optional<at::Tensor>&, bool, Tanh...);
  static const auto op = find_op<Signature>(gated_name<Op>("_forward").c_str());
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return op.call(gate, up, false, tanh...);
}

template <class Op, class... Tanh> variable_list gated_backward_with(const at::Tensor& dy, const at::Tensor& gate,
                                                                     const std::optional<at::Tensor>& up,
                                                                     bool want_dgate, bool want_dup, Tanh... tanh) {
  using Signature = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&,
                                                       const std::optional<at::Tensor>&, bool, bool, Tanh...);
  static const auto op = find_op<Signature>(gated_name<Op>("_backward").c_str());
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto [dgate, dup] = op.call(dy, gate, up, want_dgate, want_dup, tanh...);
  return {std::move(dgate), std::move(dup)};
}

template <class Op, class... Tanh> void gated_backward_inplace_with(const at::Tensor& dy, const at::Tensor& gate,
                                                                    const std::optional<at::Tensor>& up,
                                                                    bool want_dgate, bool want_dup, Tanh... tanh) {
  using Signature = void(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, bool, bool, Tanh...);
  static const auto op = find_op<Signature>(gated_name<Op>("_backward_").c_str());
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  op.call(dy, gate, up, want_dgate, want_dup, tanh...);
}

template <class Op> at::Tensor gated_forward(const at::Tensor& gate, const std::optional<at::Tensor>& up, bool tanh) {
  if constexpr (Op::kTanh) return gated_forward_with<Op>(gate, up, tanh);
  return gated_forward_with<Op>(gate, up);
}

template <class Op> variable_list gated_backward(const at::Tensor& dy, const at::Tensor& gate,
                                                 const std::optional<at::Tensor>& up, bool tanh, bool want_dgate,
                                                 bool want_dup) {
  if constexpr (Op::kTanh) return gated_backward_with<Op>(dy, gate, up, want_dgate, want_dup, tanh);
  return gated_backward_with<Op>(dy, gate, up, want_dgate, want_dup);
}

template <class Op> void gated_backward_inplace(const at::Tensor& dy, const at::Tensor& gate,
                                                const std::optional<at::Tensor>& up, bool tanh, bool want_dgate,
                                                bool want_dup) {
  if constexpr (Op::kTanh)
    gated_backward_inplace_with<Op>(dy, gate, up, want_dgate, want_dup, tanh);
  else
    gated_backward_inplace_with<Op>(dy, gate, up, want_dgate, want_dup);
}

// The gradients as a function of their own, for create_graph alone: their derivative is refused, never silently zero.
template <class Op> struct GatedBackward : torch::autograd::Function<GatedBackward<Op>> {
  static variable_list forward(AutogradContext*, const at::Tensor& dy, const at::Tensor& gate,
                               const std::optional<at::Tensor>& up, bool tanh, bool want_dgate, bool want_dup) {
    return gated_backward<Op>(dy, gate, up, tanh, want_dgate, want_dup);
  }

  static variable_list backward(AutogradContext*, variable_list) {
    throw std::runtime_error(std::string(Op::kName) +
                             ": second derivatives are not available in C++; the Python function has them");
  }
};

// Whether the gradients may be written over the inputs: contiguous tensors that lie apart.
inline bool may_overwrite(const at::Tensor& gate, const std::optional<at::Tensor>& up) {
  if (!gate.is_contiguous()) return false;
  if (!up) return true;
  const auto bytes = static_cast<std::ptrdiff_t>(gate.nbytes());
  const std::ptrdiff_t apart =
      static_cast<const char*>(up->const_data_ptr()) - static_cast<const char*>(gate.const_data_ptr());
  return up->is_contiguous() && (apart >= bytes || -apart >= bytes);
}

template <class Op> struct Gated : torch::autograd::Function<Gated<Op>> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& gate, const std::optional<at::Tensor>& up,
                            bool tanh, bool inplace_backward) {
    ctx->save_for_backward({gate, up.value_or(at::Tensor())});
    ctx->saved_data["tanh"] = tanh;
    ctx->saved_data["inplace_backward"] = inplace_backward;
    ctx->set_materialize_grads(false);
    return gated_forward<Op>(gate, up, tanh);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(4);  // one for each input of forward
    const at::Tensor& dy = grads[0];
    if (!dy.defined()) return result;
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor& gate = saved[0];
    const std::optional<at::Tensor> up = saved[1].defined() ? std::optional(saved[1]) : std::nullopt;
    const bool tanh = ctx->saved_data["tanh"].toBool();
    // Edges count tensors: up's is the second one, where there is an up.
    const bool want_dgate = ctx->needs_input_grad(0), want_dup = up && ctx->needs_input_grad(1);
    const bool graph = at::GradMode::is_enabled();
    if (ctx->saved_data["inplace_backward"].toBool() && !graph && may_overwrite(gate, up)) {
      gated_backward_inplace<Op>(dy, gate, up, tanh, want_dgate, want_dup);
      // As after torch's own in-place operations: who still needs the old values is refused.
      const auto over = [](const at::Tensor& t) {
        if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
        return t.detach();
      };
      if (want_dgate) result[0] = over(gate);
      if (want_dup) result[1] = over(*up);
      return result;
    }
    const variable_list g = graph ? GatedBackward<Op>::apply(dy, gate, up, tanh, want_dgate, want_dup)
                                  : gated_backward<Op>(dy, gate, up, tanh, want_dgate, want_dup);
    if (want_dgate) result[0] = g[0];
    if (want_dup) result[1] = g[1];
    return result;
  }
};

template <class Op>
at::Tensor gated(const at::Tensor& gate, const std::optional<at::Tensor>& up, bool tanh, bool inplace_backward) {
  if (!has_derivative(gate) && !(up && has_derivative(*up))) return gated_forward<Op>(gate, up, tanh);
  const auto refuse_leaf = [](const char* argument, const at::Tensor& t) {
    if (t.requires_grad() && t.is_leaf())
      throw std::invalid_argument(std::string(Op::kName) + ": " + argument +
                                  ": expected a computed tensor for inplace_backward, got a leaf that requires grad");
  };
  if (inplace_backward) {
    refuse_leaf("gate", gate);
    if (up) refuse_leaf("up", *up);
  }
  return Gated<Op>::apply(gate, up, tanh, inplace_backward);
}

}  // namespace warpsmith::detail
