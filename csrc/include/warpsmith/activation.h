#pragma once
#include <cstddef>
#include <optional>
#include <stdexcept>
#include <string>

#include "warpsmith/detail/activation_ops.h"
#include "warpsmith/op.h"

// Activations with gradients: a function for each row of detail/activation_ops.h, and dropout_add.
namespace warpsmith {
namespace detail {

// Whether the gradients may be written over gate and up: contiguous tensors that lie apart.
inline bool may_overwrite(const c10::IValue& gate, const c10::IValue& up) {
  const auto plain = [](const c10::IValue& t) { return t.toTensor().is_contiguous() && !t.toTensor().is_neg(); };
  if (!plain(gate)) return false;
  if (up.isNone()) return true;
  const auto address = [](const c10::IValue& t) { return static_cast<const char*>(t.toTensor().const_data_ptr()); };
  const auto bytes = static_cast<std::ptrdiff_t>(gate.toTensor().nbytes());
  const std::ptrdiff_t apart = address(up) - address(gate);
  return plain(up) && (apart >= bytes || -apart >= bytes);
}

inline variable_list gated_gradients(const Op& op, Backward& b) {
  const bool inplace = b.arguments[2].toBool() && !at::GradMode::is_enabled();
  if (!inplace || !may_overwrite(b.arguments[0], b.arguments[1])) return raw_gradients(op, b);
  raw_gradients(op, b, *op.backward_inplace);
  variable_list result(2);
  for (size_t i = 0; i < 2; ++i)
    if (b.wanted[i]) {
      const at::Tensor written = b.arguments[i].toTensor();
      // As after torch's own in-place operations: a gradient that needs the old values is refused.
      if (!written.is_inference()) written.unsafeGetTensorImpl()->bump_version();
      result[i] = written.detach();
    }
  return result;
}

inline at::Tensor gated(const Op& op, Stack arguments) {
  if (arguments[2].toBool())
    for (size_t i = 0; i < 2; ++i)
      if (const c10::IValue& value = arguments[i]; value.isTensor() && at::GradMode::is_enabled())
        if (const at::Tensor& t = value.toTensor(); t.requires_grad() && t.is_leaf())
          throw std::invalid_argument(
              op.rule.name + (i ? ": up" : ": gate") +
              ": expected a computed tensor for inplace_backward, got a leaf that requires grad");
  return call(op, std::move(arguments))[0];
}

// The gradient of residual is the upstream gradient; so is that of x if nothing is dropped.
inline variable_list dropout_add_gradients(const Op& op, Backward& b) {
  const bool dropped = b.wanted[0] && !b.arguments[2].isNone();
  return {dropped ? raw_gradients(op, b)[0] : b.grads[0], b.grads[0]};
}

}  // namespace detail

// Gated, as swiglu: y = f(gate) * up, with gradients for both. Without up, gate holds [gate, up] along its last
// dimension, as one matrix product gives them, and has one gradient.
//
// gate: (..., F), or (..., 2F) without up; float32, float16, bfloat16, or float64 on the CPU. up: like gate.
// tanh (where the function has it): f is gelu's approximation by tanh.
// inplace_backward: the backward may write the gradients over gate and up, which are then lost, where they are
// contiguous and lie apart; none of them may be a leaf that requires a gradient.
#define WARPSMITH_FUNCTION_plain(op)                                                               \
  inline at::Tensor op(const at::Tensor& gate, const std::optional<at::Tensor>& up = std::nullopt, \
                       bool inplace_backward = false) {                                            \
    static const detail::Op raw({.name = #op, .gradients = detail::gated_gradients});              \
    return detail::gated(raw, {gate, up, inplace_backward});                                       \
  }
#define WARPSMITH_FUNCTION_tanh(op)                                                                                   \
  inline at::Tensor op(const at::Tensor& gate, const std::optional<at::Tensor>& up = std::nullopt, bool tanh = false, \
                       bool inplace_backward = false) {                                                               \
    static const detail::Op raw({.name = #op, .gradients = detail::gated_gradients});                                 \
    return detail::gated(raw, {gate, up, inplace_backward, tanh});                                                    \
  }
#define WARPSMITH_ROW(op, function, flag) WARPSMITH_FUNCTION_##flag(op)
WARPSMITH_GATED_OPS(WARPSMITH_ROW)
#undef WARPSMITH_FUNCTION_plain
#undef WARPSMITH_FUNCTION_tanh

// Biased, as bias_gelu: y = f(x + bias), with gradients for both. The sum is not rounded in between.
//
// x: (..., F), float32, float16, bfloat16, or float64 on the CPU. bias: (F,), the dtype of x, or float32 beside a
// 16-bit x. tanh (where the function has it): the approximation by tanh, or the exact function. Sums are float32
// (float64 for float64) in a fixed order: equal inputs give equal bits.
#define WARPSMITH_FUNCTION_plain(op)                                  \
  inline at::Tensor op(const at::Tensor& x, const at::Tensor& bias) { \
    static const detail::Op raw({.name = #op});                       \
    return detail::call(raw, {x, bias})[0];                           \
  }
#define WARPSMITH_FUNCTION_tanh(op)                                                      \
  inline at::Tensor op(const at::Tensor& x, const at::Tensor& bias, bool tanh = false) { \
    static const detail::Op raw({.name = #op});                                          \
    return detail::call(raw, {x, bias, tanh})[0];                                        \
  }
WARPSMITH_BIASED_OPS(WARPSMITH_ROW)
#undef WARPSMITH_FUNCTION_plain
#undef WARPSMITH_FUNCTION_tanh
#undef WARPSMITH_ROW

// relu_squared: y = f(x), with its gradient. x: (..., F), float32, float16, bfloat16, or float64 on the CPU.
#define WARPSMITH_ROW(op, function, flag)       \
  inline at::Tensor op(const at::Tensor& x) {   \
    static const detail::Op raw({.name = #op}); \
    return detail::call(raw, {x})[0];           \
  }
WARPSMITH_UNARY_OPS(WARPSMITH_ROW)
#undef WARPSMITH_ROW

// y = residual + mask * x / (1 - p), with gradients for both; no mask is stored.
//
// x, residual: (..., F), float32, float16, bfloat16, or float64 on the CPU, of one shape, dtype and device. p: the
// probability of dropping an element. Without training: residual + x. seed: two int64 on x's device that determine the
// mask; without them they are drawn from torch's default generator there. Equal seeds give equal masks, on the CPU, on
// CUDA and in Python.
inline at::Tensor dropout_add(const at::Tensor& x, const at::Tensor& residual, double p = 0.5, bool training = true,
                              const std::optional<at::Tensor>& seed = std::nullopt) {
  if (!(p >= 0 && p <= 1))
    throw std::invalid_argument("dropout_add: p: expected a number in [0, 1], got " + std::to_string(p));
  static const detail::Op op(
      {.name = "dropout_add", .gradients = detail::dropout_add_gradients, .inputs = {"residual"}});
  const auto drawn = detail::dropout_seed(x, p, training, seed);
  return detail::call(op, {x, residual, drawn, drawn ? p : 0.0})[0];
}

}  // namespace warpsmith
