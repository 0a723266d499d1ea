#pragma once
#include <algorithm>
#include <functional>

#include "kernels/cross_entropy/cross_entropy.h"
#include "kernels/linear_loss/linear_cross_entropy_config.h"
#include "kernels/linear_loss/linear_log_prob.h"
#include "torch/support/matmul.h"
#include "torch/support/rows.h"

// What the linear losses share: their inputs, the walk over chunks of rows, and the gradients that chunks add up to.
namespace warpsmith {

#ifdef WARPSMITH_CUDA
// Makes the device of a CUDA tensor current.
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const Tensor& t) {
    if (t.is_cuda()) guard_.emplace(t.get_device_index());
  }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};
#else
struct OnDeviceOf {
  explicit OnDeviceOf(const Tensor&) {}
};
#endif

inline int32_t real_code(Dtype dtype) {
  return dtype == Dtype::float64 ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
}
inline Dtype real_dtype(Dtype dtype) { return dtype == Dtype::float64 ? Dtype::float64 : Dtype::float32; }

inline Tensor allocate_shaped(const char* op, const char* argument, const Tensor& shape, int32_t dtype) {
  const auto sizes = shape.sizes();
  return allocate(op, argument, sizes.data(), static_cast<int64_t>(sizes.size()), dtype, shape);
}

inline Tensor allocate_scalar(const char* op, const char* argument, int32_t dtype, const Tensor& like) {
  return allocate(op, argument, nullptr, 0, dtype, like);
}

inline Tensor nothing(const char* op, int32_t dtype, const Tensor& like) {
  return allocate_vector(op, "no result", 0, dtype, like);
}

// The address of some element of a tensor that may be absent.
inline void* at(const std::optional<Tensor>& t, int64_t offset = 0) {
  if (!t) return nullptr;
  return static_cast<char*>(t->mutable_data_ptr()) + offset * static_cast<int64_t>(t->element_size());
}
inline const void* const_at(const std::optional<Tensor>& t, int64_t offset = 0) {
  if (!t) return nullptr;
  return static_cast<const char*>(t->const_data_ptr()) + offset * static_cast<int64_t>(t->element_size());
}

// The checked inputs of a linear loss, as matrices.
struct LinearInputs {
  const char* op;
  Dtype dtype;
  Tensor hidden_any;           // as it came: says what its gradient is like
  Tensor hidden;               // [rows, width], adjacent columns
  Tensor weight;               // [classes, width]
  Tensor target;               // [rows]
  std::optional<Tensor> bias;  // [classes]
  int64_t rows, width, classes;

  const int64_t* target_at(int64_t row) const { return static_cast<const int64_t*>(target.const_data_ptr()) + row; }

  template <class Cuda, class Cpu> void run(Cuda&& cuda, Cpu&& cpu) const { run_on(op, hidden, cuda, cpu); }
};

inline LinearInputs linear_inputs(const char* op, const Tensor& hidden, const Tensor& weight, const Tensor& target,
                                  const std::optional<Tensor>& bias) {
  const Dtype dtype = float_dtype(op, "hidden", hidden);
  const Rows rows = as_rows(op, "hidden", hidden);
  check_dtype(op, "weight", weight, dtype);
  if (weight.dim() != 2 || weight.size(1) != rows.columns || weight.size(0) < 1)
    refuse(op, "weight", "shape (V, " + std::to_string(rows.columns) + ") with V >= 1", shape_text(weight));
  check_same_device(op, "weight", weight, hidden);
  if (dtype_of(op, "target", target) != ScalarType::Long)
    refuse(op, "target", "int64", dtype_text(target.scalar_type()));
  bool same = target.dim() == hidden.dim() - 1;
  std::string expected;
  for (int64_t i = 0; i < hidden.dim() - 1; ++i) {
    same = same && target.size(i) == hidden.size(i);
    expected += (i ? ", " : "") + std::to_string(hidden.size(i));
  }
  if (!same) refuse(op, "target", "shape (" + expected + ")", shape_text(target));
  check_same_device(op, "target", target, hidden);
  const int64_t classes = weight.size(0);
  if (bias) {
    check_dtype(op, "bias", *bias, dtype);
    check_shape(op, "bias", *bias, {classes});
    check_same_device(op, "bias", *bias, hidden);
  }
  // Rows that overlap (expanded ones) are copied: a matrix product wants them apart.
  const bool apart = rows.stride >= rows.columns;
  const Tensor base = apart ? rows.tensor : as_contiguous(rows.tensor);
  const int64_t stride = apart ? rows.stride : rows.columns;
  return {op,
          dtype,
          hidden,
          matrix_view(base, 0, rows.rows, rows.columns, std::max<int64_t>(stride, 1)),
          weight,
          as_contiguous(target),
          bias ? std::optional<Tensor>(as_contiguous(*bias)) : std::nullopt,
          rows.rows,
          rows.columns,
          classes};
}

// Labels that are neither classes nor `ignore_index` are refused, naming the first. On CUDA this waits for the device,
// so it happens on request alone.
inline void check_labels(const LinearInputs& in, int64_t ignore_index, bool may_be_ignored) {
  Tensor target = in.target;
  if (target.is_cuda()) {
    const int64_t stride = 1;
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &in.rows, &stride, aoti_torch_dtype_int64(),
                                                    aoti_torch_device_type_cpu(), 0, &handle));
    Tensor copy(handle);
    target = torch::stable::copy_(copy, vector_view(in.target, 0, in.rows));
  }
  const auto* labels = static_cast<const int64_t*>(target.const_data_ptr());
  const int64_t bad = cross_entropy_first_bad_target_cpu(labels, in.rows, in.classes, ignore_index);
  if (bad < 0) return;
  refuse(in.op, "target",
         "classes in [0, " + std::to_string(in.classes) + ")" +
             (may_be_ignored ? " or ignore_index " + std::to_string(ignore_index) : ""),
         std::to_string(labels[bad]) + " at position " + std::to_string(bad));
}

inline LinearLossChunks chunks_of(const LinearInputs& in, int64_t max_chunk_bytes) {
  if (max_chunk_bytes < 0) refuse(in.op, "max_chunk_bytes", "an integer >= 1", std::to_string(max_chunk_bytes));
  return choose_linear_loss_chunks({in.rows, in.classes, size_bytes(in.dtype), max_chunk_bytes, in.hidden.is_cuda()});
}

// What fills a row up to whole vectors is zero: matrix products read it with the last classes, into results that nobody
// keeps.
inline Tensor allocate_logits(const LinearInputs& in, int64_t rows, const LinearLossChunks& chunks) {
  const int64_t sizes[2] = {rows, chunks.logits_stride}, rest = chunks.logits_stride - in.classes;
  Tensor logits = allocate(in.op, "logits", sizes, 2, dtype_code(in.hidden), in.hidden);
  if (rows > 0 && rest > 0) {
    Tensor filling = matrix_view(logits, in.classes, rows, rest, chunks.logits_stride);
    torch::stable::zero_(filling);
  }
  return logits;
}

// logits [rows, classes] = scale * (hidden rows from `first` on @ weight^T + bias)
inline void make_logits(const LinearInputs& in, int64_t first, const Tensor& logits, double scale = 1) {
  const int64_t stride = in.hidden.stride(0);
  const Tensor hidden = matrix_view(in.hidden, first * stride, logits.size(0), in.width, stride);
  const Tensor weight = matrix_view(in.weight, 0, in.width, in.classes, in.weight.stride(1), in.weight.stride(0));
  if (in.bias)
    multiply_add(logits, *in.bias, hidden, weight, scale);
  else
    multiply(logits, hidden, weight, scale);
}

struct WantedGradients {
  bool hidden = false, weight = false, bias = false;
  bool any() const { return hidden || weight || bias; }
};

// The gradients of a linear loss, to which each chunk of dlogits adds its part. The weight's is summed in `sum_dtype`
// or straight into `weight_sum`; the bias's in real.
class GradientSums {
 public:
  GradientSums(const LinearInputs& in, WantedGradients wanted, int32_t sum_dtype,
               std::optional<Tensor> weight_sum = std::nullopt)
      : in_(in), wanted_(wanted), holds_weight_(weight_sum.has_value()) {
    const int32_t dtype = dtype_code(in.hidden);
    dhidden_ =
        wanted.hidden ? allocate_like(in.op, "gradient of hidden", in.hidden_any) : nothing(in.op, dtype, in.hidden);
    const int64_t sizes[2] = {in.classes, in.width};
    dweight_ = weight_sum      ? *weight_sum
               : wanted.weight ? allocate(in.op, "gradient of weight", sizes, 2, sum_dtype, in.hidden)
                               : nothing(in.op, dtype, in.hidden);
    dbias_ = allocate_vector(in.op, "gradient of bias", wanted.bias ? in.classes : 0, real_code(in.dtype), in.hidden);
    if (in.rows > 0 && in.width > 0) return;
    if (wanted.weight && !holds_weight_) torch::stable::zero_(dweight_);
    if (wanted.hidden) torch::stable::zero_(dhidden_);
    if (wanted.bias && in.rows == 0) torch::stable::zero_(dbias_);
  }

  // dlogits: of the rows from `first` on, [rows, classes] with adjacent classes.
  void add(int64_t first, const Tensor& dlogits) {
    const int64_t rows = dlogits.size(0), stride = in_.hidden.stride(0);
    const bool more = first > 0;
    if (wanted_.hidden && in_.width > 0)
      multiply(matrix_view(dhidden_, first * in_.width, rows, in_.width, in_.width), dlogits, in_.weight);
    if (wanted_.weight && in_.width > 0)
      add_outer_products(in_.op, dweight_, dlogits, matrix_view(in_.hidden, first * stride, rows, in_.width, stride),
                         more || holds_weight_);
    if (wanted_.bias) add_column_sums(dlogits, more);
  }

  const Tensor& dhidden() const { return dhidden_; }
  const Tensor& dweight() const { return dweight_; }
  const Tensor& dbias() const { return dbias_; }

 private:
  void add_column_sums(const Tensor& dlogits, bool more) {
    ColumnSumsParams p{dlogits.const_data_ptr(),
                       dbias_.mutable_data_ptr(),
                       nullptr,
                       dlogits.size(0),
                       in_.classes,
                       dlogits.stride(0),
                       more,
                       in_.dtype};
    std::optional<Tensor> partials;
    in_.run(
        [&](void* stream) {
          int64_t slices = 0;
          WARPSMITH_RETURN_IF_FAILED(column_sums_slices_cuda(p, &slices));
          const int64_t sizes[2] = {slices > 1 ? slices : 0, in_.classes};
          partials =
              allocate(in_.op, "partial sums of the bias's gradient", sizes, 2, real_code(in_.dtype), in_.hidden);
          p.partials = partials->mutable_data_ptr();
          return column_sums_cuda(p, stream);
        },
        [&](const Parallel& threads) { return column_sums_cpu(p, threads); });
  }

  const LinearInputs& in_;
  WantedGradients wanted_;
  bool holds_weight_;
  Tensor dhidden_, dweight_, dbias_;
};

// The dtype in which the weight's gradient is summed: float32 where 16-bit chunks would round once each, unless the
// caller says otherwise.
inline int32_t weight_sum_dtype(const LinearInputs& in, std::optional<ScalarType> dw_dtype, int64_t chunks) {
  const int32_t own = dtype_code(in.hidden), wide = real_code(in.dtype);
  if (!dw_dtype) return chunks > 1 || in.dtype == Dtype::float16 ? wide : own;
  if (*dw_dtype == in.hidden.scalar_type()) return own;
  if (*dw_dtype != ScalarType::Float || in.dtype == Dtype::float64)
    refuse(in.op, "dw_dtype", std::string(name(in.dtype)) + (size_bytes(in.dtype) == 2 ? " or float32" : ""),
           dtype_text(*dw_dtype));
  return wide;
}

}  // namespace warpsmith
