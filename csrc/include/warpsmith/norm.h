#pragma once
#include <ATen/core/stack.h>
#include <torch/csrc/autograd/custom_function.h>

#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "warpsmith/op.h"

// What the functions of the norm family share. Not for direct use.
namespace warpsmith::detail {

using OptionalTensor = std::optional<at::Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

inline bool has_derivative(const OptionalTensor& t) { return t && has_derivative(*t); }

// An op of the library with arguments as its schema has them; gives its outputs, all of which are tensors.
inline variable_list call_op(const c10::OperatorHandle& op, torch::jit::Stack arguments) {
  op.callBoxed(arguments);
  variable_list outputs;
  for (auto& value : arguments) outputs.push_back(std::move(value).toTensor());
  return outputs;
}

inline c10::OperatorHandle find_untyped_op(const std::string& name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
}

// Under create_graph: gradients whose own derivative, for the tensors that they were made of, is refused, never
// silently zero. Those tensors are arguments one by one: torch sees none inside a list.
struct RefuseDerivative : torch::autograd::Function<RefuseDerivative> {
  static variable_list forward(AutogradContext* ctx, const std::string& op, const variable_list& gradients,
                               const at::Tensor&, const OptionalTensor&, const at::Tensor&, const OptionalTensor&) {
    ctx->saved_data["op"] = op;
    return gradients;
  }

  static variable_list backward(AutogradContext* ctx, variable_list) {
    throw std::runtime_error(ctx->saved_data["op"].toStringRef() +
                             ": second derivatives are not available in C++; the Python "
                             "function has them");
  }
};

// An op of the family that normalises x, or dropout(x) + residual: `Op` names it, lists its arguments, and says what it
// has. Inputs of the function: x, residual, weight, bias, seed (those that are there), then numbers.
template <class Op> struct Norm : torch::autograd::Function<Norm<Op>> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, const OptionalTensor& residual,
                               const OptionalTensor& weight, const OptionalTensor& bias, const OptionalTensor& seed,
                               double p, double eps, double weight_offset) {
    static const auto op = find_untyped_op(std::string("warpsmith::") + Op::name + "_forward");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const variable_list out = call_op(op, arguments(x, residual, weight, bias, seed, p, eps, weight_offset));
    const at::Tensor none;
    const size_t outputs = Op::residual ? 2 : 1;
    ctx->save_for_backward({Op::residual ? out[1] : x, weight.value_or(none), bias.value_or(none),
                            Op::layer ? out[outputs] : none, out.back(), seed.value_or(none)});
    ctx->saved_data["p"] = p;
    ctx->saved_data["weight_offset"] = weight_offset;
    ctx->saved_data["dtype"] = x.scalar_type();
    ctx->set_materialize_grads(false);
    return {out.begin(), out.begin() + outputs};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &s = saved[0], &weight = saved[1], &bias = saved[2], &seed = saved[5];
    const at::Tensor dresidual_out = Op::residual ? grads[1] : at::Tensor();
    variable_list result(8);  // one for each input of forward
    if (!grads[0].defined() && !dresidual_out.defined()) return result;
    const auto dtype = ctx->saved_data["dtype"].toScalarType();
    const at::Tensor dy = grads[0].defined() ? grads[0] : at::zeros_like(s, s.options().dtype(dtype));

    // Edges count tensors: those that are there, in their order.
    bool wanted[4] = {};
    const bool there[4] = {true, Op::residual, weight.defined(), bias.defined()};
    for (size_t i = 0, edge = 0; i < 4; ++i)
      if (there[i]) wanted[i] = ctx->needs_input_grad(edge++);
    torch::jit::Stack stack{dy};
    if (Op::residual) stack.emplace_back(optional(dresidual_out));
    stack.insert(stack.end(), {s, optional(weight)});
    if (Op::layer) stack.insert(stack.end(), {optional(bias), saved[3]});
    stack.emplace_back(saved[4]);
    if (Op::dropout) stack.insert(stack.end(), {optional(seed), ctx->saved_data["p"]});
    if (!Op::layer) stack.emplace_back(ctx->saved_data["weight_offset"]);
    for (size_t i = 0; i < 4; ++i)
      if ((i != 1 || Op::residual) && (i != 3 || Op::layer)) stack.emplace_back(wanted[i]);

    static const auto op = find_untyped_op(std::string("warpsmith::") + Op::name + "_backward");
    variable_list found;
    {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      found = call_op(op, std::move(stack));
    }
    // dx stands for both where no dropout and no dtype tells them apart.
    const bool shared = Op::residual && !seed.defined() && s.scalar_type() == dtype;
    variable_list gradients;
    for (size_t i = 0, at = 0; i < 4; ++i) {
      if ((i == 1 && !Op::residual) || (i == 3 && !Op::layer)) continue;
      const at::Tensor& gradient = found[i == 1 && shared ? 0 : at];
      if (wanted[i]) gradients.push_back(gradient);
      ++at;
    }
    if (at::GradMode::is_enabled())
      gradients =
          RefuseDerivative::apply(std::string(Op::name), gradients, dy, optional(dresidual_out), s, optional(weight));
    for (size_t i = 0, next = 0; i < 4; ++i)
      if (wanted[i]) result[i] = gradients[next++];
    return result;
  }

  // The outputs without the statistics: y, or y and residual_out.
  static variable_list run(const at::Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                           const OptionalTensor& bias, const OptionalTensor& seed, double p, double eps,
                           double weight_offset) {
    if (has_derivative(x) || has_derivative(residual) || has_derivative(weight) || has_derivative(bias))
      return Norm::apply(x, residual, weight, bias, seed, p, eps, weight_offset);
    static const auto op = find_untyped_op(std::string("warpsmith::") + Op::name + "_inference");
    return call_op(op, arguments(x, residual, weight, bias, seed, p, eps, weight_offset));
  }

 private:
  static OptionalTensor optional(const at::Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }

  static torch::jit::Stack arguments(const at::Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                                     const OptionalTensor& bias, const OptionalTensor& seed, double p, double eps,
                                     double weight_offset) {
    torch::jit::Stack stack{x};
    if (Op::residual) stack.emplace_back(residual);
    stack.emplace_back(weight);
    if (Op::layer) stack.emplace_back(bias);
    if (Op::dropout) stack.insert(stack.end(), {seed, p});
    stack.emplace_back(eps);
    if (!Op::layer) stack.emplace_back(weight_offset);
    return stack;
  }
};

// The seed of a call with dropout: the caller's, or one drawn from torch's generator as the Python function draws it.
inline OptionalTensor dropout_seed(const at::Tensor& x, double p, bool training, const OptionalTensor& seed) {
  if (!training || p == 0) return std::nullopt;
  if (seed || !(p > 0 && p <= 1)) return seed;  // the op refuses what is no probability
  return at::randint(std::numeric_limits<int64_t>::max(), {2}, x.options().dtype(at::kLong));
}

}  // namespace warpsmith::detail
