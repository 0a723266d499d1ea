#pragma once
#include <ATen/ops/randint.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "warpsmith/detail/activation_ops.h"
#include "warpsmith/op.h"

// Activations with gradients: a function for each row of detail/activation_ops.h, and dropout_add.
//
// Input that does not fit throws an error that names op, argument, what was expected and what came.
namespace warpsmith {
namespace detail {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Op: kName, and kTanh, whether its raw ops take the flag `tanh` last.
#define WARPSMITH_TANH_plain false
#define WARPSMITH_TANH_tanh true
#define WARPSMITH_ROW(op, function, flag)                \
  struct op##_row {                                      \
    static constexpr const char* kName = #op;            \
    static constexpr bool kTanh = WARPSMITH_TANH_##flag; \
  };
WARPSMITH_GATED_OPS(WARPSMITH_ROW)
WARPSMITH_BIASED_OPS(WARPSMITH_ROW)
WARPSMITH_UNARY_OPS(WARPSMITH_ROW)
#undef WARPSMITH_ROW

// ---- gated

template <class Op, class... Tanh>
at::Tensor gated_forward_with(const at::Tensor& gate, const std::optional<at::Tensor>& up, Tanh... tanh) {
  using Signature = at::Tensor(const at::Tensor&, const std::optional<at::Tensor>&, bool, Tanh...);
  static const auto op = find_op<Signature>(raw_name<Op>("_forward").c_str());
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return op.call(gate, up, false, tanh...);
}

template <class Op, class... Tanh> variable_list gated_backward_with(const at::Tensor& dy, const at::Tensor& gate,
                                                                     const std::optional<at::Tensor>& up,
                                                                     bool want_dgate, bool want_dup, Tanh... tanh) {
  using Signature = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&,
                                                       const std::optional<at::Tensor>&, bool, bool, Tanh...);
  static const auto op = find_op<Signature>(raw_name<Op>("_backward").c_str());
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto [dgate, dup] = op.call(dy, gate, up, want_dgate, want_dup, tanh...);
  return {std::move(dgate), std::move(dup)};
}

template <class Op, class... Tanh> void gated_backward_inplace_with(const at::Tensor& dy, const at::Tensor& gate,
                                                                    const std::optional<at::Tensor>& up,
                                                                    bool want_dgate, bool want_dup, Tanh... tanh) {
  using Signature = void(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, bool, bool, Tanh...);
  static const auto op = find_op<Signature>(raw_name<Op>("_backward_").c_str());
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

  static variable_list backward(AutogradContext*, variable_list) { refuse_second_derivative(Op::kName); }
};

// Whether the gradients may be written over the inputs: contiguous tensors that lie apart.
inline bool may_overwrite(const at::Tensor& gate, const std::optional<at::Tensor>& up) {
  if (!gate.is_contiguous() || gate.is_neg() || (up && up->is_neg())) return false;
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

// ---- biased

template <class Op, class... Tanh>
at::Tensor biased_forward_with(const at::Tensor& x, const at::Tensor& bias, Tanh... tanh) {
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, Tanh...);
  static const auto op = find_op<Signature>(raw_name<Op>("_forward").c_str());
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return op.call(x, bias, tanh...);
}

template <class Op, class... Tanh> variable_list biased_backward_with(const at::Tensor& dy, const at::Tensor& x,
                                                                      const at::Tensor& bias, bool want_dx,
                                                                      bool want_dbias, Tanh... tanh) {
  using Signature =
      std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&, bool, bool, Tanh...);
  static const auto op = find_op<Signature>(raw_name<Op>("_backward").c_str());
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

  static variable_list backward(AutogradContext*, variable_list) { refuse_second_derivative(Op::kName); }
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

// ---- unary

template <class Op> at::Tensor unary_forward(const at::Tensor& x) {
  static const auto op = find_op<at::Tensor(const at::Tensor&)>(raw_name<Op>("_forward").c_str());
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return op.call(x);
}

template <class Op> at::Tensor unary_backward(const at::Tensor& dy, const at::Tensor& x) {
  static const auto op = find_op<at::Tensor(const at::Tensor&, const at::Tensor&)>(raw_name<Op>("_backward").c_str());
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return op.call(dy, x);
}

// The gradient as a function of its own, for create_graph alone: its derivative is refused, never silently zero.
template <class Op> struct UnaryBackward : torch::autograd::Function<UnaryBackward<Op>> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& dy, const at::Tensor& x) {
    return unary_backward<Op>(dy, x);
  }

  static variable_list backward(AutogradContext*, variable_list) {
    throw std::runtime_error("relu_squared: second derivatives are not available in C++; the Python function has them");
  }
};

template <class Op> struct Unary : torch::autograd::Function<Unary<Op>> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x) {
    ctx->save_for_backward({x});
    ctx->set_materialize_grads(false);
    return unary_forward<Op>(x);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    if (!grads[0].defined()) return {at::Tensor()};
    const at::Tensor x = ctx->get_saved_variables()[0];
    return {at::GradMode::is_enabled() ? UnaryBackward<Op>::apply(grads[0], x) : unary_backward<Op>(grads[0], x)};
  }
};

// ---- dropout_add

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
    return detail::gated<detail::op##_row>(gate, up, false, inplace_backward);                     \
  }
#define WARPSMITH_FUNCTION_tanh(op)                                                                                   \
  inline at::Tensor op(const at::Tensor& gate, const std::optional<at::Tensor>& up = std::nullopt, bool tanh = false, \
                       bool inplace_backward = false) {                                                               \
    return detail::gated<detail::op##_row>(gate, up, tanh, inplace_backward);                                         \
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
    return detail::biased<detail::op##_row>(x, bias, false);          \
  }
#define WARPSMITH_FUNCTION_tanh(op)                                                      \
  inline at::Tensor op(const at::Tensor& x, const at::Tensor& bias, bool tanh = false) { \
    return detail::biased<detail::op##_row>(x, bias, tanh);                              \
  }
WARPSMITH_BIASED_OPS(WARPSMITH_ROW)
#undef WARPSMITH_FUNCTION_plain
#undef WARPSMITH_FUNCTION_tanh
#undef WARPSMITH_ROW

// relu_squared: y = f(x), with its gradient. x: (..., F), float32, float16, bfloat16, or float64 on the CPU.
#define WARPSMITH_ROW(op, function, flag)                                                            \
  inline at::Tensor op(const at::Tensor& x) {                                                        \
    using Row = detail::op##_row;                                                                    \
    return detail::has_derivative(x) ? detail::Unary<Row>::apply(x) : detail::unary_forward<Row>(x); \
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
