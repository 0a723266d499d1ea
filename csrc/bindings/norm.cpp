#include "kernels/norm/norm.h"

#include <optional>
#include <string>

#include "bindings/support/device.h"
#include "bindings/support/dropout.h"
#include "bindings/support/library.h"
#include "bindings/support/quantize.h"
#include "bindings/support/rows.h"
#include "bindings/support/tensor.h"

namespace warpsmith {
namespace {

// The bindings of the norm family: checks, outputs, params and launch.

Tensor check_statistics(const char* op, const char* argument, const Tensor& t, Dtype dtype, int64_t rows,
                        const Tensor& like) {
  check_tensor(op, argument, t, real_dtype(dtype), {rows}, like);
  return as_contiguous(t);
}

struct NormInputs {
  Tensor x;
  OptionalTensor residual = {}, weight = {}, bias = {};  // present if the op's row has them
  OptionalTensor seed = {};                              // none: no dropout
  double p = 0, eps = 0, weight_offset = 0;
  bool as_added = false;
};

struct NormOutputs {
  Tensor y, residual_out, mean, rstd;  // outputs that the op lacks or that are not wanted have no storage
  std::optional<RowsCast> cast;
};

// What an op gives beside its public outputs.
enum class NormKind { inference, forward, fp8 };

// The backward of 8-bit layers casts the sum that add_rms_norm normed once more. `as_added`: a row is added up in the
// order of add_rms_norm, so that the bits are equal.
constexpr bool is_made_again(Norm op, NormKind kind) { return op == Norm::rms_norm && kind == NormKind::fp8; }

NormOutputs norm_forward(Norm norm, const NormInputs& in, NormKind kind) {
  const bool with_statistics = kind != NormKind::inference, with_cast = kind == NormKind::fp8;
  const char* const op = name(norm);
  const Dtype dtype = with_cast ? narrow_dtype(op, "x", in.x) : float_dtype(op, "x", in.x);
  const Rows x = as_rows(op, "x", in.x);
  NormForwardParams p;
  p.op = norm;
  p.dtype = p.residual_dtype = dtype;
  std::optional<Rows> residual;
  if (in.residual) {
    p.residual_dtype = check_dtype_beside(op, "residual", *in.residual, dtype);
    check_same_shape(op, "residual", *in.residual, in.x);
    check_same_device(op, "residual", *in.residual, in.x);
    residual = as_rows(op, "residual", *in.residual);
  }
  p.weight_dtype = check_pair(op, "weight", in.weight, "bias", in.bias, in.x, dtype, x.columns);
  check_eps(op, in.eps);
  check_finite(op, "weight_offset", in.weight_offset, dtype);
  p.dropout = check_dropout(op, in.seed, in.p, in.x);
  const OptionalTensor weight = as_contiguous(in.weight), bias = as_contiguous(in.bias);

  NormOutputs out;
  out.y = allocate_like(op, "y", in.x);
  if (residual) out.residual_out = allocate_like(op, "residual_out", *in.residual);
  const bool with_mean = with_statistics && row_of(norm).layer;
  if (with_mean) out.mean = allocate_vector(op, "mean", x.rows, real_code(dtype), in.x);
  if (with_statistics) out.rstd = allocate_vector(op, "rstd", x.rows, real_code(dtype), in.x);
  if (with_cast) {
    out.cast = new_rows_cast(op, out.y, dtype, x.rows, x.columns);
    p.cast = out.cast->to;
  }
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
  p.weight = const_at(weight);
  p.bias = const_at(bias);
  p.y = out.y.mutable_data_ptr();
  if (with_mean) p.mean = out.mean.mutable_data_ptr();
  if (with_statistics) p.rstd = out.rstd.mutable_data_ptr();
  p.rows = x.rows;
  p.columns = x.columns;
  p.eps = in.eps;
  p.weight_offset = in.weight_offset;
  p.as_added = in.as_added;
  run_on(
      op, in.x,
      [&](void* stream) {
        bool has_cast = false;
        WARPSMITH_RETURN_IF_FAILED(norm_forward_cuda(p, stream, &has_cast));
        return has_cast || !with_cast ? Status() : quantize_cuda(out.cast->behind, stream);
      },
      [&](const Parallel& threads) {
        WARPSMITH_RETURN_IF_FAILED(norm_forward_cpu(p, threads));
        return with_cast ? quantize_cpu(out.cast->behind, threads) : Status();
      });
  return out;
}

struct NormGradientInputs {
  Tensor dy;
  OptionalTensor dresidual_out = {};
  Tensor s;  // x, or residual_out of an op with a residual
  OptionalTensor weight = {}, bias = {}, mean = {};
  Tensor rstd;
  OptionalTensor seed = {};  // the forward's seed
  double p = 0, weight_offset = 0;
  bool want_dx = false, want_dresidual = false, want_dweight = false, want_dbias = false;
};

struct NormGradients {
  Tensor dx, dresidual, dweight, dbias;
};

// Gradients that are not wanted have zero elements. So does dresidual if it equals dx (no dropout, one dtype): then dx
// stands for both, and is computed if either is wanted.
NormGradients norm_backward(Norm norm, const NormGradientInputs& in) {
  const char* const op = backward_name(norm);
  const bool residual = row_of(norm).residual;
  const char* const s_name = residual ? "residual_out" : "x";
  const Dtype dtype = float_dtype(op, "dy", in.dy);
  NormBackwardParams p;
  p.op = norm;
  p.dtype = dtype;
  if (residual)
    p.residual_dtype = check_dtype_beside(op, s_name, in.s, dtype);
  else
    check_dtype(op, s_name, in.s, p.residual_dtype = dtype);
  check_same_shape(op, s_name, in.s, in.dy);
  check_same_device(op, s_name, in.s, in.dy);
  const Rows s = as_rows(op, s_name, in.s), dy = as_rows(op, "dy", in.dy);
  std::optional<Rows> dresidual_out;
  if (in.dresidual_out) {
    check_like(op, "dresidual_out", *in.dresidual_out, in.dy, p.residual_dtype);
    dresidual_out = as_rows(op, "dresidual_out", *in.dresidual_out);
  }
  p.weight_dtype = check_pair(op, "weight", in.weight, "bias", in.bias, in.dy, dtype, s.columns);
  if (in.want_dweight && !in.weight) refuse(op, "weight", "a tensor when its gradient is wanted", "None");
  if (in.want_dbias && !in.bias) refuse(op, "bias", "a tensor when its gradient is wanted", "None");
  OptionalTensor mean;
  if (in.mean) mean = check_statistics(op, "mean", *in.mean, dtype, s.rows, in.dy);
  const Tensor rstd = check_statistics(op, "rstd", in.rstd, dtype, s.rows, in.dy);
  const OptionalTensor weight = as_contiguous(in.weight);

  p.dropout = check_dropout(op, in.seed, in.p, in.dy);
  const bool one_for_both = residual && p.residual_dtype == dtype && !in.seed;
  const bool give_dx = in.want_dx || (one_for_both && in.want_dresidual);
  const bool give_dresidual = in.want_dresidual && !one_for_both;
  const Tensor none = nothing(op, dtype_code(in.dy), in.dy);
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
  p.weight = const_at(weight);
  p.mean = const_at(mean);
  p.rstd = rstd.const_data_ptr();
  if (give_dx) p.dx = out.dx.mutable_data_ptr();
  if (give_dresidual) p.dresidual = out.dresidual.mutable_data_ptr();
  if (in.want_dweight) p.dweight = out.dweight.mutable_data_ptr();
  if (in.want_dbias) p.dbias = out.dbias.mutable_data_ptr();
  p.rows = s.rows;
  p.columns = s.columns;
  p.weight_offset = in.weight_offset;

  OptionalTensor partials;
  const auto with_partials = [&](int64_t partial_rows) {
    const int64_t sums = in.want_dweight + in.want_dbias;
    if (!sums) return;
    const int64_t sizes[3] = {sums, partial_rows, s.columns};
    partials = allocate(op, "partial sums of dweight and dbias", sizes, 3, real_code(dtype), in.dy);
    char* base = static_cast<char*>(partials->mutable_data_ptr());
    if (in.want_dweight) p.dweight_partials = base;
    if (in.want_dbias) p.dbias_partials = base + (sums - 1) * partial_rows * s.columns * size_bytes(real_dtype(dtype));
  };
  run_with_partials<NormBackwardParams, norm_partial_rows_cuda, norm_backward_cuda, norm_backward_cpu>(
      op, in.dy, p, norm_partial_rows_cpu(s.rows, s.columns), with_partials);
  return out;
}

// The raw ops of all rows are boxed functions. They read their arguments in the order of the schemas below.

class Arguments {
 public:
  explicit Arguments(StableIValue* stack) : next_(stack) {}
  template <class T> T read() { return torch::stable::detail::to<T>(*next_++); }
  template <class T> T read_if(bool there) { return there ? read<T>() : T(); }
  OptionalTensor read_tensor_if(bool there) { return there ? OptionalTensor(read<Tensor>()) : std::nullopt; }

 private:
  StableIValue* next_;
};

class Results {
 public:
  explicit Results(StableIValue* stack) : next_(stack) {}
  void write(const Tensor& t) { *next_++ = torch::stable::detail::from(t); }

 private:
  StableIValue* next_;
};

template <Norm op, NormKind kind> void forward(StableIValue* stack, uint64_t, uint64_t) {
  constexpr NormRow row = row_of(op);
  Arguments arguments(stack);
  const NormInputs in{.x = arguments.read<Tensor>(),
                      .residual = arguments.read_tensor_if(row.residual),
                      .weight = arguments.read<OptionalTensor>(),
                      .bias = arguments.read_if<OptionalTensor>(row.layer),
                      .seed = arguments.read_if<OptionalTensor>(row.dropout),
                      .p = arguments.read_if<double>(row.dropout),
                      .eps = arguments.read<double>(),
                      .weight_offset = arguments.read_if<double>(!row.layer),
                      .as_added = arguments.read_if<bool>(is_made_again(op, kind))};
  const NormOutputs out = norm_forward(op, in, kind);
  Results results(stack);
  results.write(out.y);
  if (row.residual) results.write(out.residual_out);
  if (kind != NormKind::inference && row.layer) results.write(out.mean);
  if (kind != NormKind::inference) results.write(out.rstd);
  if (kind != NormKind::fp8) return;
  for (const Tensor* t : {&out.cast->data, &out.cast->scale, &out.cast->counts}) results.write(*t);
}

template <Norm op> void backward(StableIValue* stack, uint64_t, uint64_t) {
  constexpr NormRow row = row_of(op);
  Arguments arguments(stack);
  const NormGradientInputs in{.dy = arguments.read<Tensor>(),
                              .dresidual_out = arguments.read_if<OptionalTensor>(row.residual),
                              .s = arguments.read<Tensor>(),
                              .weight = arguments.read<OptionalTensor>(),
                              .bias = arguments.read_if<OptionalTensor>(row.layer),
                              .mean = arguments.read_tensor_if(row.layer),
                              .rstd = arguments.read<Tensor>(),
                              .seed = arguments.read_if<OptionalTensor>(row.dropout),
                              .p = arguments.read_if<double>(row.dropout),
                              .weight_offset = arguments.read_if<double>(!row.layer),
                              .want_dx = arguments.read<bool>(),
                              .want_dresidual = arguments.read_if<bool>(row.residual),
                              .want_dweight = arguments.read<bool>(),
                              .want_dbias = arguments.read_if<bool>(row.layer)};
  const NormGradients out = norm_backward(op, in);
  Results results(stack);
  results.write(out.dx);
  if (row.residual) results.write(out.dresidual);
  results.write(out.dweight);
  if (row.layer) results.write(out.dbias);
}

// g++ 12 does not instantiate a function whose address only a template takes.
#define WARPSMITH_ROW(op, ...)                                                             \
  template void forward<Norm::op, NormKind::inference>(StableIValue*, uint64_t, uint64_t); \
  template void forward<Norm::op, NormKind::forward>(StableIValue*, uint64_t, uint64_t);   \
  template void backward<Norm::op>(StableIValue*, uint64_t, uint64_t);
WARPSMITH_NORM_OPS(WARPSMITH_ROW)
#undef WARPSMITH_ROW
// Dropout has no form with a cast.
#define WARPSMITH_ROW(op, layer, residual, dropout) \
  WARPSMITH_UNLESS_##dropout(template void forward<Norm::op, NormKind::fp8>(StableIValue*, uint64_t, uint64_t);)
WARPSMITH_NORM_OPS(WARPSMITH_ROW)
#undef WARPSMITH_ROW

std::string text_if(bool there, const char* text) { return there ? text : ""; }

std::string forward_signature(Norm op, NormKind kind) {
  const bool with_statistics = kind != NormKind::inference, with_cast = kind == NormKind::fp8;
  const auto [layer, residual, dropout] = row_of(op);
  return "(Tensor x, " + text_if(residual, "Tensor residual, ") + "Tensor? weight, " +
         text_if(layer, "Tensor? bias, ") + text_if(dropout, "Tensor? seed, float p, ") + "float eps" +
         text_if(!layer, ", float weight_offset") + text_if(is_made_again(op, kind), ", bool as_added=False") +
         ") -> (Tensor y" + text_if(residual, ", Tensor residual_out") +
         text_if(with_statistics && layer, ", Tensor mean") + text_if(with_statistics, ", Tensor rstd") +
         text_if(with_cast, ", Tensor data, Tensor scale, Tensor counts") + ")";
}

std::string backward_schema(Norm op) {
  const auto [layer, residual, dropout] = row_of(op);
  return std::string(backward_name(op)) + "(Tensor dy, " +
         (residual ? "Tensor? dresidual_out, Tensor residual_out, " : "Tensor x, ") + "Tensor? weight, " +
         text_if(layer, "Tensor? bias, Tensor mean, ") + "Tensor rstd, " + text_if(dropout, "Tensor? seed, float p, ") +
         text_if(!layer, "float weight_offset, ") + "bool want_dx, " + text_if(residual, "bool want_dresidual, ") +
         "bool want_dweight" + text_if(layer, ", bool want_dbias") + ") -> (Tensor dx, " +
         text_if(residual, "Tensor dresidual, ") + "Tensor dweight" + text_if(layer, ", Tensor dbias") + ")";
}

WARPSMITH_OPS(m) {
#define WARPSMITH_ROW(op, ...)                                                                                         \
  m.add_forward(#op, forward_signature(Norm::op, NormKind::forward), &forward<Norm::op, NormKind::forward>);           \
  m.add(#op "_inference" + forward_signature(Norm::op, NormKind::inference), &forward<Norm::op, NormKind::inference>); \
  m.add(backward_schema(Norm::op), &backward<Norm::op>);
  WARPSMITH_NORM_OPS(WARPSMITH_ROW)
#undef WARPSMITH_ROW
#define WARPSMITH_ROW(op, layer, residual, dropout) \
  WARPSMITH_UNLESS_##dropout(                       \
      m.add(#op "_fp8" + forward_signature(Norm::op, NormKind::fp8), &forward<Norm::op, NormKind::fp8>);)
  WARPSMITH_NORM_OPS(WARPSMITH_ROW)
#undef WARPSMITH_ROW
}

}  // namespace
}  // namespace warpsmith
