#pragma once
#include "kernels/activation/biased.h"
#include "torch/support/device.h"
#include "torch/support/rows.h"
#include "torch/support/tensor.h"

// The binding of the biased activations: checks, rows, allocation, launch. Op: the op's names, kForward and kBackward,
// and its launchers, as static functions cuda(params, stream) and cpu(params, threads) for both params, and
// partial_rows.
namespace warpsmith {

// The dtype of the bias, which is x's own or float32 beside a 16-bit x.
inline Dtype check_bias(const char* op, const Tensor& bias, const Tensor& x, Dtype dtype) {
  const Dtype bias_dtype = float_dtype(op, "bias", bias);
  if (bias_dtype != dtype && !(bias_dtype == Dtype::float32 && size_bytes(dtype) == 2))
    refuse(op, "bias", size_bytes(dtype) == 2 ? std::string(name(dtype)) + " or float32" : name(dtype),
           name(bias_dtype));
  if (x.dim() == 0) refuse(op, "x", "at least one dimension", "a tensor without dimensions");
  check_shape(op, "bias", bias, {x.size(x.dim() - 1)});
  check_same_device(op, "bias", bias, x);
  return bias_dtype;
}

template <class Op> Tensor biased_forward(const Tensor& x_any, const Tensor& bias_any, bool tanh) {
  const Dtype dtype = float_dtype(Op::kForward, "x", x_any);
  const Dtype bias_dtype = check_bias(Op::kForward, bias_any, x_any, dtype);
  const Rows x = as_rows(Op::kForward, "x", x_any);
  const Tensor bias = as_contiguous(bias_any);
  Tensor y = allocate_like(Op::kForward, "y", x_any);
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
  run_on(
      Op::kForward, x_any, [&](void* stream) { return Op::cuda(p, stream); },
      [&](const Parallel& threads) { return Op::cpu(p, threads); });
  return y;
}

// Gradients that are not wanted come back with zero elements.
template <class Op> std::tuple<Tensor, Tensor> biased_backward(const Tensor& dy_any, const Tensor& x_any,
                                                               const Tensor& bias_any, bool tanh, bool want_dx,
                                                               bool want_dbias) {
  const Dtype dtype = float_dtype(Op::kBackward, "x", x_any);
  const Dtype bias_dtype = check_bias(Op::kBackward, bias_any, x_any, dtype);
  check_dtype(Op::kBackward, "dy", dy_any, dtype);
  check_same_shape(Op::kBackward, "dy", dy_any, x_any);
  check_same_device(Op::kBackward, "dy", dy_any, x_any);
  const Rows x = as_rows(Op::kBackward, "x", x_any), dy = as_rows(Op::kBackward, "dy", dy_any);
  const Tensor bias = as_contiguous(bias_any);

  const Tensor none = allocate_vector(Op::kBackward, "no gradient", 0, dtype_code(x_any), x_any);
  Tensor dx = want_dx ? allocate_like(Op::kBackward, "dx", x_any) : none;
  Tensor dbias = want_dbias ? allocate_like(Op::kBackward, "dbias", bias) : none;
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
    partials = allocate(Op::kBackward, "partial sums of dbias", sizes, 2, sums, x_any);
    p.partials = partials->mutable_data_ptr();
  };
  run_on(
      Op::kBackward, x_any,
      [&](void* stream) {
        int64_t partial_rows = 0;
        WARPSMITH_RETURN_IF_FAILED(Op::partial_rows(p, &partial_rows));
        with_partials(partial_rows);
        return Op::cuda(p, stream);
      },
      [&](const Parallel& threads) {
        with_partials(biased_partial_rows_cpu(x.rows, x.columns));
        return Op::cpu(p, threads);
      });
  return {dx, dbias};
}

}  // namespace warpsmith
