#include "bindings/support/library.h"
#include "bindings/support/linear_loss.h"

namespace warpsmith {
namespace {

constexpr const char* kOp = "linear_cross_entropy";
constexpr const char* kRowsBackward = "linear_cross_entropy_rows_backward";
constexpr const char* kScaled = "linear_cross_entropy_scaled";
constexpr const char* kScale = "linear_cross_entropy_scale_";
constexpr const char* kAdd = "linear_cross_entropy_add_";

void check_main_grad(const LinearInputs& in, const std::optional<Tensor>& main_grad) {
  if (!main_grad) return;
  check_tensor(in.op, "main_grad", *main_grad, real_dtype(in.dtype), {in.classes, in.width}, in.hidden);
  const auto strides = main_grad->strides();
  if ((in.width > 1 && strides[1] != 1) || (in.classes > 1 && strides[0] != in.width))
    refuse(in.op, "main_grad", "a contiguous tensor", "other strides");
}

using ForwardResults = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// Computes the loss, and for a reduced loss its gradients, which the backward only scales. Outputs that are not wanted
// have no elements. 16-bit gradients would underflow before a loss scale is applied: float16 gradients are therefore
// those of the sum, and `denominator` tells the backward what to divide by.
ForwardResults forward(Tensor hidden, Tensor weight, Tensor target, std::optional<Tensor> bias,
                       std::optional<Tensor> class_weight, int64_t ignore_index, int64_t reduction_number,
                       double label_smoothing, double z_loss, double softcap, bool check_labels, bool want_stats,
                       int64_t max_chunk_bytes, std::optional<ScalarType> dw_dtype, std::optional<Tensor> main_grad,
                       bool want_dhidden, bool want_dweight, bool want_dbias) {
  const LinearInputs in =
      linear_inputs(kOp, hidden, weight, target, bias, {ignore_index, label_smoothing, z_loss, softcap}, class_weight);
  const Reduction reduction = check_reduction(kOp, reduction_number);
  const bool reduced = reduction != Reduction::none;
  const WantedGradients wanted{reduced && want_dhidden, reduced && want_dweight, reduced && want_dbias};
  check_wanted(in, wanted);
  check_main_grad(in, main_grad);
  const LinearLossChunks chunks = chunks_of(in, max_chunk_bytes);
  const int32_t sum_dtype = weight_sum_dtype(in, dw_dtype, chunks.chunks);
  in.check_labels(check_labels);
  const OnDeviceOf device(in.hidden);

  const int32_t real = real_code(in.dtype), index = aoti_torch_dtype_int64();
  const Tensor row_loss = allocate_shaped(kOp, "loss", target, real);
  std::optional<Tensor> lse, argmax, partials;
  if (want_stats) {
    lse = allocate_shaped(kOp, "logsumexp", target, real);
    argmax = allocate_shaped(kOp, "argmax", target, index);
  }
  if (reduced || want_stats || in.class_weight) partials = allocate_partials(in);
  const Denominator before(in, reduction == Reduction::mean, partials);
  run_sums(in, before);

  const bool divide_later = in.dtype == Dtype::float16;
  GradientSums sums(in, wanted, sum_dtype);
  for_chunks(in, chunks, std::nullopt, [&](CrossEntropyParams& p, int64_t first, const Tensor& chunk) {
    make_logits(in, first, chunk);
    p.loss = at(row_loss, first);
    p.lse = at(lse, first);
    p.argmax = static_cast<int64_t*>(at(argmax, first));
    p.class_weight_total = const_at(before.class_weight_total);
    p.skip_ignored = !want_stats;
    if (wanted.any()) {
      p.dlogits = chunk.mutable_data_ptr();
      p.denominator = divide_later ? nullptr : const_at(before.denominator);
    }
    run_forward(in, p);
    if (wanted.any()) sums.add(first, chunk);
  });

  const Reduced after(in, reduction, row_loss, argmax, before.denominator, partials);
  run_sums(in, after);
  const auto or_nothing = [&](const std::optional<Tensor>& t, int32_t dtype) {
    return t ? *t : nothing(kOp, dtype, hidden);
  };
  return {after.loss.value_or(row_loss),
          or_nothing(lse, real),
          or_nothing(argmax, index),
          or_nothing(after.accuracy, real),
          or_nothing(wanted.any() && divide_later ? before.denominator : std::nullopt, real),
          sums.dhidden(),
          sums.dweight(),
          sums.dbias()};
}

// Gradients of unreduced losses, from logits computed once more. Their sums are computed once more too: a logsumexp
// kept in float32 is half an ulp off, and so would be every probability of its row. The weight gradient goes to
// main_grad if there is one.
std::tuple<Tensor, Tensor, Tensor> rows_backward_into(const Tensor& dloss, const Tensor& hidden, const Tensor& weight,
                                                      const Tensor& target, const std::optional<Tensor>& bias,
                                                      const std::optional<Tensor>& class_weight,
                                                      const LossOptions& options, int64_t max_chunk_bytes,
                                                      std::optional<ScalarType> dw_dtype,
                                                      const std::optional<Tensor>& main_grad, WantedGradients wanted) {
  const LinearInputs in = linear_inputs(kRowsBackward, hidden, weight, target, bias, options, class_weight);
  check_dtype(kRowsBackward, "dloss", dloss, real_dtype(in.dtype));
  check_same_shape(kRowsBackward, "dloss", dloss, target);
  check_same_device(kRowsBackward, "dloss", dloss, hidden);
  check_wanted(in, wanted);
  check_main_grad(in, main_grad);
  const LinearLossChunks chunks = chunks_of(in, max_chunk_bytes);
  const OnDeviceOf device(in.hidden);
  GradientSums sums(in, wanted, weight_sum_dtype(in, dw_dtype, chunks.chunks), main_grad);
  if (!wanted.any()) return sums.rounded();

  std::optional<Tensor> partials;
  if (in.class_weight) partials = allocate_partials(in);
  const Denominator total(in, false, partials);
  run_sums(in, total);
  const Tensor grad_loss = as_contiguous(dloss);
  for_chunks(in, chunks, std::nullopt, [&](CrossEntropyParams& p, int64_t first, const Tensor& chunk) {
    make_logits(in, first, chunk);
    p.class_weight_total = const_at(total.class_weight_total);
    p.grad_loss = const_at(grad_loss, first);
    p.grad_loss_stride = 1;
    p.dlogits = chunk.mutable_data_ptr();
    p.skip_ignored = true;
    run_forward(in, p);
    sums.add(first, chunk);
  });
  return sums.rounded();
}

std::tuple<Tensor, Tensor, Tensor> rows_backward(Tensor dloss, Tensor hidden, Tensor weight, Tensor target,
                                                 std::optional<Tensor> bias, std::optional<Tensor> class_weight,
                                                 int64_t ignore_index, double label_smoothing, double z_loss,
                                                 double softcap, int64_t max_chunk_bytes,
                                                 std::optional<ScalarType> dw_dtype, bool want_dhidden,
                                                 bool want_dweight, bool want_dbias) {
  return rows_backward_into(dloss, hidden, weight, target, bias, class_weight,
                            {ignore_index, label_smoothing, z_loss, softcap}, max_chunk_bytes, dw_dtype, std::nullopt,
                            {want_dhidden, want_dweight, want_dbias});
}

std::tuple<Tensor, Tensor> rows_backward_main_grad(Tensor dloss, Tensor hidden, Tensor weight, Tensor target,
                                                   std::optional<Tensor> bias, std::optional<Tensor> class_weight,
                                                   Tensor main_grad, int64_t ignore_index, double label_smoothing,
                                                   double z_loss, double softcap, int64_t max_chunk_bytes,
                                                   bool want_dhidden, bool want_dbias) {
  const auto [dhidden, dweight, dbias] = rows_backward_into(
      dloss, hidden, weight, target, bias, class_weight, {ignore_index, label_smoothing, z_loss, softcap},
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
  run_on<linear_finish_cuda, linear_finish_cpu>(op, x, p);
}

// x * factor / denominator, rounded to `dtype`.
Tensor scaled(Tensor x_any, Tensor factor, std::optional<Tensor> denominator, ScalarType dtype) {
  const Tensor x = as_contiguous(x_any);
  const int32_t code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  const Tensor out = allocate_shaped(kScaled, "scaled gradient", x, code);
  finish(kScaled, x, out, std::nullopt, factor, denominator);
  return out;
}

void scale(Tensor x, Tensor factor, std::optional<Tensor> denominator) {
  check_contiguous(kScale, "x", x);
  finish(kScale, x, x, std::nullopt, factor, denominator);
}

void add(Tensor sum, Tensor x, Tensor factor, std::optional<Tensor> denominator) {
  check_contiguous(kAdd, "x", x);
  check_contiguous(kAdd, "sum", sum);
  check_like(kAdd, "sum", sum, x, real_dtype(float_dtype(kAdd, "x", x)));
  finish(kAdd, x, std::nullopt, sum, factor, denominator);
}

WARPSMITH_OPS(m) {
  const std::string forward_inputs =
      "(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight, int ignore_index, int "
      "reduction, float label_smoothing, float z_loss, float softcap, bool check_labels, bool return_stats, int "
      "max_chunk_bytes, ScalarType? dw_dtype, Tensor? main_grad, bool want_dhidden, bool want_dweight, bool "
      "want_dbias) -> (Tensor loss, Tensor lse, Tensor argmax, Tensor accuracy, Tensor denominator, Tensor dhidden, "
      "Tensor dweight, Tensor dbias)";
  for (const char* name : {"linear_cross_entropy", "linear_cross_entropy_rows", "linear_cross_entropy_forward"})
    m.add(name + forward_inputs, TORCH_BOX(&forward));
  const std::string loss_inputs =
      "(Tensor dloss, Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight, ";
  m.add(
      "linear_cross_entropy_rows_backward" + loss_inputs +
          "int ignore_index, float label_smoothing, float z_loss, float softcap, int max_chunk_bytes, ScalarType? "
          "dw_dtype, bool want_dhidden, bool want_dweight, bool want_dbias) -> (Tensor dhidden, Tensor dweight, Tensor "
          "dbias)",
      TORCH_BOX(&rows_backward));
  m.add("linear_cross_entropy_rows_backward_main_grad" + loss_inputs +
            "Tensor(a!) main_grad, int ignore_index, float label_smoothing, float z_loss, float softcap, int "
            "max_chunk_bytes, bool want_dhidden, bool want_dbias) -> (Tensor dhidden, Tensor dbias)",
        TORCH_BOX(&rows_backward_main_grad));
  m.add("linear_cross_entropy_scaled(Tensor x, Tensor factor, Tensor? denominator, ScalarType dtype) -> Tensor scaled",
        TORCH_BOX(&scaled));
  m.add("linear_cross_entropy_scale_(Tensor(a!) x, Tensor factor, Tensor? denominator) -> ()", TORCH_BOX(&scale));
  m.add("linear_cross_entropy_add_(Tensor(a!) sum, Tensor(b!) x, Tensor factor, Tensor? denominator) -> ()",
        TORCH_BOX(&add));
}

}  // namespace
}  // namespace warpsmith
