#include "kernels/linear_loss/linear_cross_entropy.h"

#include <cmath>
#include <string>

#include "torch/support/library.h"
#include "torch/support/linear_loss.h"

namespace warpsmith {
namespace {

constexpr const char* kOp = "linear_cross_entropy";
constexpr const char* kRowsBackward = "linear_cross_entropy_rows_backward";
constexpr const char* kScaled = "linear_cross_entropy_scaled";
constexpr const char* kAdd = "linear_cross_entropy_add_";

// What defines the loss, but for the inputs of the product.
struct LossOptions {
  std::optional<Tensor> class_weight;
  int64_t ignore_index = -100;
  double label_smoothing = 0, z_loss = 0, softcap = 0;
};

struct Loss {
  const LinearInputs& in;
  LossOptions options;
  std::optional<Tensor> class_weight, class_weight_total, denominator;  // real
  bool mean;

  // Counts the rows, or their weights, before any logit exists.
  Loss(const LinearInputs& inputs, const LossOptions& o, bool is_mean) : in(inputs), options(o), mean(is_mean) {
    const int32_t real = real_code(in.dtype);
    if (o.class_weight) {
      const Dtype weights = float_dtype(in.op, "class_weight", *o.class_weight);
      if (weights != in.dtype && weights != real_dtype(in.dtype))
        refuse(in.op, "class_weight", std::string(name(in.dtype)) + (size_bytes(in.dtype) == 2 ? " or float32" : ""),
               name(weights));
      check_shape(in.op, "class_weight", *o.class_weight, {in.classes});
      check_same_device(in.op, "class_weight", *o.class_weight, in.hidden);
    }
    if (!(o.label_smoothing >= 0 && o.label_smoothing <= 1))
      refuse(in.op, "label_smoothing", "a number from 0 to 1", std::to_string(o.label_smoothing));
    for (const auto& [what, value] : {std::pair{"z_loss", o.z_loss}, std::pair{"softcap", o.softcap}})
      if (!(value >= 0 && std::isfinite(value))) refuse(in.op, what, "a finite number >= 0", std::to_string(value));
    if (o.class_weight) class_weight = as_contiguous(in_dtype(in.op, "class_weight", *o.class_weight, real));
    const bool total = class_weight && o.label_smoothing > 0;
    if (!mean && !total) return;
    if (mean) denominator = allocate_scalar(in.op, "denominator", real, in.hidden);
    if (total) class_weight_total = allocate_scalar(in.op, "sum of class weights", real, in.hidden);
    const Tensor partials = allocate_vector(in.op, "partial sums", kCrossEntropyPartials, real, in.hidden);
    CrossEntropyDenominatorParams p{};
    p.target = mean ? in.target_at(0) : nullptr;
    p.class_weight = const_at(class_weight);
    p.denominator = at(denominator);
    p.class_weight_total = at(class_weight_total);
    p.partials = partials.mutable_data_ptr();
    p.rows = in.rows;
    p.classes = in.classes;
    p.ignore_index = options.ignore_index;
    p.dtype = in.dtype;
    in.run([&](void* stream) { return cross_entropy_denominator_cuda(p, stream); },
           [&](const Parallel& threads) { return cross_entropy_denominator_cpu(p, threads); });
  }

  CrossEntropyParams of_rows(const Tensor& logits, int64_t first, int64_t stride) const {
    CrossEntropyParams p{};
    p.logits = logits.const_data_ptr();
    p.target = in.target_at(first);
    p.class_weight = const_at(class_weight);
    p.class_weight_total = const_at(class_weight_total);
    p.rows = logits.size(0);
    p.classes = in.classes;
    p.logits_stride = p.dlogits_stride = stride;
    p.ignore_index = options.ignore_index;
    p.softcap = options.softcap;
    p.label_smoothing = options.label_smoothing;
    p.z_loss = options.z_loss;
    p.dtype = in.dtype;
    return p;
  }
};

void check_main_grad(const LinearInputs& in, const std::optional<Tensor>& main_grad) {
  if (!main_grad) return;
  check_dtype(in.op, "main_grad", *main_grad, real_dtype(in.dtype));
  check_shape(in.op, "main_grad", *main_grad, {in.classes, in.width});
  check_same_device(in.op, "main_grad", *main_grad, in.hidden);
  const auto strides = main_grad->strides();
  if ((in.width > 1 && strides[1] != 1) || (in.classes > 1 && strides[0] != in.width))
    refuse(in.op, "main_grad", "a contiguous tensor", "other strides");
}

enum class Reduction { none, mean, sum };

Reduction reduction_of(const std::string& name) {
  if (name == "none") return Reduction::none;
  if (name == "mean") return Reduction::mean;
  if (name == "sum") return Reduction::sum;
  refuse(kOp, "reduction", "none, mean or sum", name);
}

using ForwardResults = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// The loss, and for a reduced one its gradients, which the backward only scales. 16-bit floats underflow where a loss
// scale has not come yet: float16 gradients stay those of the sum, and `denominator` tells the backward what to divide
// by. Otherwise it has no elements, nor has anything else that is not wanted.
ForwardResults forward(Tensor hidden, Tensor weight, Tensor target, std::optional<Tensor> bias,
                       std::optional<Tensor> class_weight, int64_t ignore_index, std::string reduction_name,
                       double label_smoothing, double z_loss, double softcap, bool labels_are_checked, bool want_stats,
                       int64_t max_chunk_bytes, std::optional<ScalarType> dw_dtype, std::optional<Tensor> main_grad,
                       bool want_dhidden, bool want_dweight, bool want_dbias) {
  const LinearInputs in = linear_inputs(kOp, hidden, weight, target, bias);
  const Reduction reduction = reduction_of(reduction_name);
  check_main_grad(in, main_grad);
  const LinearLossChunks chunks = chunks_of(in, max_chunk_bytes);
  const int32_t sum_dtype = weight_sum_dtype(in, dw_dtype, chunks.chunks);
  if (want_dbias && !bias) refuse(kOp, "bias", "a tensor when its gradient is wanted", "None");
  if (labels_are_checked || !in.target.is_cuda()) check_labels(in, ignore_index, true);
  const OnDeviceOf device(in.hidden);
  const bool reduced = reduction != Reduction::none;
  const Loss loss(in, {class_weight, ignore_index, label_smoothing, z_loss, softcap}, reduction == Reduction::mean);

  const int32_t real = real_code(in.dtype), index = aoti_torch_dtype_int64();
  const Tensor row_loss = allocate_shaped(kOp, "loss", target, real);
  const std::optional<Tensor> lse =
      want_stats ? std::optional(allocate_shaped(kOp, "logsumexp", target, real)) : std::nullopt;
  const std::optional<Tensor> argmax =
      want_stats ? std::optional(allocate_shaped(kOp, "argmax", target, index)) : std::nullopt;
  const WantedGradients wanted{reduced && want_dhidden, reduced && want_dweight, reduced && want_dbias};
  GradientSums sums(in, wanted, sum_dtype);

  const Tensor logits = allocate_logits(in, std::min(in.rows, chunks.chunk_rows), chunks);
  for (int64_t first = 0; first < in.rows; first += chunks.chunk_rows) {
    const int64_t rows = std::min(chunks.chunk_rows, in.rows - first);
    const Tensor chunk = matrix_view(logits, 0, rows, in.classes, chunks.logits_stride);
    make_logits(in, first, chunk);
    CrossEntropyParams p = loss.of_rows(chunk, first, chunks.logits_stride);
    p.loss = at(row_loss, first);
    p.lse = at(lse, first);
    p.argmax = static_cast<int64_t*>(at(argmax, first));
    p.skip_ignored = !want_stats;
    if (wanted.any()) {
      p.dlogits = chunk.mutable_data_ptr();
      p.denominator = in.dtype == Dtype::float16 ? nullptr : const_at(loss.denominator);
    }
    in.run([&](void* stream) { return cross_entropy_forward_cuda(p, stream); },
           [&](const Parallel& threads) { return cross_entropy_forward_cpu(p, threads); });
    if (wanted.any()) sums.add(first, chunk);
  }

  const std::optional<Tensor> total =
      reduced ? std::optional(allocate_scalar(kOp, "loss", real, hidden)) : std::nullopt;
  const std::optional<Tensor> accuracy =
      want_stats ? std::optional(allocate_scalar(kOp, "accuracy", real, hidden)) : std::nullopt;
  if (total || accuracy) {
    const Tensor partials = allocate_vector(kOp, "partial sums", kCrossEntropyPartials, real, hidden);
    CrossEntropyReduceParams p{};
    p.loss = row_loss.const_data_ptr();
    p.denominator = const_at(loss.denominator);
    p.target = in.target_at(0);
    p.argmax = static_cast<const int64_t*>(const_at(argmax));
    p.total = at(total);
    p.accuracy = at(accuracy);
    p.partials = partials.mutable_data_ptr();
    p.rows = in.rows;
    p.ignore_index = ignore_index;
    p.dtype = in.dtype;
    in.run([&](void* stream) { return cross_entropy_reduce_cuda(p, stream); },
           [&](const Parallel& threads) { return cross_entropy_reduce_cpu(p, threads); });
  }
  const auto or_nothing = [&](const std::optional<Tensor>& t, int32_t dtype) {
    return t ? *t : nothing(kOp, dtype, hidden);
  };
  const bool divide_later = wanted.any() && in.dtype == Dtype::float16;
  return {reduced ? *total : row_loss,
          or_nothing(lse, real),
          or_nothing(argmax, index),
          or_nothing(accuracy, real),
          or_nothing(divide_later ? loss.denominator : std::nullopt, real),
          sums.dhidden(),
          sums.dweight(),
          sums.dbias()};
}

// Gradients of rows of losses, from logits made once more; their sums too, because a logsumexp kept in float32 is half
// an ulp off, and with it every probability of its row. The weight's goes into main_grad where there is one.
std::tuple<Tensor, Tensor, Tensor> rows_backward_into(const Tensor& dloss, const Tensor& hidden, const Tensor& weight,
                                                      const Tensor& target, const std::optional<Tensor>& bias,
                                                      const LossOptions& options, int64_t max_chunk_bytes,
                                                      std::optional<ScalarType> dw_dtype,
                                                      const std::optional<Tensor>& main_grad, WantedGradients wanted) {
  const LinearInputs in = linear_inputs(kRowsBackward, hidden, weight, target, bias);
  check_dtype(kRowsBackward, "dloss", dloss, real_dtype(in.dtype));
  check_same_shape(kRowsBackward, "dloss", dloss, target);
  check_same_device(kRowsBackward, "dloss", dloss, hidden);
  check_main_grad(in, main_grad);
  if (wanted.bias && !bias) refuse(kRowsBackward, "bias", "a tensor when its gradient is wanted", "None");
  const LinearLossChunks chunks = chunks_of(in, max_chunk_bytes);
  const OnDeviceOf device(in.hidden);
  const Loss loss(in, options, false);
  const Tensor grad_loss = as_contiguous(dloss);

  GradientSums sums(in, wanted, weight_sum_dtype(in, dw_dtype, chunks.chunks), main_grad);
  if (wanted.any() && in.rows > 0) {
    const Tensor buffer = allocate_logits(in, std::min(in.rows, chunks.chunk_rows), chunks);
    for (int64_t first = 0; first < in.rows; first += chunks.chunk_rows) {
      const int64_t rows = std::min(chunks.chunk_rows, in.rows - first);
      const Tensor chunk = matrix_view(buffer, 0, rows, in.classes, chunks.logits_stride);
      make_logits(in, first, chunk);
      CrossEntropyParams p = loss.of_rows(chunk, first, chunks.logits_stride);
      p.grad_loss = const_at(grad_loss, first);
      p.grad_loss_stride = 1;
      p.dlogits = chunk.mutable_data_ptr();
      p.skip_ignored = true;
      in.run([&](void* stream) { return cross_entropy_forward_cuda(p, stream); },
             [&](const Parallel& threads) { return cross_entropy_forward_cpu(p, threads); });
      sums.add(first, chunk);
    }
  }
  const int32_t own = dtype_code(hidden);
  return {sums.dhidden(),
          main_grad ? nothing(kRowsBackward, own, hidden)
                    : in_dtype(kRowsBackward, "gradient of weight", sums.dweight(), own),
          in_dtype(kRowsBackward, "gradient of bias", sums.dbias(), own)};
}

std::tuple<Tensor, Tensor, Tensor> rows_backward(Tensor dloss, Tensor hidden, Tensor weight, Tensor target,
                                                 std::optional<Tensor> bias, std::optional<Tensor> class_weight,
                                                 int64_t ignore_index, double label_smoothing, double z_loss,
                                                 double softcap, int64_t max_chunk_bytes,
                                                 std::optional<ScalarType> dw_dtype, bool want_dhidden,
                                                 bool want_dweight, bool want_dbias) {
  return rows_backward_into(dloss, hidden, weight, target, bias,
                            {class_weight, ignore_index, label_smoothing, z_loss, softcap}, max_chunk_bytes, dw_dtype,
                            std::nullopt, {want_dhidden, want_dweight, want_dbias});
}

std::tuple<Tensor, Tensor> rows_backward_main_grad(Tensor dloss, Tensor hidden, Tensor weight, Tensor target,
                                                   std::optional<Tensor> bias, std::optional<Tensor> class_weight,
                                                   Tensor main_grad, int64_t ignore_index, double label_smoothing,
                                                   double z_loss, double softcap, int64_t max_chunk_bytes,
                                                   bool want_dhidden, bool want_dbias) {
  const auto [dhidden, dweight, dbias] = rows_backward_into(
      dloss, hidden, weight, target, bias, {class_weight, ignore_index, label_smoothing, z_loss, softcap},
      max_chunk_bytes, std::nullopt, main_grad, {want_dhidden, true, want_dbias});
  return {dhidden, dbias};
}

void check_factor(const char* op, const char* what, const Tensor& factor, const Tensor& x, Dtype dtype) {
  check_dtype(op, what, factor, real_dtype(dtype));
  if (factor.numel() != 1) refuse(op, what, "one element", shape_text(factor));
  check_same_device(op, what, factor, x);
}

void check_contiguous(const char* op, const char* what, const Tensor& t) {
  if (!t.is_contiguous()) refuse(op, what, "a contiguous tensor", "other strides");
}

void finish(const char* op, const Tensor& x, const std::optional<Tensor>& out, const std::optional<Tensor>& sum,
            const Tensor& factor, const std::optional<Tensor>& denominator) {
  const Dtype dtype = float_dtype(op, "x", x);
  check_factor(op, "factor", factor, x, dtype);
  if (denominator) check_factor(op, "denominator", *denominator, x, dtype);
  const OnDeviceOf device(x);
  const LinearFinishParams p{x.mutable_data_ptr(),  at(out),   at(sum), factor.const_data_ptr(),
                             const_at(denominator), x.numel(), dtype,   out ? float_dtype(op, "out", *out) : dtype};
  run_on(
      op, x, [&](void* stream) { return linear_finish_cuda(p, stream); },
      [&](const Parallel& threads) { return linear_finish_cpu(p, threads); });
}

// x * factor / denominator, rounded to `dtype`.
Tensor scaled(Tensor x_any, Tensor factor, std::optional<Tensor> denominator, ScalarType dtype) {
  const Tensor x = as_contiguous(x_any);
  const auto sizes = x.sizes();
  const int32_t code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  const Tensor out = allocate(kScaled, "scaled gradient", sizes.data(), static_cast<int64_t>(sizes.size()), code, x);
  finish(kScaled, x, out, std::nullopt, factor, denominator);
  return out;
}

void scale(Tensor x, Tensor factor, std::optional<Tensor> denominator) {
  check_contiguous("linear_cross_entropy_scale_", "x", x);
  finish("linear_cross_entropy_scale_", x, x, std::nullopt, factor, denominator);
}

void add(Tensor sum, Tensor x, Tensor factor, std::optional<Tensor> denominator) {
  check_contiguous(kAdd, "x", x);
  check_contiguous(kAdd, "sum", sum);
  check_dtype(kAdd, "sum", sum, real_dtype(float_dtype(kAdd, "x", x)));
  check_same_shape(kAdd, "sum", sum, x);
  check_same_device(kAdd, "sum", sum, x);
  finish(kAdd, x, std::nullopt, sum, factor, denominator);
}

WARPSMITH_SCHEMAS(m) {
  const std::string forward_inputs =
      "(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight, int ignore_index, str "
      "reduction, float label_smoothing, float z_loss, float softcap, bool check_labels, bool return_stats, int "
      "max_chunk_bytes, ScalarType? dw_dtype, Tensor? main_grad, bool want_dhidden, bool want_dweight, bool "
      "want_dbias) -> (Tensor loss, Tensor lse, Tensor argmax, Tensor accuracy, Tensor denominator, Tensor dhidden, "
      "Tensor dweight, Tensor dbias)";
  for (const char* name : {"linear_cross_entropy", "linear_cross_entropy_rows", "linear_cross_entropy_forward"})
    m.def((name + forward_inputs).c_str());
  const std::string loss_inputs =
      "(Tensor dloss, Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight, ";
  m.def(("linear_cross_entropy_rows_backward" + loss_inputs +
         "int ignore_index, float label_smoothing, float z_loss, float softcap, int max_chunk_bytes, ScalarType? "
         "dw_dtype, bool want_dhidden, bool want_dweight, bool want_dbias) -> (Tensor dhidden, Tensor dweight, Tensor "
         "dbias)")
            .c_str());
  m.def(("linear_cross_entropy_rows_backward_main_grad" + loss_inputs +
         "Tensor(a!) main_grad, int ignore_index, float label_smoothing, float z_loss, float softcap, int "
         "max_chunk_bytes, bool want_dhidden, bool want_dbias) -> (Tensor dhidden, Tensor dbias)")
            .c_str());
  m.def("linear_cross_entropy_scaled(Tensor x, Tensor factor, Tensor? denominator, ScalarType dtype) -> Tensor scaled");
  m.def("linear_cross_entropy_scale_(Tensor(a!) x, Tensor factor, Tensor? denominator) -> ()");
  m.def("linear_cross_entropy_add_(Tensor(a!) sum, Tensor(b!) x, Tensor factor, Tensor? denominator) -> ()");
}

WARPSMITH_IMPLEMENTATIONS(m) {
  m.impl("linear_cross_entropy", TORCH_BOX(&forward));
  m.impl("linear_cross_entropy_rows", TORCH_BOX(&forward));
  m.impl("linear_cross_entropy_forward", TORCH_BOX(&forward));
  m.impl("linear_cross_entropy_rows_backward", TORCH_BOX(&rows_backward));
  m.impl("linear_cross_entropy_rows_backward_main_grad", TORCH_BOX(&rows_backward_main_grad));
  m.impl("linear_cross_entropy_scaled", TORCH_BOX(&scaled));
  m.impl("linear_cross_entropy_scale_", TORCH_BOX(&scale));
  m.impl("linear_cross_entropy_add_", TORCH_BOX(&add));
}

}  // namespace
}  // namespace warpsmith
