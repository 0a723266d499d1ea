#include "bindings/support/linear.h"

#include "bindings/support/library.h"
#include "kernels/linear/own_product.h"

// The bindings of linear, mlp and gated_linear: checks, outputs, and the order of the steps. A result that is not
// wanted has zero elements.
namespace warpsmith {
namespace {

void check_main_grad(const char* op, const OptionalTensor& main_grad, const Layer& layer, Dtype dtype,
                     const char* argument = "main_grad") {
  if (!main_grad) return;
  check_tensor(op, argument, *main_grad, real_dtype(dtype), {layer.out, layer.in}, layer.weight);
  if (!main_grad->is_contiguous() && !transposed(*main_grad).is_contiguous())
    refuse(op, argument, "a contiguous tensor or its transpose", "other strides");
}

void check_main_grads(const char* op, const OptionalTensor& gate_main_grad, const OptionalTensor& up_main_grad,
                      const Layer& gate, const Layer& up, Dtype dtype) {
  check_main_grad(op, gate_main_grad, gate, dtype, "main_grads[0]");
  check_main_grad(op, up_main_grad, up, dtype, "main_grads[1]");
}

// What a forward starts from: x, of at least one dimension, and its dtype.
Dtype check_x(const char* op, const Tensor& x) {
  const Dtype dtype = float_dtype(op, "x", x);
  if (x.dim() == 0) refuse(op, "x", "at least one dimension", "a tensor without dimensions");
  return dtype;
}

// What a backward starts from: the upstream gradient, whose dtype is that of all that follows.
Dtype check_dy(const char* op, const Tensor& dy) {
  const Dtype dtype = float_dtype(op, "dy", dy);
  if (dy.dim() == 0) refuse(op, "dy", "at least one dimension", "a tensor without dimensions");
  return dtype;
}

int64_t last(const Tensor& t) { return t.size(t.dim() - 1); }

// A new tensor with the leading dimensions of `like`, and the same as a matrix.
struct New {
  Tensor any;
  Tensor rows;

  New(const char* op, const char* argument, const Tensor& like, int64_t columns)
      : any(allocate_rows(op, argument, like, columns)), rows(as_rows_matrix(any, count(like), columns)) {}
  static int64_t count(const Tensor& like) {
    int64_t rows = 1;
    for (int64_t i = 0; i + 1 < like.dim(); ++i) rows *= like.size(i);
    return rows;
  }
};

Tensor nothing_like(const char* op, const Tensor& like) { return nothing(op, dtype_code(like), like); }

// Five gradients that are not wanted so far, each a tensor of its own: no two results may be one.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> five_of_nothing(const char* op, const Tensor& like) {
  return {nothing_like(op, like), nothing_like(op, like), nothing_like(op, like), nothing_like(op, like),
          nothing_like(op, like)};
}

// ---- linear: y = f(x weight^T + bias) + residual

// `keep`: the backward's needs are returned beside y: the pre-activation, but nothing without an activation, nor for
// relu, whose derivative y tells too unless a residual is added.
std::tuple<Tensor, Tensor> linear(const Tensor& x_any, const OptionalTensor& residual_any, const Tensor& weight,
                                  const OptionalTensor& bias, const OptionalTensor& main_grad, int64_t number,
                                  bool keep, bool invariant) {
  const char* op = name(LinearOp::linear);
  const Dtype dtype = check_x(op, x_any);
  const Layer layer = check_layer(op, x_any, dtype, last(x_any), "weight", weight, "bias", bias);
  if (residual_any) check_rows(op, "residual", *residual_any, x_any, layer.out, dtype);
  check_main_grad(op, main_grad, layer, dtype);
  const LinearActivation activation = check_activation(op, number, /*none_allowed=*/true);
  const bool plain = activation == LinearActivation::none;
  const bool keeps = keep && !plain && (activation != LinearActivation::relu || residual_any);

  const OnDeviceOf device(x_any);
  const Tensor x = invariant ? adjacent_rows(op, "x", x_any) : rows_of(op, "x", x_any);
  const New y(op, "y", x_any, layer.out);
  std::optional<New> z;
  if (keeps) z.emplace(op, "pre-activation", x_any, layer.out);
  OptionalTensor residual;
  if (residual_any) residual = adjacent_rows(op, "residual", *residual_any);
  if (residual && plain && project_with_residual(op, layer, x, y.rows, *residual, invariant)) {
    // in one product
  } else if (residual && plain && !bias) {
    project(op, layer, x, y.rows, residual);
  } else {
    project_and_activate(op, layer, activation, x, y.rows, z ? OptionalTensor(z->rows) : std::nullopt, dtype,
                         invariant);
    if (residual) add_residual(op, y.rows, *residual, dtype);
  }
  return {y.any, z ? z->any : nothing_like(op, x_any)};
}

std::tuple<Tensor, Tensor> linear_forward(Tensor x, OptionalTensor residual, Tensor weight, OptionalTensor bias,
                                          OptionalTensor main_grad, int64_t activation, bool batch_invariant) {
  return linear(x, residual, weight, bias, main_grad, activation, true, batch_invariant);
}

Tensor linear_inference(Tensor x, OptionalTensor residual, Tensor weight, OptionalTensor bias, OptionalTensor main_grad,
                        int64_t activation, bool batch_invariant) {
  return std::get<0>(linear(x, residual, weight, bias, main_grad, activation, false, batch_invariant));
}

struct LinearGradients {
  OptionalTensor x, weight, bias;  // those that are wanted
};

// z: what the forward kept, or for relu its output.
LinearGradients linear_backward_into(const char* op, const Tensor& dy_any, const OptionalTensor& x_any,
                                     const Tensor& weight, const OptionalTensor& bias, const Tensor& z_any,
                                     const OptionalTensor& main_grad, int64_t number, bool wide, bool want_dx,
                                     bool want_dweight, bool want_dbias, bool invariant) {
  const Dtype dtype = check_dy(op, dy_any);
  check_dtype(op, "weight", weight, dtype);
  if (weight.dim() != 2 || weight.size(0) != last(dy_any))
    refuse(op, "weight", "shape (" + std::to_string(last(dy_any)) + ", K)", shape_text(weight));
  const Layer layer = check_layer(op, dy_any, dtype, weight.size(1), "weight", weight, "bias", bias);
  if (x_any) check_rows(op, "x", *x_any, dy_any, layer.in, dtype);
  if (want_dweight && !x_any) refuse(op, "x", "a tensor when the gradient of weight is wanted", "None");
  if (want_dbias && !bias) refuse(op, "bias", "a tensor when its gradient is wanted", "None");
  check_main_grad(op, main_grad, layer, dtype);
  const LinearActivation activation = check_activation(op, number, /*none_allowed=*/true);
  const bool plain = activation == LinearActivation::none;
  if (!plain) check_rows(op, "z", z_any, dy_any, layer.out, dtype);

  const OnDeviceOf device(dy_any);
  Tensor dz = adjacent_rows(op, "dy", dy_any);
  LinearGradients found;
  if (plain) {
    if (want_dbias) found.bias = bias_gradient(op, dz, layer, dtype);
  } else {
    const bool products = want_dx || want_dweight;
    std::optional<New> made;
    if (products) made.emplace(op, "gradient of the pre-activation", dy_any, layer.out);
    if (want_dbias) found.bias = allocate_vector(op, "gradient of bias", layer.out, dtype_code(*bias), dy_any);
    if (products || want_dbias)
      activation_backward(op, activation, dz, adjacent_rows(op, "z", z_any),
                          made ? OptionalTensor(made->rows) : std::nullopt, found.bias, dtype, layer.bias_dtype);
    if (products) dz = made->rows;
  }
  if (want_dx) {
    const New to(op, "gradient of x", dy_any, layer.in);
    input_gradient(op, dz, layer, to.rows, /*add=*/false, invariant);
    found.x = to.any;
  }
  if (want_dweight) {
    const Tensor x = rows_of(op, "x", *x_any);
    if (main_grad)
      weight_gradient_into(op, *main_grad, dz, x, true);
    else
      found.weight = weight_gradient(op, dz, x, layer, dtype, wide);
  }
  return found;
}

Tensor given(const char* op, const OptionalTensor& gradient, const Tensor& like) {
  return gradient ? *gradient : nothing_like(op, like);
}

bool is_wide(const char* op, std::optional<ScalarType> dweight_dtype, const Tensor& weight) {
  if (!dweight_dtype || *dweight_dtype == weight.scalar_type()) return false;
  if (*dweight_dtype != ScalarType::Float || weight.scalar_type() == ScalarType::Double)
    refuse(op, "dweight_dtype", same_or_float32_text(float_dtype(op, "weight", weight)), dtype_text(*dweight_dtype));
  return true;
}

std::tuple<Tensor, Tensor, Tensor> linear_backward(Tensor dy, OptionalTensor x, Tensor weight, OptionalTensor bias,
                                                   Tensor z, int64_t activation,
                                                   std::optional<ScalarType> dweight_dtype, bool want_dx,
                                                   bool want_dweight, bool want_dbias, bool batch_invariant) {
  const char* op = backward_name(LinearOp::linear);
  const LinearGradients found =
      linear_backward_into(op, dy, x, weight, bias, z, std::nullopt, activation, is_wide(op, dweight_dtype, weight),
                           want_dx, want_dweight, want_dbias, batch_invariant);
  return {given(op, found.x, dy), given(op, found.weight, dy), given(op, found.bias, dy)};
}

std::tuple<Tensor, Tensor> linear_backward_main_grad(Tensor dy, Tensor x, Tensor weight, OptionalTensor bias, Tensor z,
                                                     Tensor main_grad, int64_t activation, bool want_dx,
                                                     bool want_dbias, bool batch_invariant) {
  const char* op = backward_name(LinearOp::linear);
  const LinearGradients found = linear_backward_into(op, dy, x, weight, bias, z, main_grad, activation, false, want_dx,
                                                     true, want_dbias, batch_invariant);
  return {given(op, found.x, dy), given(op, found.bias, dy)};
}

// ---- mlp: y = f(x w1^T + b1) w2^T + b2

struct Mlp {
  Layer first, second;
  LinearActivation activation;
};

Mlp check_mlp(const char* op, const Tensor& like, Dtype dtype, int64_t in, const Tensor& w1, const OptionalTensor& b1,
              const Tensor& w2, const OptionalTensor& b2, int64_t activation) {
  Layer first = check_layer(op, like, dtype, in, "w1", w1, "b1", b1);
  Layer second = check_layer(op, like, dtype, first.out, "w2", w2, "b2", b2);
  return {std::move(first), std::move(second), check_activation(op, activation, /*none_allowed=*/false)};
}

// Returns y, and with `keep` the pre-activation (not for relu) and the activation.
std::tuple<Tensor, Tensor, Tensor> mlp(const Tensor& x_any, const Tensor& w1, const OptionalTensor& b1,
                                       const Tensor& w2, const OptionalTensor& b2, int64_t number, bool keep) {
  const char* op = name(LinearOp::mlp);
  const Dtype dtype = check_x(op, x_any);
  const Mlp m = check_mlp(op, x_any, dtype, last(x_any), w1, b1, w2, b2, number);
  const OnDeviceOf device(x_any);
  const Tensor x = rows_of(op, "x", x_any);
  const New h(op, "activation", x_any, m.first.out);
  std::optional<New> z;
  if (keep && m.activation != LinearActivation::relu) z.emplace(op, "pre-activation", x_any, m.first.out);
  project_and_activate(op, m.first, m.activation, x, h.rows, z ? OptionalTensor(z->rows) : std::nullopt, dtype);
  const New y(op, "y", x_any, m.second.out);
  project(op, m.second, h.rows, y.rows);
  return {y.any, z ? z->any : nothing_like(op, x_any), keep ? h.any : nothing_like(op, x_any)};
}

std::tuple<Tensor, Tensor, Tensor> mlp_forward(Tensor x, Tensor w1, OptionalTensor b1, Tensor w2, OptionalTensor b2,
                                               int64_t activation) {
  return mlp(x, w1, b1, w2, b2, activation, true);
}

Tensor mlp_inference(Tensor x, Tensor w1, OptionalTensor b1, Tensor w2, OptionalTensor b2, int64_t activation) {
  return std::get<0>(mlp(x, w1, b1, w2, b2, activation, false));
}

// The gradient of the pre-activation is made where the second layer's input gradient lies, or by cuBLASLt in that
// product's epilogue.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> mlp_backward(Tensor dy_any, Tensor x_any, Tensor w1,
                                                                OptionalTensor b1, Tensor w2, OptionalTensor b2,
                                                                Tensor z_any, Tensor h_any, int64_t number,
                                                                bool want_dx, bool want_dw1, bool want_db1,
                                                                bool want_dw2, bool want_db2) {
  const char* op = backward_name(LinearOp::mlp);
  const Dtype dtype = check_x(op, x_any);
  const Mlp m = check_mlp(op, x_any, dtype, last(x_any), w1, b1, w2, b2, number);
  const bool relu = m.activation == LinearActivation::relu;
  check_rows(op, "dy", dy_any, x_any, m.second.out, dtype);
  check_rows(op, "h", h_any, x_any, m.first.out, dtype);
  if (!relu) check_rows(op, "z", z_any, x_any, m.first.out, dtype);
  if (want_db1 && !b1) refuse(op, "b1", "a tensor when its gradient is wanted", "None");
  if (want_db2 && !b2) refuse(op, "b2", "a tensor when its gradient is wanted", "None");

  const OnDeviceOf device(x_any);
  const Tensor dy = adjacent_rows(op, "dy", dy_any), h = adjacent_rows(op, "h", h_any);
  auto [dx, dw1, db1, dw2, db2] = five_of_nothing(op, x_any);
  if (want_db2) db2 = bias_gradient(op, dy, m.second, dtype);
  if (want_dw2) dw2 = weight_gradient(op, dy, h, m.second, dtype);
  if (want_dx || want_dw1 || want_db1) {
    const Tensor z = relu ? h : adjacent_rows(op, "z", z_any);
    const New dz(op, "gradient of the pre-activation", x_any, m.first.out);
    const Tensor weight = as_matrix(op, w2);
    if (input_gradient_with_derivative(op, dy, weight, z, m.activation, dz.rows, want_db1 ? &db1 : nullptr, m.first)) {
      // with db1
    } else if (multiply_with_derivative(op, dz.rows, dy, weight, z, m.activation)) {
      if (want_db1) db1 = bias_gradient(op, dz.rows, m.first, dtype);
    } else {
      input_gradient(op, dy, m.second, dz.rows);
      if (want_db1) db1 = allocate_vector(op, "gradient of b1", m.first.out, dtype_code(*b1), x_any);
      activation_backward(op, m.activation, dz.rows, z, dz.rows, want_db1 ? OptionalTensor(db1) : std::nullopt, dtype,
                          m.first.bias_dtype);
    }
    if (want_dw1) dw1 = weight_gradient(op, dz.rows, rows_of(op, "x", x_any), m.first, dtype);
    if (want_dx) {
      const New to(op, "gradient of x", x_any, m.first.in);
      input_gradient(op, dz.rows, m.first, to.rows);
      dx = to.any;
    }
  }
  return {dx, dw1, db1, dw2, db2};
}

// ---- gated_linear: y = f(x gate_weight^T + gate_bias) * (x up_weight^T + up_bias)

struct Pair {
  Layer gate, up;
  LinearActivation activation;
};

Pair check_pair(const char* op, const Tensor& x, Dtype dtype, const Tensor& gate_weight, const Tensor& up_weight,
                const OptionalTensor& gate_bias, const OptionalTensor& up_bias, int64_t activation) {
  const int64_t in = last(x);
  Layer gate = check_layer(op, x, dtype, in, "gate_weight", gate_weight, "gate_bias", gate_bias);
  Layer up = check_layer(op, x, dtype, in, "up_weight", up_weight, "up_bias", up_bias);
  if (up.out != gate.out) refuse(op, "up_weight", "shape " + shape_text(gate_weight), shape_text(up_weight));
  return {std::move(gate), std::move(up), check_activation(op, activation, /*none_allowed=*/false)};
}

// Returns y, and with `keep` gate and up.
std::tuple<Tensor, Tensor, Tensor> gated_linear(const Tensor& x_any, const Tensor& gate_weight, const Tensor& up_weight,
                                                const OptionalTensor& gate_bias, const OptionalTensor& up_bias,
                                                const OptionalTensor& gate_main_grad,
                                                const OptionalTensor& up_main_grad, int64_t activation, bool keep) {
  const char* op = name(LinearOp::gated_linear);
  const Dtype dtype = check_x(op, x_any);
  const Pair pair = check_pair(op, x_any, dtype, gate_weight, up_weight, gate_bias, up_bias, activation);
  check_main_grads(op, gate_main_grad, up_main_grad, pair.gate, pair.up, dtype);
  const OnDeviceOf device(x_any);
  const Tensor x = rows_of(op, "x", x_any);
  const int64_t columns = pair.gate.out;
  const New y(op, "y", x_any, columns);
  std::optional<New> gate, up;
  const auto make = [&] {
    gate.emplace(op, "gate", x_any, columns);
    up.emplace(op, "up", x_any, columns);
  };
  if (keep) make();
  const auto rows = [](const std::optional<New>& kept) { return kept ? OptionalTensor(kept->rows) : std::nullopt; };
  if (!project_gated(op, pair.gate, pair.up, pair.activation, x, y.rows, rows(gate), rows(up)) && y.any.numel() > 0) {
    if (!keep) make();
    project(op, pair.gate, x, gate->rows);
    project(op, pair.up, x, up->rows);
    const ActivationKernels& f = kernels_of(pair.activation);
    const GatedFwdParams p{gate->any.const_data_ptr(),
                           up->any.const_data_ptr(),
                           y.any.mutable_data_ptr(),
                           y.rows.size(0),
                           columns,
                           columns,
                           columns,
                           f.tanh,
                           dtype};
    run_on(
        op, y.any, [&](void* stream) { return gated_forward_cuda(f.gated, p, stream); },
        [&](const Parallel& threads) { return gated_forward_cpu(f.gated, p, threads); });
  }
  return {y.any, keep ? gate->any : nothing_like(op, x_any), keep ? up->any : nothing_like(op, x_any)};
}

std::tuple<Tensor, Tensor, Tensor> gated_linear_forward(Tensor x, Tensor gate_weight, Tensor up_weight,
                                                        OptionalTensor gate_bias, OptionalTensor up_bias,
                                                        OptionalTensor gate_main_grad, OptionalTensor up_main_grad,
                                                        int64_t activation) {
  return gated_linear(x, gate_weight, up_weight, gate_bias, up_bias, gate_main_grad, up_main_grad, activation, true);
}

Tensor gated_linear_inference(Tensor x, Tensor gate_weight, Tensor up_weight, OptionalTensor gate_bias,
                              OptionalTensor up_bias, OptionalTensor gate_main_grad, OptionalTensor up_main_grad,
                              int64_t activation) {
  return std::get<0>(
      gated_linear(x, gate_weight, up_weight, gate_bias, up_bias, gate_main_grad, up_main_grad, activation, false));
}

// A weight's gradient is added to its main_grad where there is one.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gated_linear_backward_into(
    const Tensor& dy_any, const Tensor& x_any, const Tensor& gate_weight, const Tensor& up_weight,
    const OptionalTensor& gate_bias, const OptionalTensor& up_bias, const Tensor& gate_any, const Tensor& up_any,
    const OptionalTensor& gate_main_grad, const OptionalTensor& up_main_grad, int64_t activation, bool want_dx,
    bool want_dgate_weight, bool want_dup_weight, bool want_dgate_bias, bool want_dup_bias) {
  const char* op = backward_name(LinearOp::gated_linear);
  const Dtype dtype = check_x(op, x_any);
  const Pair pair = check_pair(op, x_any, dtype, gate_weight, up_weight, gate_bias, up_bias, activation);
  const int64_t columns = pair.gate.out;
  check_rows(op, "dy", dy_any, x_any, columns, dtype);
  check_rows(op, "gate", gate_any, x_any, columns, dtype);
  check_rows(op, "up", up_any, x_any, columns, dtype);
  if (want_dgate_bias && !gate_bias) refuse(op, "gate_bias", "a tensor when its gradient is wanted", "None");
  if (want_dup_bias && !up_bias) refuse(op, "up_bias", "a tensor when its gradient is wanted", "None");
  check_main_grads(op, gate_main_grad, up_main_grad, pair.gate, pair.up, dtype);

  const OnDeviceOf device(x_any);
  const Tensor dy = adjacent_rows(op, "dy", dy_any), gate = adjacent_rows(op, "gate", gate_any),
               up = adjacent_rows(op, "up", up_any);
  // Both, if any gradient is wanted: the loops for one alone would contract other operations, and give other bits.
  const bool wanted = want_dx || want_dgate_weight || want_dup_weight || want_dgate_bias || want_dup_bias;
  std::optional<New> dgate, dup;
  if (wanted) {
    dgate.emplace(op, "gradient of gate", x_any, columns);
    dup.emplace(op, "gradient of up", x_any, columns);
  }
  if (wanted && dy.numel() > 0) {
    const ActivationKernels& f = kernels_of(pair.activation);
    const GatedBwdParams p{dy.const_data_ptr(),
                           gate.const_data_ptr(),
                           up.const_data_ptr(),
                           dgate->any.mutable_data_ptr(),
                           dup->any.mutable_data_ptr(),
                           dy.size(0),
                           columns,
                           dy.stride(0),
                           gate.stride(0),
                           up.stride(0),
                           columns,
                           columns,
                           f.tanh,
                           dtype};
    run_on<gated_backward_cuda, gated_backward_cpu>(op, dy, f.gated, p);
  }
  auto [dx, dgate_weight, dup_weight, dgate_bias, dup_bias] = five_of_nothing(op, x_any);
  const Tensor x = rows_of(op, "x", x_any);
  if (want_dgate_bias) dgate_bias = bias_gradient(op, dgate->rows, pair.gate, dtype);
  if (want_dup_bias) dup_bias = bias_gradient(op, dup->rows, pair.up, dtype);
  const auto of_weight = [&](const Tensor& dz, const Layer& layer, const OptionalTensor& main_grad, Tensor& dweight) {
    if (main_grad)
      weight_gradient_into(op, *main_grad, dz, x, true);
    else
      dweight = weight_gradient(op, dz, x, layer, dtype);
  };
  if (want_dgate_weight) of_weight(dgate->rows, pair.gate, gate_main_grad, dgate_weight);
  if (want_dup_weight) of_weight(dup->rows, pair.up, up_main_grad, dup_weight);
  if (want_dx) {
    const New to(op, "gradient of x", x_any, pair.gate.in);
    input_gradient(op, {dgate->rows, dup->rows}, {pair.gate, pair.up}, to.rows);
    dx = to.any;
  }
  return {dx, dgate_weight, dup_weight, dgate_bias, dup_bias};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gated_linear_backward(Tensor dy, Tensor x, Tensor gate_weight,
                                                                         Tensor up_weight, OptionalTensor gate_bias,
                                                                         OptionalTensor up_bias, Tensor gate, Tensor up,
                                                                         int64_t activation, bool want_dx,
                                                                         bool want_dgate_weight, bool want_dup_weight,
                                                                         bool want_dgate_bias, bool want_dup_bias) {
  return gated_linear_backward_into(dy, x, gate_weight, up_weight, gate_bias, up_bias, gate, up, std::nullopt,
                                    std::nullopt, activation, want_dx, want_dgate_weight, want_dup_weight,
                                    want_dgate_bias, want_dup_bias);
}

// A weight without a main_grad gets no gradient.
std::tuple<Tensor, Tensor, Tensor> gated_linear_backward_main_grads(
    Tensor dy, Tensor x, Tensor gate_weight, Tensor up_weight, OptionalTensor gate_bias, OptionalTensor up_bias,
    Tensor gate, Tensor up, OptionalTensor gate_main_grad, OptionalTensor up_main_grad, int64_t activation,
    bool want_dx, bool want_dgate_bias, bool want_dup_bias) {
  const auto [dx, dgate_weight, dup_weight, dgate_bias, dup_bias] = gated_linear_backward_into(
      dy, x, gate_weight, up_weight, gate_bias, up_bias, gate, up, gate_main_grad, up_main_grad, activation, want_dx,
      gate_main_grad.has_value(), up_main_grad.has_value(), want_dgate_bias, want_dup_bias);
  return {dx, dgate_bias, dup_bias};
}

// ---- several layers of one input: what norm_linears and its like are made of in Python

std::vector<Layer> check_layers(const char* op, const Tensor& like, Dtype dtype, int64_t in,
                                const std::vector<Tensor>& weights, const std::vector<OptionalTensor>& biases) {
  if (weights.empty() || weights.size() != biases.size())
    refuse(op, "biases", "one for each of one or more weights", std::to_string(biases.size()));
  std::vector<Layer> layers;
  for (size_t i = 0; i < weights.size(); ++i)
    layers.push_back(check_layer(op, like, dtype, in, "weights", weights[i], "biases", biases[i]));
  return layers;
}

std::vector<Tensor> linear_siblings(Tensor x_any, std::vector<Tensor> weights, std::vector<OptionalTensor> biases) {
  const char* op = "linear_siblings";
  const Dtype dtype = check_x(op, x_any);
  const std::vector<Layer> layers = check_layers(op, x_any, dtype, last(x_any), weights, biases);
  const OnDeviceOf device(x_any);
  std::vector<Tensor> outs, matrices;
  for (const Layer& layer : layers) {
    const New y(op, "y", x_any, layer.out);
    outs.push_back(y.any);
    matrices.push_back(y.rows);
  }
  project(op, layers, rows_of(op, "x", x_any), matrices);
  return outs;
}

// The gradient of the input of layers of these weights.
Tensor linear_siblings_input_gradient(std::vector<Tensor> dys, std::vector<Tensor> weights) {
  const char* op = "linear_siblings_input_gradient";
  if (weights.empty() || weights.size() != dys.size())
    refuse(op, "dys", "one for each of one or more weights", std::to_string(dys.size()));
  const Dtype dtype = check_dy(op, dys[0]);
  check_dtype(op, "weights", weights[0], dtype);
  if (weights[0].dim() != 2) refuse(op, "weights", "two dimensions", shape_text(weights[0]));
  const std::vector<Layer> layers =
      check_layers(op, dys[0], dtype, weights[0].size(1), weights, std::vector<OptionalTensor>(weights.size()));
  for (size_t i = 0; i < dys.size(); ++i) check_rows(op, "dys", dys[i], dys[0], layers[i].out, dtype);
  const OnDeviceOf device(dys[0]);
  std::vector<Tensor> dzs;
  for (const Tensor& dy : dys) dzs.push_back(rows_of(op, "dys", dy));
  const New dx(op, "gradient of x", dys[0], layers[0].in);
  input_gradient(op, dzs, layers, dx.rows);
  return dx.any;
}

WARPSMITH_OPS(m) {
  const std::string linear_inputs =
      "(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, Tensor? main_grad, int activation, "
      "bool batch_invariant=False) -> ";
  m.add_forward("linear", linear_inputs + "(Tensor y, Tensor z)", TORCH_BOX(&linear_forward));
  m.add("linear_inference" + linear_inputs + "Tensor y", TORCH_BOX(&linear_inference));
  m.add(
      "linear_backward(Tensor dy, Tensor? x, Tensor weight, Tensor? bias, Tensor z, int activation, ScalarType? "
      "dweight_dtype, bool want_dx, bool want_dweight, bool want_dbias, bool batch_invariant=False) -> (Tensor dx, "
      "Tensor dweight, Tensor dbias)",
      TORCH_BOX(&linear_backward));
  m.add(
      "linear_backward_main_grad(Tensor dy, Tensor x, Tensor weight, Tensor? bias, Tensor z, Tensor(a!) main_grad, int "
      "activation, bool want_dx, bool want_dbias, bool batch_invariant=False) -> (Tensor dx, Tensor dbias)",
      TORCH_BOX(&linear_backward_main_grad));

  m.add("linear_siblings(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor[]", TORCH_BOX(&linear_siblings));
  m.add("linear_siblings_input_gradient(Tensor[] dys, Tensor[] weights) -> Tensor dx",
        TORCH_BOX(&linear_siblings_input_gradient));

  const std::string mlp_inputs = "(Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, int activation) -> ";
  m.add_forward("mlp", mlp_inputs + "(Tensor y, Tensor z, Tensor h)", TORCH_BOX(&mlp_forward));
  m.add("mlp_inference" + mlp_inputs + "Tensor y", TORCH_BOX(&mlp_inference));
  m.add(
      "mlp_backward(Tensor dy, Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, Tensor z, Tensor h, int "
      "activation, bool want_dx, bool want_dw1, bool want_db1, bool want_dw2, bool want_db2) -> (Tensor dx, Tensor "
      "dw1, Tensor db1, Tensor dw2, Tensor db2)",
      TORCH_BOX(&mlp_backward));

  const std::string gated_inputs =
      "(Tensor x, Tensor gate_weight, Tensor up_weight, Tensor? gate_bias, Tensor? up_bias, Tensor? gate_main_grad, "
      "Tensor? up_main_grad, int activation) -> ";
  m.add_forward("gated_linear", gated_inputs + "(Tensor y, Tensor gate, Tensor up)", TORCH_BOX(&gated_linear_forward));
  m.add("gated_linear_inference" + gated_inputs + "Tensor y", TORCH_BOX(&gated_linear_inference));
  m.add(
      "gated_linear_backward(Tensor dy, Tensor x, Tensor gate_weight, Tensor up_weight, Tensor? gate_bias, Tensor? "
      "up_bias, Tensor gate, Tensor up, int activation, bool want_dx, bool want_dgate_weight, bool want_dup_weight, "
      "bool want_dgate_bias, bool want_dup_bias) -> (Tensor dx, Tensor dgate_weight, Tensor dup_weight, Tensor "
      "dgate_bias, Tensor dup_bias)",
      TORCH_BOX(&gated_linear_backward));
  m.add(
      "gated_linear_backward_main_grads(Tensor dy, Tensor x, Tensor gate_weight, Tensor up_weight, Tensor? gate_bias, "
      "Tensor? up_bias, Tensor gate, Tensor up, Tensor(a!)? gate_main_grad, Tensor(b!)? up_main_grad, int activation, "
      "bool want_dx, bool want_dgate_bias, bool want_dup_bias) -> (Tensor dx, Tensor dgate_bias, Tensor dup_bias)",
      TORCH_BOX(&gated_linear_backward_main_grads));
}

// Returns how many of our products have run so far.
int64_t own_product_as(std::string how) {
  own_product_asked() = own_product_number(how.c_str());
  return own_products_launched();
}

WARPSMITH_HOST_OPS(m) { m.add("_own_product(str how) -> int", TORCH_BOX(&own_product_as)); }

}  // namespace
}  // namespace warpsmith
