#pragma once
#include <torch/csrc/autograd/custom_function.h>

#include <stdexcept>
#include <string>
#include <tuple>

#include "warpsmith/op.h"

// What the biased activations share. Op: kName, and kTanh, whether its raw ops take the flag `tanh` last.
namespace warpsmith::detail {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

template <class Op, class... Tanh>
at::Tensor biased_forward_with(const at::Tensor& x, const at::Tensor& bias, Tanh... tanh) {
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, Tanh...);
  static const auto op = find_op<Signature>((std::string("warpsmith::") + Op::kName + "_forward").c_str());
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return op.call(x, bias, tanh...);
}

template <class Op, class... Tanh> variable_list biased_backward_with(const at::Tensor& dy, const at::Tensor& x,
                                                                      const at::Tensor& bias, bool want_dx,
                                                                      bool want_dbias, Tanh... tanh) {
  using Signature =
      std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&, bool, bool, Tanh...);
  static const auto op = find_op<Signature>((std::string("warpsmith::") + Op::kName + "_backward").c_str());
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto [dx, dbias] = op.call(dy, x, bias, want_dx, want_dbias, tanh...);
  return {std::move(dx), std::move(dbias)};
}

template <class Op> at::Tensor biased_forward(const at::Tensor& x, const at::Tensor& bias, bool tanh) {
  if constexpr (Op::kTanh) return biased_forward_with<Op>(x, bias, tanh);
  return biased_forward_with<Op>(x, bias);
}

template <class Op> variable_list biased_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& bias,
                                                  bool tanh, bool want_dx, bool want_dbias) {
  if constexpr (Op::kTanh) return biased_backward_with<Op>(dy, x, bias, want_dx, want_dbias, tanh);
  return biased_backward_with<Op>(dy, x, bias, want_dx, want_dbias);
}

// The gradients as a function of their own, for create_graph alone: their derivative is refused, never silently zero.
template <class Op> struct BiasedBackward : torch::autograd::Function<BiasedBackward<Op>> {
  static variable_list forward(AutogradContext*, const at::Tensor& dy, const at::Tensor& x, const at::Tensor& bias,
                               bool tanh, bool want_dx, bool want_dbias) {
    return biased_backward<Op>(dy, x, bias, tanh, want_dx, want_dbias);
  }

  static variable_list backward(AutogradContext*, variable_list) {
    throw std::runtime_error(std::string(Op::kName) +
                             ": second derivatives are not available in C++; the Python function has them");
  }
};

template <class Op> struct Biased : torch::autograd::Function<Biased<Op>> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& bias, bool tanh) {
    ctx->save_for_backward({x, bias});
    ctx->saved_data["tanh"] = tanh;
    ctx->set_materialize_grads(false);
    return biased_forward<Op>(x, bias, tanh);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(3);  // one for each input of forward
    const at::Tensor& dy = grads[0];
    if (!dy.defined()) return result;
    const variable_list saved = ctx->get_saved_variables();
    const bool tanh = ctx->saved_data["tanh"].toBool();
    const bool want_dx = ctx->needs_input_grad(0), want_dbias = ctx->needs_input_grad(1);
    const variable_list g = at::GradMode::is_enabled()
                                ? BiasedBackward<Op>::apply(dy, saved[0], saved[1], tanh, want_dx, want_dbias)
                                : biased_backward<Op>(dy, saved[0], saved[1], tanh, want_dx, want_dbias);
    if (want_dx) result[0] = g[0];
    if (want_dbias) result[1] = g[1];
    return result;
  }
};

template <class Op> at::Tensor biased(const at::Tensor& x, const at::Tensor& bias, bool tanh) {
  if (!has_derivative(x) && !has_derivative(bias)) return biased_forward<Op>(x, bias, tanh);
  return Biased<Op>::apply(x, bias, tanh);
}

}  // namespace warpsmith::detail
