#pragma once
#include <torch/csrc/autograd/custom_function.h>

#include <limits>
#include <optional>
#include <stdexcept>
#include <tuple>

#include "warpsmith/op.h"

namespace warpsmith {
namespace detail {

using OptionalTensor = std::optional<at::Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// {dx, dweight}; what is not wanted has no elements.
inline variable_list rms_norm_backward(const at::Tensor& dy, const at::Tensor& x, const OptionalTensor& weight,
                                       const at::Tensor& rstd, double weight_offset, bool want_dx, bool want_dweight) {
  using Signature = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                                                       const at::Tensor&, double, bool, bool);
  static const auto op = find_op<Signature>("warpsmith::rms_norm_backward");
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto [dx, dweight] = op.call(dy, x, weight, rstd, weight_offset, want_dx, want_dweight);
  return {std::move(dx), std::move(dweight)};
}

// The gradients as a function of their own, for create_graph alone: their derivative is refused, never silently zero.
struct RmsNormBackward : torch::autograd::Function<RmsNormBackward> {
  static variable_list forward(AutogradContext*, const at::Tensor& dy, const at::Tensor& x,
                               const OptionalTensor& weight, const at::Tensor& rstd, double weight_offset, bool want_dx,
                               bool want_dweight) {
    return rms_norm_backward(dy, x, weight, rstd, weight_offset, want_dx, want_dweight);
  }

  static variable_list backward(AutogradContext*, variable_list) {
    throw std::runtime_error("rms_norm: second derivatives are not available in C++; the Python function has them");
  }
};

struct RmsNorm : torch::autograd::Function<RmsNorm> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const OptionalTensor& weight, double eps,
                            double weight_offset) {
    using Signature = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const OptionalTensor&, double, double);
    static const auto op = find_op<Signature>("warpsmith::rms_norm_forward");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto [y, rstd] = op.call(x, weight, eps, weight_offset);
    ctx->save_for_backward({x, weight.value_or(at::Tensor()), rstd});
    ctx->saved_data["weight_offset"] = weight_offset;
    ctx->set_materialize_grads(false);
    return y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(4);  // one for each input of forward
    const at::Tensor& dy = grads[0];
    if (!dy.defined()) return result;
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &rstd = saved[2];
    const OptionalTensor weight = saved[1].defined() ? OptionalTensor(saved[1]) : std::nullopt;
    const double weight_offset = ctx->saved_data["weight_offset"].toDouble();
    // Edges count tensors: the weight's is the second one, where there is a weight.
    const bool want_dx = ctx->needs_input_grad(0), want_dweight = weight && ctx->needs_input_grad(1);
    const variable_list g = at::GradMode::is_enabled()
                                ? RmsNormBackward::apply(dy, x, weight, rstd, weight_offset, want_dx, want_dweight)
                                : rms_norm_backward(dy, x, weight, rstd, weight_offset, want_dx, want_dweight);
    if (want_dx) result[0] = g[0];
    if (want_dweight) result[1] = g[1];
    return result;
  }
};

}  // namespace detail

// y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset) over the last dimension, with gradients for x and weight.
//
// x: (..., D), float32, float16, bfloat16, or float64 on the CPU. weight: (D,), the dtype of x, or float32 beside a
// 16-bit x. eps: >= 0; without one the machine epsilon of float32 (float64 for float64). weight_offset: 1.0 for weights
// stored around zero. Sums are float32 (float64 for float64) in a fixed order: equal inputs give equal bits.
//
// Input that does not fit throws an error that names op, argument, what was expected and what came.
inline at::Tensor rms_norm(const at::Tensor& x, const std::optional<at::Tensor>& weight = std::nullopt,
                           std::optional<double> eps = std::nullopt, double weight_offset = 0.0) {
  const double added = eps                              ? *eps
                       : x.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon()
                                                        : std::numeric_limits<float>::epsilon();
  if (detail::has_derivative(x) || (weight && detail::has_derivative(*weight)))
    return detail::RmsNorm::apply(x, weight, added, weight_offset);
  using Signature = at::Tensor(const at::Tensor&, const std::optional<at::Tensor>&, double, double);
  static const auto op = detail::find_op<Signature>("warpsmith::rms_norm_inference");
  return op.call(x, weight, added, weight_offset);
}

}  // namespace warpsmith
