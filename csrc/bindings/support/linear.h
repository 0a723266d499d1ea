#pragma once
#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "bindings/support/column_sums.h"
#include "bindings/support/device.h"
#include "bindings/support/epilogue.h"
#include "bindings/support/matmul.h"
#include "bindings/support/product.h"
#include "bindings/support/rows.h"
#include "kernels/activation/activation.h"
#include "kernels/linear/linear.h"

// What the bindings of linear, mlp and gated_linear are made of: checked layers, and the steps of forward and backward.
// Matrices here are two-dimensional views; those that a step writes are contiguous.
namespace warpsmith {

// The kernels of an activation.
struct ActivationKernels {
  Biased biased;
  Gated gated;
  bool tanh;
};

inline const ActivationKernels& kernels_of(LinearActivation activation) {
  static constexpr ActivationKernels rows[] = {
#define WARPSMITH_ROW(activation, biased, gated, tanh) {Biased::biased, Gated::gated, tanh},
      WARPSMITH_LINEAR_ACTIVATIONS(WARPSMITH_ROW)
#undef WARPSMITH_ROW
  };
  return rows[static_cast<int>(activation) - 1];
}

inline LinearActivation check_activation(const char* op, int64_t number, bool none_allowed) {
  constexpr int64_t count = std::size(kLinearActivations);
  if (number < (none_allowed ? 0 : 1) || number >= count)
    refuse(op, "activation",
           "a number from " + std::to_string(none_allowed ? 0 : 1) + " to " + std::to_string(count - 1),
           std::to_string(number));
  return static_cast<LinearActivation>(number);
}

// A matrix as products read it: its rows, or its columns, adjacent in memory and not overlapping. Others are copied.
inline Tensor as_matrix(const char* op, const Tensor& t) {
  const int64_t rows = t.size(0), columns = t.size(1), by_row = t.stride(0), by_column = t.stride(1);
  const auto fits = [](int64_t sizes, int64_t adjacent, int64_t others, int64_t apart) {
    return (sizes <= 1 || adjacent == 1) && (others <= 1 || apart >= std::max<int64_t>(sizes, 1));
  };
  if (by_column == 1 && by_row >= columns && columns > 0 && rows > 0) return t;
  if (fits(columns, by_column, rows, by_row))
    return matrix_view(t, 0, rows, columns, rows > 1 ? by_row : std::max<int64_t>(columns, 1));
  if (fits(rows, by_row, columns, by_column))
    return matrix_view(t, 0, rows, columns, 1, columns > 1 ? by_column : std::max<int64_t>(rows, 1));
  const Tensor copy = as_contiguous(t, op);
  return matrix_view(copy, 0, rows, columns, std::max<int64_t>(columns, 1));
}

inline Tensor transposed(const Tensor& m) { return matrix_view(m, 0, m.size(1), m.size(0), m.stride(1), m.stride(0)); }

// Whether a weight, and with it its gradient, lies transposed: the columns of an (N, K) weight are adjacent.
inline bool lies_transposed(const Tensor& weight) { return weight.stride(0) == 1 && weight.stride(1) > 1; }

// The last dimension of a tensor as columns, all others as rows. A matrix stays as it lies.
inline Tensor rows_of(const char* op, const char* argument, const Tensor& t) {
  if (t.dim() == 2) return as_matrix(op, t);
  const Rows r = as_rows(op, argument, t);
  return as_matrix(op, matrix_view(r.tensor, 0, r.rows, r.columns, r.stride));
}

// The same with adjacent columns, as our kernels read rows.
inline Tensor adjacent_rows(const char* op, const char* argument, const Tensor& t) {
  const Tensor m = rows_of(op, argument, t);
  return m.size(1) > 1 && m.stride(1) != 1 ? as_contiguous(m, op) : m;
}

// A new tensor of the shape of `like` but for the last dimension.
inline Tensor allocate_rows(const char* op, const char* argument, const Tensor& like, int64_t columns) {
  const auto sizes = like.sizes();
  std::vector<int64_t> shape(sizes.begin(), sizes.end());
  shape.back() = columns;
  return allocate(op, argument, shape.data(), static_cast<int64_t>(shape.size()), dtype_code(like), like);
}

inline Tensor as_rows_matrix(const Tensor& contiguous, int64_t rows, int64_t columns) {
  if (contiguous.dim() == 2) return contiguous;
  return matrix_view(contiguous, 0, rows, columns, std::max<int64_t>(columns, 1));
}

// A checked layer: x @ weight^T + bias.
struct Layer {
  Tensor weight;  // [out, in], as given
  std::optional<Tensor> bias;
  Dtype bias_dtype;
  int64_t in, out;
};

inline Layer check_layer(const char* op, const Tensor& like, Dtype dtype, int64_t in, const char* weight_name,
                         const Tensor& weight, const char* bias_name, const std::optional<Tensor>& bias) {
  check_dtype(op, weight_name, weight, dtype);
  if (weight.dim() != 2 || weight.size(1) != in)
    refuse(op, weight_name, "shape (N, " + std::to_string(in) + ")", shape_text(weight));
  check_same_device(op, weight_name, weight, like);
  Layer layer{weight, bias, dtype, in, weight.size(0)};
  if (!bias) return layer;
  layer.bias_dtype = check_parameter(op, bias_name, *bias, dtype, {layer.out}, like);
  return layer;
}

// A tensor of the family's shapes: the leading dimensions of `like`, then `columns`.
inline void check_rows(const char* op, const char* argument, const Tensor& t, const Tensor& like, int64_t columns,
                       Dtype dtype) {
  check_dtype(op, argument, t, dtype);
  bool same = t.dim() == like.dim() && t.size(t.dim() - 1) == columns;
  std::string expected;
  for (int64_t i = 0; i + 1 < like.dim(); ++i) {
    same = same && t.size(i) == like.size(i);
    expected += std::to_string(like.size(i)) + ", ";
  }
  if (!same) refuse(op, argument, "shape (" + expected + std::to_string(columns) + ")", shape_text(t));
  check_same_device(op, argument, t, like);
}

// The bias of a layer as products add it: contiguous, of the dtype of `like`.
inline std::optional<Tensor> bias_like(const char* op, const Layer& layer, const Tensor& like) {
  if (!layer.bias) return std::nullopt;
  return as_contiguous(in_dtype(op, "bias", *layer.bias, dtype_code(like)), op);
}

// out = x @ weight^T + bias + residual by our product; false where it does not run.
inline bool project_with_residual(const char* op, const Layer& layer, const Tensor& x, const Tensor& out,
                                  const Tensor& residual, bool invariant) {
  if (out.numel() == 0 || (!invariant && !may_be_own(out))) return false;
  const std::optional<Tensor> bias = bias_like(op, layer, out);
  return own_product(op, out, x, transposed(as_matrix(op, layer.weight)),
                     {.bias = const_at(bias),
                      .z = const_cast<void*>(residual.const_data_ptr()),
                      .z_stride = residual.stride(0),
                      .epilogue = ProductEpilogue::residual,
                      .invariant = invariant && layer.in > 0});
}

// out = x @ weight^T + bias, or with `residual` in the bias's place
inline void project(const char* op, const Layer& layer, const Tensor& x, const Tensor& out,
                    const std::optional<Tensor>& residual = std::nullopt, bool invariant = false) {
  if (out.numel() == 0) return;
  const Tensor weight = transposed(as_matrix(op, layer.weight));
  if (residual) {
    multiply_add(out, *residual, x, weight);
    return;
  }
  const std::optional<Tensor> bias = bias_like(op, layer, out);
  if (own_product(op, out, x, weight, {.bias = const_at(bias), .invariant = invariant && layer.in > 0})) return;
  if (bias)
    multiply_add(out, *bias, x, weight);
  else
    multiply(out, x, weight);
}

// outs[i] = x @ weights[i]^T + biases[i], in one launch where that pays.
inline void project(const char* op, const std::vector<Layer>& layers, const Tensor& x,
                    const std::vector<Tensor>& outs) {
  if (may_be_own(outs[0])) {
    std::vector<Tensor> weights;
    std::vector<std::optional<Tensor>> biases;
    std::vector<const void*> at_biases;
    for (const Layer& layer : layers) {
      weights.push_back(layer.weight);
      biases.push_back(bias_like(op, layer, x));
      at_biases.push_back(const_at(biases.back()));
    }
    if (own_products(op, outs, {x}, weights, at_biases)) return;
  }
  for (size_t i = 0; i < layers.size(); ++i) project(op, layers[i], x, outs[i]);
}

// y = f(x @ gate^T + bias) (x @ up^T + bias) by our product, which writes both factors before f where they are wanted.
// False where it does not run.
inline bool project_gated(const char* op, const Layer& gate, const Layer& up, LinearActivation activation,
                          const Tensor& x, const Tensor& y, const std::optional<Tensor>& kept_gate,
                          const std::optional<Tensor>& kept_up) {
  if (y.numel() == 0 || !may_be_own(y)) return false;
  const Tensor up_weight = as_matrix(op, up.weight);
  if (up_weight.stride(1) != 1) return false;
  const std::optional<Tensor> bias = bias_like(op, gate, y), up_bias = bias_like(op, up, y);
  return own_product(op, y, x, transposed(as_matrix(op, gate.weight)),
                     {.up = up_weight.const_data_ptr(),
                      .up_stride = up_weight.stride(0),
                      .bias = const_at(bias),
                      .up_bias = const_at(up_bias),
                      .z = at(kept_gate),
                      .up_z = at(kept_up),
                      .z_stride = y.size(1),
                      .epilogue = ProductEpilogue::gated,
                      .activation = activation});
}

// y = f(z); y may be z.
inline void activate(const char* op, LinearActivation activation, const Tensor& z, const Tensor& y, Dtype dtype) {
  if (y.numel() == 0) return;
  const ActivationKernels& f = kernels_of(activation);
  const BiasedFwdParams p{
      z.const_data_ptr(), nullptr, y.mutable_data_ptr(), z.size(0), z.size(1), z.stride(0), f.tanh, dtype, dtype};
  run_on<biased_forward_cuda, biased_forward_cpu>(op, y, f.biased, p);
}

// y += residual
inline void add_residual(const char* op, const Tensor& y, const Tensor& residual, Dtype dtype) {
  if (y.numel() == 0) return;
  const DropoutAddFwdParams p{y.const_data_ptr(),
                              residual.const_data_ptr(),
                              y.mutable_data_ptr(),
                              make_dropout(nullptr, 0),
                              y.size(0),
                              y.size(1),
                              y.stride(0),
                              residual.stride(0),
                              dtype};
  run_on<dropout_add_forward_cuda, dropout_add_forward_cpu>(op, y, p);
}

// z = x @ weight^T + bias and y = f(z); without z it is not kept, and without an activation y is z. One product where
// an epilogue pays: ours (kernels/linear/product_config.h) or cuBLASLt's (kernels/linear/linear_config.h).
inline void project_and_activate(const char* op, const Layer& layer, LinearActivation activation, const Tensor& x,
                                 const Tensor& y, const std::optional<Tensor>& z, Dtype dtype, bool invariant = false) {
  const bool plain = activation == LinearActivation::none;
  if (!plain && y.numel() > 0) {
    const std::optional<Tensor> bias = bias_like(op, layer, y);
    const Tensor weight = transposed(as_matrix(op, layer.weight));
    const ProductParams epilogue{.bias = const_at(bias),
                                 .z = at(z),
                                 .z_stride = y.size(1),
                                 .epilogue = ProductEpilogue::activate,
                                 .activation = activation,
                                 .invariant = invariant && layer.in > 0};
    if (own_product(op, y, x, weight, epilogue)) return;
    if (multiply_with_activation(op, y, x, weight, bias, activation, z)) return;
  }
  const Tensor& before = z ? *z : y;
  project(op, layer, x, before, std::nullopt, invariant);
  if (!plain) activate(op, activation, before, y, dtype);
}

// dz = dy f'(z), and the bias's gradient; each may be null. dz may be dy. Returns the bias's gradient.
inline void activation_backward(const char* op, LinearActivation activation, const Tensor& dy, const Tensor& z,
                                const std::optional<Tensor>& dz, const std::optional<Tensor>& dbias, Dtype dtype,
                                Dtype bias_dtype) {
  if (dy.numel() == 0) {
    if (dbias) torch::stable::zero_(const_cast<Tensor&>(*dbias));
    return;
  }
  const ActivationKernels& f = kernels_of(activation);
  BiasedBwdParams p{dy.const_data_ptr(), z.const_data_ptr(), nullptr,     at(dz), at(dbias), nullptr,   dy.size(0),
                    dy.size(1),          dy.stride(0),       z.stride(0), f.tanh, dtype,     bias_dtype};
  std::optional<Tensor> partials;
  const auto with_partials = [&](int64_t partial_rows) {
    if (!dbias) return;
    const int64_t sizes[2] = {partial_rows, p.columns};
    partials = allocate(op, "partial sums of the bias's gradient", sizes, 2, real_code(dtype), dy);
    p.partials = partials->mutable_data_ptr();
  };
  run_on(
      op, dy,
      [&](void* stream) {
        int64_t partial_rows = 0;
        WARPSMITH_RETURN_IF_FAILED(biased_partial_rows_cuda(p, &partial_rows));
        with_partials(partial_rows);
        return biased_backward_cuda(f.biased, p, stream);
      },
      [&](const Parallel& threads) {
        with_partials(biased_partial_rows_cpu(p.rows, p.columns));
        return biased_backward_cpu(f.biased, p, threads);
      });
}

// The gradient of a bias: the column sums of dz, rounded once.
inline Tensor bias_gradient(const char* op, const Tensor& dz, const Layer& layer, Dtype dtype) {
  const Tensor sums = allocate_vector(op, "gradient of bias", layer.out, dtype_code(*layer.bias), dz);
  if (dz.numel() == 0)
    torch::stable::zero_(const_cast<Tensor&>(sums));
  else
    add_column_sums(op, dz, sums, dtype, layer.bias_dtype, false);
  return sums;
}

// Adds dz^T @ x to sum, or writes it there. sum [out, in] is contiguous, or its transpose is. The products are added in
// the dtype of sum.
inline void weight_gradient_into(const char* op, const Tensor& sum, const Tensor& dz, const Tensor& x, bool add) {
  if (sum.numel() == 0) return;
  if (dz.size(0) == 0) {
    if (!add) torch::stable::zero_(const_cast<Tensor&>(sum));
    return;
  }
  const bool turned = lies_transposed(sum);
  const Tensor to = as_matrix(op, turned ? transposed(sum) : sum);
  const Tensor &a = turned ? x : dz, &b = turned ? dz : x;
  if ((!add || dtype_code(sum) != dtype_code(dz)) && own_product(op, to, transposed(a), b, {.add = add})) return;
  if (dtype_code(sum) != dtype_code(dz))
    add_outer_products(op, to, adjacent_rows(op, "x", a), adjacent_rows(op, "x", b), add);
  else if (add)
    multiply_add(to, to, transposed(a), b);
  else
    multiply(to, transposed(a), b);
}

// The gradient of a weight, which lies as the weight does. wide: in float32 for 16-bit weights.
inline Tensor weight_gradient(const char* op, const Tensor& dz, const Tensor& x, const Layer& layer, Dtype dtype,
                              bool wide = false) {
  const int32_t code = wide ? real_code(dtype) : dtype_code(dz);
  const int64_t sizes[2] = {layer.out, layer.in}, strides[2] = {1, layer.out};
  const Tensor dweight = lies_transposed(layer.weight)
                             ? allocate_strided(op, "gradient of weight", sizes, strides, 2, code, dz)
                             : allocate(op, "gradient of weight", sizes, 2, code, dz);
  weight_gradient_into(op, dweight, dz, x, false);
  return dweight;
}

// out (+)= dz @ weight
inline void input_gradient(const char* op, const Tensor& dz, const Layer& layer, const Tensor& out, bool add = false,
                           bool invariant = false) {
  if (out.numel() == 0) return;
  const Tensor weight = as_matrix(op, layer.weight);
  if (add)
    multiply_add(out, out, dz, weight);
  else if (!own_product(op, out, dz, weight, {.invariant = invariant && layer.out > 0}))
    multiply(out, dz, weight);
}

// out = the sum of dzs[i] @ weights[i], in one launch where that pays; else in the order of the layers.
inline void input_gradient(const char* op, const std::vector<Tensor>& dzs, const std::vector<Layer>& layers,
                           const Tensor& out) {
  if (out.numel() == 0) return;
  std::vector<Tensor> weights;
  for (const Layer& layer : layers) weights.push_back(layer.weight);
  if (own_products(op, {out}, dzs, weights)) return;
  for (size_t i = 0; i < layers.size(); ++i) input_gradient(op, dzs[i], layers[i], out, /*add=*/i > 0);
}

// dz = (dy @ weight) f'(z), and the bias's gradient of the layer that made z, if it is wanted: by our product, which
// sums columns on the way. False where it does not run.
inline bool input_gradient_with_derivative(const char* op, const Tensor& dy, const Tensor& weight, const Tensor& z,
                                           LinearActivation activation, const Tensor& dz, Tensor* dbias,
                                           const Layer& layer) {
  if (dz.numel() == 0 || !may_be_own(dz)) return false;
  ProductParams epilogue{.z = const_cast<void*>(z.const_data_ptr()),
                         .z_stride = z.stride(0),
                         .epilogue = ProductEpilogue::derivative,
                         .activation = activation};
  std::optional<Tensor> sums;
  if (dbias) {
    sums = allocate_vector(op, "gradient of bias", layer.out, dtype_code(*layer.bias), dz);
    epilogue.column_sums = sums->mutable_data_ptr();
    epilogue.column_sums_dtype = layer.bias_dtype;
  }
  if (!own_product(op, dz, dy, weight, epilogue)) return false;
  if (dbias) *dbias = *sums;
  return true;
}

}  // namespace warpsmith
