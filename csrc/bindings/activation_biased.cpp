#include "bindings/support/device.h"
#include "bindings/support/flag.h"
#include "bindings/support/library.h"
#include "bindings/support/rows.h"
#include "bindings/support/tensor.h"
#include "kernels/activation/activation.h"

namespace warpsmith {
namespace {

// The binding of the biased activations: checks, rows, allocation, launch.
// The dtype of the bias: the dtype of x, or float32 beside a 16-bit x.
Dtype check_bias(const char* op, const Tensor& bias, const Tensor& x, Dtype dtype) {
  if (x.dim() == 0) refuse(op, "x", "at least one dimension", "a tensor without dimensions");
  return check_parameter(op, "bias", bias, dtype, {x.size(x.dim() - 1)}, x);
}

Tensor biased_forward(Biased op, const Tensor& x_any, const Tensor& bias_any, bool tanh) {
  const Dtype dtype = float_dtype(name(op), "x", x_any);
  const Dtype bias_dtype = check_bias(name(op), bias_any, x_any, dtype);
  const Rows x = as_rows(name(op), "x", x_any);
  const Tensor bias = as_contiguous(bias_any);
  Tensor y = allocate_like(name(op), "y", x_any);
  if (x.rows == 0 || x.columns == 0) return y;
  const BiasedFwdParams p{x.tensor.const_data_ptr(),
                          bias.const_data_ptr(),
                          y.mutable_data_ptr(),
                          x.rows,
                          x.columns,
                          x.stride,
                          tanh,
                          dtype,
                          bias_dtype};
  run_on<biased_forward_cuda, biased_forward_cpu>(name(op), x_any, op, p);
  return y;
}

// Gradients that are not wanted have zero elements.
std::tuple<Tensor, Tensor> biased_backward(Biased op, const Tensor& dy_any, const Tensor& x_any, const Tensor& bias_any,
                                           bool tanh, bool want_dx, bool want_dbias) {
  const Dtype dtype = float_dtype(backward_name(op), "x", x_any);
  const Dtype bias_dtype = check_bias(backward_name(op), bias_any, x_any, dtype);
  check_like(backward_name(op), "dy", dy_any, x_any, dtype);
  const Rows x = as_rows(backward_name(op), "x", x_any), dy = as_rows(backward_name(op), "dy", dy_any);
  const Tensor bias = as_contiguous(bias_any);

  const Tensor none = allocate_vector(backward_name(op), "no gradient", 0, dtype_code(x_any), x_any);
  Tensor dx = want_dx ? allocate_like(backward_name(op), "dx", x_any) : none;
  Tensor dbias = want_dbias ? allocate_like(backward_name(op), "dbias", bias) : none;
  if (x.rows == 0 || x.columns == 0) {
    if (want_dbias) torch::stable::zero_(dbias);
    return {dx, dbias};
  }
  if (!want_dx && !want_dbias) return {dx, dbias};

  BiasedBwdParams p{dy.tensor.const_data_ptr(),
                    x.tensor.const_data_ptr(),
                    bias.const_data_ptr(),
                    want_dx ? dx.mutable_data_ptr() : nullptr,
                    want_dbias ? dbias.mutable_data_ptr() : nullptr,
                    nullptr,
                    x.rows,
                    x.columns,
                    dy.stride,
                    x.stride,
                    tanh,
                    dtype,
                    bias_dtype};
  std::optional<Tensor> partials;
  const auto with_partials = [&](int64_t partial_rows) {
    if (!want_dbias) return;
    const int64_t sizes[2] = {partial_rows, x.columns};
    const int32_t sums = dtype == Dtype::float64 ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
    partials = allocate(backward_name(op), "partial sums of dbias", sizes, 2, sums, x_any);
    p.partials = partials->mutable_data_ptr();
  };
  run_with_partials<BiasedBwdParams, biased_partial_rows_cuda, biased_backward_cuda, biased_backward_cpu>(
      backward_name(op), x_any, p, biased_partial_rows_cpu(x.rows, x.columns), with_partials, op);
  return {dx, dbias};
}

// The kernels of one row, with the signatures of its schemas. Flag: bool, or nothing.
template <Biased op, class... Flag> struct Bound {
  static Tensor forward(Tensor x, Tensor bias, Flag... flag) {
    return biased_forward(op, x, bias, (false || ... || flag));
  }
  static std::tuple<Tensor, Tensor> backward(Tensor dy, Tensor x, Tensor bias, bool want_dx, bool want_dbias,
                                             Flag... flag) {
    return biased_backward(op, dy, x, bias, (false || ... || flag), want_dx, want_dbias);
  }
};

// g++ 12 does not instantiate a function whose address only a template takes.
#define WARPSMITH_ROW(op, function, flag) template struct WARPSMITH_FLAG_ARGUMENT_##flag(Bound, Biased::op);
WARPSMITH_BIASED_OPS(WARPSMITH_ROW)
#undef WARPSMITH_ROW

WARPSMITH_OPS(m) {
  const std::string inputs = "Tensor x, Tensor bias";
#define WARPSMITH_ROW(op, function, flag)                                                   \
  {                                                                                         \
    using Row = WARPSMITH_FLAG_ARGUMENT_##flag(Bound, Biased::op);                          \
    const std::string more = WARPSMITH_FLAG_SCHEMA_##flag;                                  \
    m.add_forward(#op, "(" + inputs + more + ") -> Tensor y", TORCH_BOX(&Row::forward));    \
    m.add(#op "_backward(Tensor dy, " + inputs + ", bool want_dx, bool want_dbias" + more + \
              ") -> (Tensor dx, Tensor dbias)",                                             \
          TORCH_BOX(&Row::backward));                                                       \
  }
  WARPSMITH_BIASED_OPS(WARPSMITH_ROW)
#undef WARPSMITH_ROW
}

}  // namespace
}  // namespace warpsmith
