#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "warpsmith/detail/linear_ops.h"
#include "warpsmith/op.h"

// Linear layers with what stands behind them, each one step of autograd.
//
// x: (..., K), float32, float16, bfloat16, or float64 on the CPU; any strides. Weights: (N, K), the dtype of x; they
// may lie transposed, and their gradients then do. Biases: (N,), the dtype of x, or float32 beside a 16-bit x.
namespace warpsmith {

// By their numbers in the schemas.
enum class Activation : int64_t {
  none,
#define WARPSMITH_ROW(activation, ...) activation,
  WARPSMITH_LINEAR_ACTIVATIONS(WARPSMITH_ROW)
#undef WARPSMITH_ROW
};

namespace detail {

// The gradient of residual is the upstream one. Of relu the forward keeps its output.
inline variable_list linear_gradients(const Op& op, Backward& b) {
  constexpr size_t kResidual = 1;
  if (b.outputs[0].defined()) b.outputs[1] = b.outputs[0];
  variable_list result = raw_gradients(op, b);
  result.push_back(b.wanted[kResidual] ? b.grads[0] : at::Tensor());
  return result;
}

struct ScaledFlag {
#define WARPSMITH_ROW(flag, bit) static constexpr int64_t flag = bit;
  WARPSMITH_SCALED_FLAGS(WARPSMITH_ROW)
#undef WARPSMITH_ROW
};

// The weight's gradient is of the bytes of x that the forward made; of x itself by blocks and where it was not cast.
inline variable_list scaled_linear_gradients(const Op& op, Backward& b) {
  constexpr size_t kData = 6, kOptions = 8, kNewData = 3;  // of the forward's arguments, of its outputs
  constexpr int64_t kBlock = 2;
  const int64_t options = b.arguments[kOptions].toInt();
  if ((options & 3) != kBlock && !(options & ScaledFlag::wgrad_high))
    for (const size_t i : {0, 1}) b.arguments[kData + i] = b.outputs[kNewData + i];
  return raw_gradients(op, b);
}

inline variable_list matmul_symmetric_gradients(const Op&, Backward& b) {
  return {at::matmul(b.grads[0].add(b.grads[0].mT()), b.arguments[0].toTensor())};
}

}  // namespace detail

// y = f(x @ weight^T + bias) + residual, with gradients for x, weight, bias and residual. residual: of the shape and
// dtype of y. batch_invariant: the bits of a row depend on no other; refused where our Hopper products cannot run.
inline at::Tensor linear(const at::Tensor& x, const at::Tensor& weight,
                         const std::optional<at::Tensor>& bias = std::nullopt, Activation activation = Activation::none,
                         const std::optional<at::Tensor>& residual = std::nullopt, bool batch_invariant = false) {
  using detail::Op;
  const auto rule = [](std::vector<std::string> saved) {
    return detail::OpRule{.name = "linear",
                          .gradients = detail::linear_gradients,
                          .inputs = {"residual"},
                          .saved = std::move(saved),
                          .constants = {{"dweight_dtype", c10::IValue()}}};
  };
  static const Op op(rule({})), of_relu(rule({"y"}));
  const bool keeps_output = activation == Activation::relu && !detail::is_given(residual);
  return detail::call(keeps_output ? of_relu : op, {x, residual, weight, bias, /*main_grad=*/std::nullopt,
                                                    static_cast<int64_t>(activation), batch_invariant})[0];
}

// y = f(x @ w1^T + b1) @ w2^T + b2, with gradients for all five. f must be an activation.
inline at::Tensor mlp(const at::Tensor& x, const at::Tensor& w1, const std::optional<at::Tensor>& b1,
                      const at::Tensor& w2, const std::optional<at::Tensor>& b2,
                      Activation activation = Activation::gelu_tanh) {
  static const detail::Op op({.name = "mlp"});
  return detail::call(op, {x, w1, b1, w2, b2, static_cast<int64_t>(activation)})[0];
}

// y = f(x @ gate_weight^T + gate_bias) * (x @ up_weight^T + up_bias), with gradients for all five. f must be an
// activation.
inline at::Tensor gated_linear(const at::Tensor& x, const at::Tensor& gate_weight, const at::Tensor& up_weight,
                               const std::optional<at::Tensor>& gate_bias = std::nullopt,
                               const std::optional<at::Tensor>& up_bias = std::nullopt,
                               Activation activation = Activation::silu) {
  static const detail::Op op({.name = "gated_linear"});
  return detail::call(op, {x, gate_weight, up_weight, gate_bias, up_bias, /*gate_main_grad=*/std::nullopt,
                           /*up_main_grad=*/std::nullopt, static_cast<int64_t>(activation)})[0];
}

// How scaled_linear casts its factors. The numbers are those of the schemas.
struct ScaledLinearOptions {
  enum class Scaling : int64_t { row, tensor, block } scaling = Scaling::row;
  enum class Accumulate : int64_t { automatic, fast, float32 } accumulate = Accumulate::automatic;  // on a card
  bool grad_e5m2 = false;   // the gradient in float8_e5m2
  bool wgrad_high = false;  // the weight's gradient of what was not cast
  bool power_of_two = true;
  bool emulate = false;  // products in float32 on a card too
};

// y = x @ weight^T + bias by products of 8-bit floats, with gradients for all three. Not for float64; K and N are
// multiples of 16; weight and bias may be float32 beside a 16-bit x. Each call casts the weight.
inline at::Tensor scaled_linear(const at::Tensor& x, const at::Tensor& weight,
                                const std::optional<at::Tensor>& bias = std::nullopt,
                                const ScaledLinearOptions& options = {}) {
  static const detail::Op op({.name = "scaled_linear",
                              .gradients = detail::scaled_linear_gradients,
                              .saved = {"new_data", "new_scale"},
                              .constants = {{"turned", c10::IValue()},
                                            {"turned_scale", c10::IValue()},
                                            {"x_turned", c10::IValue()},
                                            {"x_turned_scale", c10::IValue()},
                                            {"sum", c10::IValue()}},
                              .python_has_second_derivatives = false});
  const c10::IValue none;
  int64_t bits = static_cast<int64_t>(options.scaling) + 4 * static_cast<int64_t>(options.accumulate);
  if (options.grad_e5m2) bits += detail::ScaledFlag::grad_e5m2;
  if (options.wgrad_high) bits += detail::ScaledFlag::wgrad_high;
  if (options.power_of_two) bits += detail::ScaledFlag::power_of_two;
  if (options.emulate) bits += detail::ScaledFlag::emulate;
  return detail::call(op, {x, weight, bias, none, none, none, none, none, bits, none, none, none})[0];
}

// y = x @ x^T over the last two dimensions, symmetric bit for bit.
inline at::Tensor matmul_symmetric(const at::Tensor& x) {
  static const detail::Op op({.name = "matmul_symmetric",
                              .forward = "matmul_symmetric",
                              .gradients = detail::matmul_symmetric_gradients,
                              .inputs = {"x"},
                              .saved = {"x"}});
  return detail::call(op, {x})[0];
}

}  // namespace warpsmith
