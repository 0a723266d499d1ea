#pragma once
#include <ATen/ops/randint.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>

#include "warpsmith/op.h"

namespace warpsmith {
namespace detail {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

inline at::Tensor dropout_add_forward(const at::Tensor& x, const at::Tensor& residual,
                                      const std::optional<at::Tensor>& seed, double p) {
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double);
  static const auto op = find_op<Signature>("warpsmith::dropout_add_forward");
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return op.call(x, residual, seed, p);
}

inline at::Tensor dropout_add_backward(const at::Tensor& dy, const at::Tensor& seed, double p) {
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, double);
  static const auto op = find_op<Signature>("warpsmith::dropout_add_backward");
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return op.call(dy, seed, p);
}

// The gradient of x as a function of its own, for create_graph alone: its derivative is refused, never silently zero.
struct DropoutAddBackward : torch::autograd::Function<DropoutAddBackward> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& dy, const at::Tensor& seed, double p) {
    return dropout_add_backward(dy, seed, p);
  }

  static variable_list backward(AutogradContext*, variable_list) {
    throw std::runtime_error("dropout_add: second derivatives are not available in C++; the Python function has them");
  }
};

struct DropoutAdd : torch::autograd::Function<DropoutAdd> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& residual,
                            const std::optional<at::Tensor>& seed, double p) {
    ctx->save_for_backward({seed.value_or(at::Tensor())});
    ctx->saved_data["p"] = p;
    ctx->set_materialize_grads(false);
    return dropout_add_forward(x, residual, seed, p);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(4);  // one for each input of forward
    const at::Tensor& dy = grads[0];
    if (!dy.defined()) return result;
    const at::Tensor seed = ctx->get_saved_variables()[0];
    const double p = ctx->saved_data["p"].toDouble();
    if (ctx->needs_input_grad(0))
      result[0] = !seed.defined()              ? dy
                  : at::GradMode::is_enabled() ? DropoutAddBackward::apply(dy, seed, p)
                                               : dropout_add_backward(dy, seed, p);
    if (ctx->needs_input_grad(1)) result[1] = dy;
    return result;
  }
};

}  // namespace detail

// y = residual + mask * x / (1 - p), with gradients for both; no mask is stored.
//
// x, residual: (..., F), float32, float16, bfloat16, or float64 on the CPU, of one shape, dtype and device. p: the
// probability of dropping an element. Without training: residual + x. seed: two int64 on x's device that determine the
// mask; without them they are drawn from torch's default generator there. Equal seeds give equal masks, on the CPU, on
// CUDA and in Python.
//
// Input that does not fit throws an error that names op, argument, what was expected and what came.
inline at::Tensor dropout_add(const at::Tensor& x, const at::Tensor& residual, double p, bool training = true,
                              const std::optional<at::Tensor>& seed = std::nullopt) {
  if (!(p >= 0 && p <= 1))
    throw std::invalid_argument("dropout_add: p: expected a number in [0, 1], got " + std::to_string(p));
  std::optional<at::Tensor> drawn;
  if (training && p > 0)
    drawn =
        seed ? *seed : at::randint(std::numeric_limits<int64_t>::max(), {2}, at::device(x.device()).dtype(at::kLong));
  const double used = drawn ? p : 0.0;
  if (detail::has_derivative(x) || detail::has_derivative(residual))
    return detail::DropoutAdd::apply(x, residual, drawn, used);
  return detail::dropout_add_forward(x, residual, drawn, used);
}

}  // namespace warpsmith
