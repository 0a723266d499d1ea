#include "kernels/cross_entropy/cross_entropy.h"

#include "bindings/support/library.h"
#include "bindings/support/loss.h"
#include "bindings/support/rows.h"

namespace warpsmith {
namespace {

constexpr const char *kOp = "cross_entropy", *kBackward = "cross_entropy_backward", *kScale = "cross_entropy_scale";

struct Inputs : LossRows {
  Rows logits;
  CrossEntropyParams params() const { return LossRows::params(logits.tensor, logits.stride, 0, rows); }
};

// Checks all inputs; returns the logits as rows.
Inputs checked(const char* op, const Tensor& logits, const Tensor& target, const std::optional<Tensor>& class_weight,
               const LossOptions& options) {
  const Dtype dtype = float_dtype(op, "logits", logits);
  const Rows rows = as_rows(op, "logits", logits);
  Inputs in{{op, dtype, check_target(op, target, logits), rows.rows, rows.columns, options, {}}, rows};
  if (in.classes == 0) refuse(op, "logits", "at least one class in the last dimension", "none");
  in.set_class_weight(class_weight);
  check_options(op, options, dtype);
  return in;
}

// Refuses logits that cannot hold their own gradient.
void check_writable_rows(const char* op, const Tensor& logits, const Rows& rows) {
  if (rows.tensor.const_data_ptr() != logits.const_data_ptr() || (rows.rows > 1 && rows.stride < rows.columns))
    refuse(op, "logits", "rows at one stride that do not overlap, to hold their gradient",
           "shape " + shape_text(logits) + " with other strides");
}

using Outputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using OutputsAndGradient = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// Runs the whole forward. `dlogits` may be the memory of the logits.
Outputs forward_into(const Inputs& in, int64_t reduction_number, bool stats, const std::optional<Tensor>& dlogits = {},
                     int64_t dlogits_stride = 0) {
  const Reduction reduction = check_reduction(kOp, reduction_number);
  in.check_labels();

  const int32_t real = real_code(in.dtype), index = aoti_torch_dtype_int64();
  const Tensor row_loss = allocate_shaped(kOp, "loss", in.target, real);
  const Tensor lse = allocate_shaped(kOp, "lse", in.target, real);
  const Tensor row_max = allocate_shaped(kOp, "row_max", in.target, real);
  const Tensor row_sum = allocate_shaped(kOp, "row_sum", in.target, real);
  std::optional<Tensor> argmax;
  if (stats) argmax = allocate_shaped(kOp, "argmax", in.target, index);
  const Tensor partials = allocate_partials(in);
  const Denominator before(in, reduction == Reduction::mean, partials);
  Reduced after(in, reduction, row_loss, argmax, before.denominator, partials);
  after.p.follows_forward = in.rows > 0;

  CrossEntropyParams p = in.params();
  p.loss = row_loss.mutable_data_ptr();
  p.lse = lse.mutable_data_ptr();
  p.argmax = static_cast<int64_t*>(at(argmax));
  p.row_max = row_max.mutable_data_ptr();
  p.row_sum = row_sum.mutable_data_ptr();
  p.skip_ignored = !stats;
  p.dlogits = at(dlogits);
  p.dlogits_stride = dlogits_stride;
  p.denominator = const_at(before.denominator);
  p.class_weight_total = const_at(before.class_weight_total);
  p.follows_denominator = before.wanted();
  in.run(
      [&](void* stream) {
        WARPSMITH_RETURN_IF_FAILED(before.cuda(stream));
        if (p.rows > 0) WARPSMITH_RETURN_IF_FAILED(cross_entropy_forward_cuda(p, stream));
        return after.cuda(stream);
      },
      [&](const Parallel& threads) {
        WARPSMITH_RETURN_IF_FAILED(before.cpu(threads));
        if (p.rows > 0) WARPSMITH_RETURN_IF_FAILED(cross_entropy_forward_cpu(p, threads));
        return after.cpu(threads);
      });
  const auto or_nothing = [&](const std::optional<Tensor>& t, int32_t dtype) {
    return t ? *t : nothing(kOp, dtype, in.target);
  };
  return {after.loss.value_or(row_loss),
          lse,
          or_nothing(argmax, index),
          or_nothing(after.accuracy, real),
          or_nothing(before.denominator, real),
          row_max,
          row_sum};
}

Outputs forward(Tensor logits, Tensor target, std::optional<Tensor> class_weight, int64_t ignore_index,
                int64_t reduction, double label_smoothing, double z_loss, double softcap, bool stats) {
  const Inputs in = checked(kOp, logits, target, class_weight, {ignore_index, label_smoothing, z_loss, softcap});
  return forward_into(in, reduction, stats);
}

// Under tracing nothing is overwritten: `inplace_backward` is ignored.
Outputs traced(Tensor logits, Tensor target, std::optional<Tensor> class_weight, int64_t ignore_index,
               int64_t reduction, double label_smoothing, double z_loss, double softcap, bool stats, bool) {
  return forward(logits, target, class_weight, ignore_index, reduction, label_smoothing, z_loss, softcap, stats);
}

OutputsAndGradient with_gradient(Tensor logits, Tensor target, std::optional<Tensor> class_weight, int64_t ignore_index,
                                 int64_t reduction, double label_smoothing, double z_loss, double softcap, bool stats) {
  const Inputs in = checked(kOp, logits, target, class_weight, {ignore_index, label_smoothing, z_loss, softcap});
  const Tensor dlogits = allocate_like(kOp, "dlogits", logits);
  return std::tuple_cat(forward_into(in, reduction, stats, dlogits, in.classes), std::tuple(dlogits));
}

Outputs with_gradient_inplace(Tensor logits, Tensor target, std::optional<Tensor> class_weight, int64_t ignore_index,
                              int64_t reduction, double label_smoothing, double z_loss, double softcap, bool stats) {
  const Inputs in = checked(kOp, logits, target, class_weight, {ignore_index, label_smoothing, z_loss, softcap});
  check_writable_rows(kOp, logits, in.logits);
  return forward_into(in, reduction, stats, in.logits.tensor, in.logits.stride);
}

void backward_into(const Inputs& in, const Tensor& dloss_any, const Tensor& row_max_any, const Tensor& row_sum_any,
                   const Tensor& denominator, bool late, const Tensor& dlogits, int64_t dlogits_stride) {
  const auto check = [&](const char* argument, const Tensor& t) {
    check_dtype(kBackward, argument, t, real_dtype(in.dtype));
    check_same_device(kBackward, argument, t, in.target);
  };
  check("dloss", dloss_any);
  if (late) check_shape(kBackward, "dloss", dloss_any, {});
  if (dloss_any.dim() != 0) check_same_shape(kBackward, "dloss", dloss_any, in.target);
  for (const auto& [argument, t] : {std::pair{"row_max", &row_max_any}, std::pair{"row_sum", &row_sum_any}}) {
    check(argument, *t);
    check_same_shape(kBackward, argument, *t, in.target);
  }
  check("denominator", denominator);
  if (in.rows == 0) return;

  const Tensor dloss = as_contiguous(dloss_any), row_max = as_contiguous(row_max_any),
               row_sum = as_contiguous(row_sum_any);
  std::optional<Tensor> partials;
  if (in.class_weight) partials = allocate_partials(in);
  const Denominator total(in, false, partials);
  CrossEntropyParams p = in.params();
  p.row_max = const_cast<void*>(row_max.const_data_ptr());
  p.row_sum = const_cast<void*>(row_sum.const_data_ptr());
  (late ? p.late_scale : p.grad_loss) = dloss.const_data_ptr();
  p.grad_loss_stride = dloss.dim() == 0 ? 0 : 1;
  p.denominator = denominator.numel() ? denominator.const_data_ptr() : nullptr;
  p.class_weight_total = const_at(total.class_weight_total);
  p.dlogits = dlogits.mutable_data_ptr();
  p.dlogits_stride = dlogits_stride;
  in.run(
      [&](void* stream) {
        WARPSMITH_RETURN_IF_FAILED(total.cuda(stream));
        return cross_entropy_backward_cuda(p, stream);
      },
      [&](const Parallel& threads) {
        WARPSMITH_RETURN_IF_FAILED(total.cpu(threads));
        return cross_entropy_backward_cpu(p, threads);
      });
}

Tensor backward(Tensor dloss, Tensor logits, Tensor target, std::optional<Tensor> class_weight, Tensor row_max,
                Tensor row_sum, Tensor denominator, bool late, int64_t ignore_index, double label_smoothing,
                double z_loss, double softcap) {
  const Inputs in = checked(kBackward, logits, target, class_weight, {ignore_index, label_smoothing, z_loss, softcap});
  Tensor dlogits = allocate_like(kBackward, "dlogits", logits);
  backward_into(in, dloss, row_max, row_sum, denominator, late, dlogits, in.classes);
  return dlogits;
}

void backward_inplace(Tensor dloss, Tensor logits, Tensor target, std::optional<Tensor> class_weight, Tensor row_max,
                      Tensor row_sum, Tensor denominator, bool late, int64_t ignore_index, double label_smoothing,
                      double z_loss, double softcap) {
  const Inputs in = checked(kBackward, logits, target, class_weight, {ignore_index, label_smoothing, z_loss, softcap});
  check_writable_rows(kBackward, logits, in.logits);
  backward_into(in, dloss, row_max, row_sum, denominator, late, in.logits.tensor, in.logits.stride);
}

// Scales a gradient by the upstream one. The factor stays on its device.
void scale_inplace(Tensor dlogits, Tensor factor) {
  const Dtype dtype = float_dtype(kScale, "dlogits", dlogits);
  check_tensor(kScale, "factor", factor, real_dtype(dtype), {}, dlogits);
  const Rows rows = as_rows(kScale, "dlogits", dlogits);
  check_writable_rows(kScale, dlogits, rows);
  if (rows.rows == 0 || rows.columns == 0) return;
  const CrossEntropyScaleParams p{
      rows.tensor.mutable_data_ptr(), factor.const_data_ptr(), rows.rows, rows.columns, rows.stride, dtype};
  run_on<cross_entropy_scale_cuda, cross_entropy_scale_cpu>(kScale, dlogits, p);
}

#define WARPSMITH_INPUTS                                                                                  \
  " logits, Tensor target, Tensor? class_weight, int ignore_index, int reduction, float label_smoothing," \
  " float z_loss, float softcap, bool stats"
#define WARPSMITH_OUTPUTS \
  "Tensor loss, Tensor lse, Tensor argmax, Tensor accuracy, Tensor denominator, Tensor row_max, Tensor row_sum"
#define WARPSMITH_BACKWARD_INPUTS                                                                                 \
  " logits, Tensor target, Tensor? class_weight, Tensor row_max, Tensor row_sum, Tensor denominator, bool late, " \
  "int ignore_index, float label_smoothing, float z_loss, float softcap"

WARPSMITH_OPS(m) {
  m.add("cross_entropy(Tensor" WARPSMITH_INPUTS ", bool inplace_backward) -> (" WARPSMITH_OUTPUTS ")",
        TORCH_BOX(&traced));
  m.add("cross_entropy_forward(Tensor" WARPSMITH_INPUTS ") -> (" WARPSMITH_OUTPUTS ")", TORCH_BOX(&forward));
  m.add("cross_entropy_with_gradient(Tensor" WARPSMITH_INPUTS ") -> (" WARPSMITH_OUTPUTS ", Tensor dlogits)",
        TORCH_BOX(&with_gradient));
  m.add("cross_entropy_with_gradient_(Tensor(a!)" WARPSMITH_INPUTS ") -> (" WARPSMITH_OUTPUTS ")",
        TORCH_BOX(&with_gradient_inplace));
  m.add("cross_entropy_backward(Tensor dloss, Tensor" WARPSMITH_BACKWARD_INPUTS ") -> Tensor dlogits",
        TORCH_BOX(&backward));
  m.add("cross_entropy_backward_(Tensor dloss, Tensor(a!)" WARPSMITH_BACKWARD_INPUTS ") -> ()",
        TORCH_BOX(&backward_inplace));
  m.add("cross_entropy_scale_(Tensor(a!) dlogits, Tensor factor) -> ()", TORCH_BOX(&scale_inplace));
}

}  // namespace
}  // namespace warpsmith
