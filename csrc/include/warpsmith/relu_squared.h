#pragma once
#include <torch/csrc/autograd/custom_function.h>

#include <stdexcept>

#include "warpsmith/op.h"

namespace warpsmith {
namespace detail {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

inline at::Tensor relu_squared_forward(const at::Tensor& x) {
  static const auto op = find_op<at::Tensor(const at::Tensor&)>("warpsmith::relu_squared_forward");
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return op.call(x);
}

inline at::Tensor relu_squared_backward(const at::Tensor& dy, const at::Tensor& x) {
  static const auto op = find_op<at::Tensor(const at::Tensor&, const at::Tensor&)>("warpsmith::relu_squared_backward");
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return op.call(dy, x);
}

// The gradient as a function of its own, for create_graph alone: its derivative is refused, never silently zero.
struct ReluSquaredBackward : torch::autograd::Function<ReluSquaredBackward> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& dy, const at::Tensor& x) {
    return relu_squared_backward(dy, x);
  }

  static variable_list backward(AutogradContext*, variable_list) {
    throw std::runtime_error("relu_squared: second derivatives are not available in C++; the Python function has them");
  }
};

struct ReluSquared : torch::autograd::Function<ReluSquared> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x) {
    ctx->save_for_backward({x});
    ctx->set_materialize_grads(false);
    return relu_squared_forward(x);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    if (!grads[0].defined()) return {at::Tensor()};
    const at::Tensor x = ctx->get_saved_variables()[0];
    return {at::GradMode::is_enabled() ? ReluSquaredBackward::apply(grads[0], x) : relu_squared_backward(grads[0], x)};
  }
};

}  // namespace detail

// y = max(x, 0)^2, with its gradient. x: (..., F), float32, float16, bfloat16, or float64 on the CPU.
//
// Input that does not fit throws an error that names op, argument, what was expected and what came.
inline at::Tensor relu_squared(const at::Tensor& x) {
  return detail::has_derivative(x) ? detail::ReluSquared::apply(x) : detail::relu_squared_forward(x);
}

}  // namespace warpsmith
