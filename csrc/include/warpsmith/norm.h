#pragma once
#include <ATen/core/stack.h>
#include <torch/csrc/autograd/custom_function.h>

#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "warpsmith/detail/norm_ops.h"
#include "warpsmith/op.h"

// The norms with gradients, one function per row of detail/norm_ops.h.
//
// Bad input throws an error that names op, argument, what was expected and what was given.
namespace warpsmith {
namespace detail {

using OptionalTensor = std::optional<at::Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

inline bool has_derivative(const OptionalTensor& t) { return t && has_derivative(*t); }

#define WARPSMITH_ROW(op, layer, residual, dropout)                                 \
  struct op##_row {                                                                 \
    static constexpr const char* kName = #op;                                       \
    static constexpr bool kLayer = layer, kResidual = residual, kDropout = dropout; \
  };
WARPSMITH_NORM_OPS(WARPSMITH_ROW)
#undef WARPSMITH_ROW

// Calls an op of the library with the arguments of its schema. Returns its outputs, all tensors.
inline variable_list call_op(const c10::OperatorHandle& op, torch::jit::Stack arguments) {
  op.callBoxed(arguments);
  variable_list outputs;
  for (auto& value : arguments) outputs.push_back(std::move(value).toTensor());
  return outputs;
}

inline c10::OperatorHandle find_untyped_op(const std::string& name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
}

// Under create_graph: gradients whose own derivative, for the tensors they were computed from, is refused instead of
// silently zero. Those tensors are separate arguments, because torch sees no tensors inside a list.
struct RefuseDerivative : torch::autograd::Function<RefuseDerivative> {
  static variable_list forward(AutogradContext* ctx, const std::string& op, const variable_list& gradients,
                               const at::Tensor&, const OptionalTensor&, const at::Tensor&, const OptionalTensor&) {
    ctx->saved_data["op"] = op;
    return gradients;
  }

  static variable_list backward(AutogradContext* ctx, variable_list) {
    refuse_second_derivative(ctx->saved_data["op"].toStringRef());
  }
};

// An op that normalises x, or dropout(x) + residual. Op is its row. Inputs of the function: x, residual, weight, bias,
// seed (those that exist), then numbers.
template <class Op> struct Norm : torch::autograd::Function<Norm<Op>> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, const OptionalTensor& residual,
                               const OptionalTensor& weight, const OptionalTensor& bias, const OptionalTensor& seed,
                               double p, double eps, double weight_offset) {
    static const auto op = find_untyped_op(raw_name<Op>("_forward"));
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const variable_list out = call_op(op, arguments(x, residual, weight, bias, seed, p, eps, weight_offset));
    const at::Tensor none;
    const size_t outputs = Op::kResidual ? 2 : 1;
    ctx->save_for_backward({Op::kResidual ? out[1] : x, weight.value_or(none), bias.value_or(none),
                            Op::kLayer ? out[outputs] : none, out.back(), seed.value_or(none)});
    ctx->saved_data["p"] = p;
    ctx->saved_data["weight_offset"] = weight_offset;
    ctx->saved_data["dtype"] = x.scalar_type();
    ctx->set_materialize_grads(false);
    return {out.begin(), out.begin() + outputs};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &s = saved[0], &weight = saved[1], &bias = saved[2], &seed = saved[5];
    const at::Tensor dresidual_out = Op::kResidual ? grads[1] : at::Tensor();
    variable_list result(8);  // one per input of forward
    if (!grads[0].defined() && !dresidual_out.defined()) return result;
    const auto dtype = ctx->saved_data["dtype"].toScalarType();
    const at::Tensor dy = grads[0].defined() ? grads[0] : at::zeros_like(s, s.options().dtype(dtype));

    // Edges are numbered over the tensors that exist, in their order.
    bool wanted[4] = {};
    const bool there[4] = {true, Op::kResidual, weight.defined(), bias.defined()};
    for (size_t i = 0, edge = 0; i < 4; ++i)
      if (there[i]) wanted[i] = ctx->needs_input_grad(edge++);
    torch::jit::Stack stack{dy};
    if (Op::kResidual) stack.emplace_back(optional(dresidual_out));
    stack.insert(stack.end(), {s, optional(weight)});
    if (Op::kLayer) stack.insert(stack.end(), {optional(bias), saved[3]});
    stack.emplace_back(saved[4]);
    if (Op::kDropout) stack.insert(stack.end(), {optional(seed), ctx->saved_data["p"]});
    if (!Op::kLayer) stack.emplace_back(ctx->saved_data["weight_offset"]);
    for (size_t i = 0; i < 4; ++i)
      if ((i != 1 || Op::kResidual) && (i != 3 || Op::kLayer)) stack.emplace_back(wanted[i]);

    static const auto op = find_untyped_op(raw_name<Op>("_backward"));
    variable_list found;
    {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      found = call_op(op, std::move(stack));
    }
    // dx stands for dresidual too if neither dropout nor dtype tells them apart.
    const bool shared = Op::kResidual && !seed.defined() && s.scalar_type() == dtype;
    variable_list gradients;
    for (size_t i = 0, at = 0; i < 4; ++i) {
      if ((i == 1 && !Op::kResidual) || (i == 3 && !Op::kLayer)) continue;
      const at::Tensor& gradient = found[i == 1 && shared ? 0 : at];
      if (wanted[i]) gradients.push_back(gradient);
      ++at;
    }
    if (at::GradMode::is_enabled())
      gradients =
          RefuseDerivative::apply(std::string(Op::kName), gradients, dy, optional(dresidual_out), s, optional(weight));
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
    static const auto op = find_untyped_op(raw_name<Op>("_inference"));
    return call_op(op, arguments(x, residual, weight, bias, seed, p, eps, weight_offset));
  }

 private:
  static OptionalTensor optional(const at::Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }

  static torch::jit::Stack arguments(const at::Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                                     const OptionalTensor& bias, const OptionalTensor& seed, double p, double eps,
                                     double weight_offset) {
    torch::jit::Stack stack{x};
    if (Op::kResidual) stack.emplace_back(residual);
    stack.emplace_back(weight);
    if (Op::kLayer) stack.emplace_back(bias);
    if (Op::kDropout) stack.insert(stack.end(), {seed, p});
    stack.emplace_back(eps);
    if (!Op::kLayer) stack.emplace_back(weight_offset);
    return stack;
  }
};

// The seed of a call with dropout: the caller's, or one drawn from torch's generator as the Python function does.
inline OptionalTensor dropout_seed(const at::Tensor& x, double p, bool training, const OptionalTensor& seed) {
  if (!training || p == 0) return std::nullopt;
  if (seed || !(p > 0 && p <= 1)) return seed;  // the op refuses what is no probability
  return at::randint(std::numeric_limits<int64_t>::max(), {2}, x.options().dtype(at::kLong));
}

inline std::tuple<at::Tensor, at::Tensor> pair(const variable_list& outputs) { return {outputs[0], outputs[1]}; }

}  // namespace detail

// With s = x, s = x + residual (add_*) or s = dropout(x) + residual (dropout_add_*), over the last dimension:
//
//   rms_norm:    y = s / sqrt(mean(s^2) + eps) * (weight + weight_offset)
//   layer_norm:  y = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias
//
// Returns y, or with a residual {y, residual_out}, residual_out = s. All outputs have gradients for x, residual, weight
// and bias.
//
// x: (..., D), float32, float16, bfloat16, or float64 on the CPU. residual: like x, or float32 beside a 16-bit x.
// weight, bias: (D,), both of the dtype of x, or both float32 beside a 16-bit x. weight_offset: 1.0 for weights stored
// around zero. eps: >= 0; an RMS norm without one takes the machine epsilon of float32 (float64 for float64).
// p: the probability that an element of x is dropped; the others are multiplied by 1 / (1 - p). The mask is never
// stored. Without `training` nothing is dropped. seed: int64, (2,), on the device of x; without one it is drawn from
// torch's generator.
//
// Sums are float32 (float64 for float64) in a fixed order: equal inputs give equal bits.
inline at::Tensor rms_norm(const at::Tensor& x, const std::optional<at::Tensor>& weight = std::nullopt,
                           std::optional<double> eps = std::nullopt, double weight_offset = 0.0) {
  return detail::Norm<detail::rms_norm_row>::run(x, std::nullopt, weight, std::nullopt, std::nullopt, 0.0,
                                                 detail::epsilon_of(x, eps), weight_offset)[0];
}

inline at::Tensor layer_norm(const at::Tensor& x, const std::optional<at::Tensor>& weight = std::nullopt,
                             const std::optional<at::Tensor>& bias = std::nullopt, double eps = 1e-5) {
  return detail::Norm<detail::layer_norm_row>::run(x, std::nullopt, weight, bias, std::nullopt, 0.0, eps, 0.0)[0];
}

inline std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                                                       const std::optional<at::Tensor>& weight = std::nullopt,
                                                       std::optional<double> eps = std::nullopt,
                                                       double weight_offset = 0.0) {
  return detail::pair(detail::Norm<detail::add_rms_norm_row>::run(x, residual, weight, std::nullopt, std::nullopt, 0.0,
                                                                  detail::epsilon_of(x, eps), weight_offset));
}

inline std::tuple<at::Tensor, at::Tensor> add_layer_norm(const at::Tensor& x, const at::Tensor& residual,
                                                         const std::optional<at::Tensor>& weight = std::nullopt,
                                                         const std::optional<at::Tensor>& bias = std::nullopt,
                                                         double eps = 1e-5) {
  return detail::pair(
      detail::Norm<detail::add_layer_norm_row>::run(x, residual, weight, bias, std::nullopt, 0.0, eps, 0.0));
}

inline std::tuple<at::Tensor, at::Tensor> dropout_add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                                                               const std::optional<at::Tensor>& weight = std::nullopt,
                                                               double p = 0.5, std::optional<double> eps = std::nullopt,
                                                               bool training = true, double weight_offset = 0.0,
                                                               const std::optional<at::Tensor>& seed = std::nullopt) {
  return detail::pair(detail::Norm<detail::dropout_add_rms_norm_row>::run(x, residual, weight, std::nullopt,
                                                                          detail::dropout_seed(x, p, training, seed), p,
                                                                          detail::epsilon_of(x, eps), weight_offset));
}

inline std::tuple<at::Tensor, at::Tensor> dropout_add_layer_norm(const at::Tensor& x, const at::Tensor& residual,
                                                                 const std::optional<at::Tensor>& weight = std::nullopt,
                                                                 const std::optional<at::Tensor>& bias = std::nullopt,
                                                                 double p = 0.5, double eps = 1e-5,
                                                                 bool training = true,
                                                                 const std::optional<at::Tensor>& seed = std::nullopt) {
  return detail::pair(detail::Norm<detail::dropout_add_layer_norm_row>::run(
      x, residual, weight, bias, detail::dropout_seed(x, p, training, seed), p, eps, 0.0));
}

}  // namespace warpsmith
