#pragma once
#include <optional>
#include <string>

#include "kernels/norm/norm.h"
#include "torch/support/device.h"
#include "torch/support/dropout.h"
#include "torch/support/rows.h"
#include "torch/support/tensor.h"

// What the bindings of the norm family share: checks, outputs, params and launch. An op is a struct of names and
// launchers, made by WARPSMITH_NORM_OP.
namespace warpsmith {

#define WARPSMITH_NORM_OP(Op, op, of_kind)                                                                 \
  struct Op {                                                                                              \
    static constexpr const char* forward_name = #op;                                                       \
    static constexpr const char* backward_name = #op "_backward";                                          \
    static constexpr NormKind kind = of_kind;                                                              \
    static Status forward_cuda(const NormForwardParams& p, void* s) { return op##_forward_cuda(p, s); }    \
    static Status forward_cpu(const NormForwardParams& p, const Parallel& threads) {                       \
      return op##_forward_cpu(p, threads);                                                                 \
    }                                                                                                      \
    static Status partial_rows_cuda(const NormBackwardParams& p, int64_t* rows) {                          \
      return op##_partial_rows_cuda(p, rows);                                                              \
    }                                                                                                      \
    static Status backward_cuda(const NormBackwardParams& p, void* s) { return op##_backward_cuda(p, s); } \
    static Status backward_cpu(const NormBackwardParams& p, const Parallel& threads) {                     \
      return op##_backward_cpu(p, threads);                                                                \
    }                                                                                                      \
  }

// A dtype beside the activation's: its own, or float32 beside 16 bits.
inline Dtype check_beside(const char* op, const char* argument, const Tensor& t, Dtype dtype) {
  const Dtype got = float_dtype(op, argument, t);
  if (got != dtype && !(got == Dtype::float32 && size_bytes(dtype) == 2))
    refuse(op, argument, size_bytes(dtype) == 2 ? std::string(name(dtype)) + " or float32" : name(dtype), name(got));
  return got;
}

// The dtype of the weight, which is x's own or float32 beside a 16-bit x.
inline Dtype check_weight(const char* op, const std::optional<Tensor>& weight, const Tensor& x, Dtype dtype,
                          int64_t columns) {
  if (!weight) return dtype;
  const Dtype weight_dtype = check_beside(op, "weight", *weight, dtype);
  check_shape(op, "weight", *weight, {columns});
  check_same_device(op, "weight", *weight, x);
  return weight_dtype;
}

// The dtype of weight and bias, which is one where both are there.
inline Dtype check_affine(const char* op, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                          const Tensor& x, Dtype dtype, int64_t columns) {
  Dtype weight_dtype = check_weight(op, weight, x, dtype, columns);
  if (!bias) return weight_dtype;
  if (weight)
    check_dtype(op, "bias", *bias, weight_dtype);
  else
    weight_dtype = check_beside(op, "bias", *bias, dtype);
  check_shape(op, "bias", *bias, {columns});
  check_same_device(op, "bias", *bias, x);
  return weight_dtype;
}

inline void check_eps(const char* op, double eps) {
  if (!(eps >= 0)) refuse(op, "eps", "a number >= 0", std::to_string(eps));
}

inline std::optional<Tensor> adjacent(const std::optional<Tensor>& weight) {
  return weight ? std::optional<Tensor>(as_contiguous(*weight)) : std::nullopt;
}

inline const void* pointer(const std::optional<Tensor>& t) { return t ? t->const_data_ptr() : nullptr; }

inline Dtype statistics_dtype(Dtype dtype) { return dtype == Dtype::float64 ? Dtype::float64 : Dtype::float32; }

inline int32_t statistics_code(Dtype dtype) {
  return dtype == Dtype::float64 ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
}

inline Tensor check_statistics(const char* op, const char* argument, const Tensor& t, Dtype dtype, int64_t rows,
                               const Tensor& like) {
  check_dtype(op, argument, t, statistics_dtype(dtype));
  check_shape(op, argument, t, {rows});
  check_same_device(op, argument, t, like);
  return as_contiguous(t);
}

struct NormInputs {
  const Tensor& x;
  std::optional<Tensor> residual = {}, weight = {}, bias = {};
  std::optional<Tensor> seed = {};  // none: nothing is dropped
  double p = 0, eps = 0, weight_offset = 0;
};

struct NormOutputs {
  Tensor y, residual_out, mean, rstd;  // without a residual, for rms and without statistics some have no storage
};

template <class Op> NormOutputs norm_forward(const NormInputs& in, bool with_statistics) {
  constexpr const char* op = Op::forward_name;
  const Dtype dtype = float_dtype(op, "x", in.x);
  const Rows x = as_rows(op, "x", in.x);
  NormForwardParams p;
  p.kind = Op::kind;
  p.dtype = p.residual_dtype = dtype;
  std::optional<Rows> residual;
  if (in.residual) {
    p.residual_dtype = check_beside(op, "residual", *in.residual, dtype);
    check_same_shape(op, "residual", *in.residual, in.x);
    check_same_device(op, "residual", *in.residual, in.x);
    residual = as_rows(op, "residual", *in.residual);
  }
  p.weight_dtype = check_affine(op, in.weight, in.bias, in.x, dtype, x.columns);
  check_eps(op, in.eps);
  p.dropout = check_dropout(op, in.seed, in.p, in.x);
  const std::optional<Tensor> weight = adjacent(in.weight), bias = adjacent(in.bias);

  NormOutputs out;
  out.y = allocate_like(op, "y", in.x);
  if (residual) out.residual_out = allocate_like(op, "residual_out", *in.residual);
  const bool with_mean = with_statistics && Op::kind == NormKind::layer;
  if (with_mean) out.mean = allocate_vector(op, "mean", x.rows, statistics_code(dtype), in.x);
  if (with_statistics) out.rstd = allocate_vector(op, "rstd", x.rows, statistics_code(dtype), in.x);
  if (x.rows == 0 || x.columns == 0) {
    if (with_mean) torch::stable::zero_(out.mean);
    if (with_statistics) torch::stable::zero_(out.rstd);
    return out;
  }
  p.x = x.tensor.const_data_ptr();
  p.x_stride = x.stride;
  if (residual) {
    p.residual = residual->tensor.const_data_ptr();
    p.residual_stride = residual->stride;
    p.residual_out = out.residual_out.mutable_data_ptr();
  }
  p.weight = pointer(weight);
  p.bias = pointer(bias);
  p.y = out.y.mutable_data_ptr();
  if (with_mean) p.mean = out.mean.mutable_data_ptr();
  if (with_statistics) p.rstd = out.rstd.mutable_data_ptr();
  p.rows = x.rows;
  p.columns = x.columns;
  p.eps = in.eps;
  p.weight_offset = in.weight_offset;
  run_on(
      op, in.x, [&](void* stream) { return Op::forward_cuda(p, stream); },
      [&](const Parallel& threads) { return Op::forward_cpu(p, threads); });
  return out;
}

struct NormGradientInputs {
  const Tensor& dy;
  std::optional<Tensor> dresidual_out = {};
  const Tensor& s;     // x, or residual_out of an op with a residual
  const char* s_name;  // in messages
  bool residual;
  std::optional<Tensor> weight = {}, bias = {}, mean = {};
  const Tensor& rstd;
  std::optional<Tensor> seed = {};  // that of the forward
  double p = 0, weight_offset = 0;
  bool want_dx = false, want_dresidual = false, want_dweight = false, want_dbias = false;
};

struct NormGradients {
  Tensor dx, dresidual, dweight, dbias;
};

// Gradients that are not wanted come back with zero elements. So does dresidual where it equals dx (no dropout, one
// dtype): dx then is both, and is computed where either is wanted.
template <class Op> NormGradients norm_backward(const NormGradientInputs& in) {
  constexpr const char* op = Op::backward_name;
  const Dtype dtype = float_dtype(op, "dy", in.dy);
  NormBackwardParams p;
  p.kind = Op::kind;
  p.dtype = dtype;
  if (in.residual)
    p.residual_dtype = check_beside(op, in.s_name, in.s, dtype);
  else
    check_dtype(op, in.s_name, in.s, p.residual_dtype = dtype);
  check_same_shape(op, in.s_name, in.s, in.dy);
  check_same_device(op, in.s_name, in.s, in.dy);
  const Rows s = as_rows(op, in.s_name, in.s), dy = as_rows(op, "dy", in.dy);
  std::optional<Rows> dresidual_out;
  if (in.dresidual_out) {
    check_dtype(op, "dresidual_out", *in.dresidual_out, p.residual_dtype);
    check_same_shape(op, "dresidual_out", *in.dresidual_out, in.dy);
    check_same_device(op, "dresidual_out", *in.dresidual_out, in.dy);
    dresidual_out = as_rows(op, "dresidual_out", *in.dresidual_out);
  }
  p.weight_dtype = check_affine(op, in.weight, in.bias, in.dy, dtype, s.columns);
  if (in.want_dweight && !in.weight) refuse(op, "weight", "a tensor when its gradient is wanted", "None");
  if (in.want_dbias && !in.bias) refuse(op, "bias", "a tensor when its gradient is wanted", "None");
  std::optional<Tensor> mean;
  if (in.mean) mean = check_statistics(op, "mean", *in.mean, dtype, s.rows, in.dy);
  const Tensor rstd = check_statistics(op, "rstd", in.rstd, dtype, s.rows, in.dy);
  const std::optional<Tensor> weight = adjacent(in.weight);

  p.dropout = check_dropout(op, in.seed, in.p, in.dy);
  const bool one_for_both = in.residual && p.residual_dtype == dtype && !in.seed;
  const bool give_dx = in.want_dx || (one_for_both && in.want_dresidual);
  const bool give_dresidual = in.want_dresidual && !one_for_both;
  const Tensor none = allocate_vector(op, "no gradient", 0, dtype_code(in.dy), in.dy);
  NormGradients out{give_dx ? allocate_like(op, "dx", in.dy) : none,
                    give_dresidual ? allocate_like(op, "dresidual", in.s) : none,
                    in.want_dweight ? allocate_like(op, "dweight", *in.weight) : none,
                    in.want_dbias ? allocate_like(op, "dbias", *in.bias) : none};
  if (s.rows == 0 || s.columns == 0) {
    if (in.want_dweight) torch::stable::zero_(out.dweight);
    if (in.want_dbias) torch::stable::zero_(out.dbias);
    return out;
  }
  if (!give_dx && !give_dresidual && !in.want_dweight && !in.want_dbias) return out;

  p.dy = dy.tensor.const_data_ptr();
  p.dy_stride = dy.stride;
  if (dresidual_out) {
    p.dresidual_out = dresidual_out->tensor.const_data_ptr();
    p.dresidual_out_stride = dresidual_out->stride;
  }
  p.s = s.tensor.const_data_ptr();
  p.s_stride = s.stride;
  p.weight = pointer(weight);
  p.mean = pointer(mean);
  p.rstd = rstd.const_data_ptr();
  if (give_dx) p.dx = out.dx.mutable_data_ptr();
  if (give_dresidual) p.dresidual = out.dresidual.mutable_data_ptr();
  if (in.want_dweight) p.dweight = out.dweight.mutable_data_ptr();
  if (in.want_dbias) p.dbias = out.dbias.mutable_data_ptr();
  p.rows = s.rows;
  p.columns = s.columns;
  p.weight_offset = in.weight_offset;

  std::optional<Tensor> partials;
  const auto with_partials = [&](int64_t partial_rows) {
    const int64_t sums = in.want_dweight + in.want_dbias;
    if (!sums) return;
    const int64_t sizes[3] = {sums, partial_rows, s.columns};
    partials = allocate(op, "partial sums of dweight and dbias", sizes, 3, statistics_code(dtype), in.dy);
    char* base = static_cast<char*>(partials->mutable_data_ptr());
    if (in.want_dweight) p.dweight_partials = base;
    if (in.want_dbias)
      p.dbias_partials = base + (sums - 1) * partial_rows * s.columns * size_bytes(statistics_dtype(dtype));
  };
  run_on(
      op, in.dy,
      [&](void* stream) {
        int64_t partial_rows = 0;
        WARPSMITH_RETURN_IF_FAILED(Op::partial_rows_cuda(p, &partial_rows));
        with_partials(partial_rows);
        return Op::backward_cuda(p, stream);
      },
      [&](const Parallel& threads) {
        with_partials(norm_partial_rows_cpu(s.rows, s.columns));
        return Op::backward_cpu(p, threads);
      });
  return out;
}

}  // namespace warpsmith
