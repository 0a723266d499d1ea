#include "kernels/cross_entropy/cross_entropy.h"

#include <cmath>

#include "torch/support/device.h"
#include "torch/support/library.h"
#include "torch/support/rows.h"
#include "torch/support/tensor.h"

namespace warpsmith {
namespace {

constexpr const char* kOp = "cross_entropy";
constexpr const char* kBackward = "cross_entropy_backward";
constexpr const char* kScale = "cross_entropy_scale";

// As torch numbers them.
enum Reduction : int64_t { kNone = 0, kMean = 1, kSum = 2 };

int32_t real_dtype(Dtype dtype) {
  return dtype == Dtype::float64 ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
}

struct Options {
  int64_t ignore_index;
  double label_smoothing, z_loss, softcap;
};

void check_options(const char* op, const Options& o) {
  if (!(o.label_smoothing >= 0 && o.label_smoothing <= 1))
    refuse(op, "label_smoothing", "a number from 0 to 1", std::to_string(o.label_smoothing));
  for (const auto& [what, value] : {std::pair{"z_loss", o.z_loss}, std::pair{"softcap", o.softcap}})
    if (!(value >= 0 && std::isfinite(value))) refuse(op, what, "a finite number >= 0", std::to_string(value));
}

// Logits as rows, with the other inputs checked against them.
struct Inputs {
  Dtype dtype;
  Rows rows;
  Tensor target;
  std::optional<Tensor> class_weight;

  Inputs(const char* op, const Tensor& logits, const Tensor& target_any, const std::optional<Tensor>& weight)
      : dtype(float_dtype(op, "logits", logits)), rows(as_rows(op, "logits", logits)) {
    if (dtype_of(op, "target", target_any) != ScalarType::Long)
      refuse(op, "target", "int64 class indices", dtype_text(target_any.scalar_type()));
    bool same = target_any.dim() == logits.dim() - 1;
    std::string expected;
    for (int64_t i = 0; i < logits.dim() - 1; ++i) {
      same = same && target_any.size(i) == logits.size(i);
      expected += (i ? ", " : "") + std::to_string(logits.size(i));
    }
    if (!same) refuse(op, "target", "shape (" + expected + ")", shape_text(target_any));
    check_same_device(op, "target", target_any, logits);
    if (rows.columns == 0) refuse(op, "logits", "at least one class in the last dimension", "none");
    if (weight) {
      check_dtype(op, "class_weight", *weight, dtype == Dtype::float64 ? Dtype::float64 : Dtype::float32);
      check_shape(op, "class_weight", *weight, {rows.columns});
      check_same_device(op, "class_weight", *weight, logits);
      class_weight = as_contiguous(*weight);
    }
    target = as_contiguous(target_any);
  }

  const int64_t* targets() const { return static_cast<const int64_t*>(target.const_data_ptr()); }
  const void* weights() const { return class_weight ? class_weight->const_data_ptr() : nullptr; }
};

// On the CPU labels are looked at before any work; a CUDA tensor's cannot be without waiting for the device.
void check_labels(const char* op, const Inputs& in, int64_t ignore_index) {
  if (!in.target.is_cpu()) return;
  const int64_t bad = cross_entropy_first_bad_target_cpu(in.targets(), in.rows.rows, in.rows.columns, ignore_index);
  if (bad >= 0)
    refuse(op, "target",
           "classes from 0 to " + std::to_string(in.rows.columns - 1) + ", or ignore_index " +
               std::to_string(ignore_index),
           std::to_string(in.targets()[bad]) + " in row " + std::to_string(bad));
}

// The logits themselves as the place of their gradient.
void check_writable_rows(const char* op, const Tensor& logits, const Rows& rows) {
  if (rows.tensor.const_data_ptr() != logits.const_data_ptr() || (rows.rows > 1 && rows.stride < rows.columns))
    refuse(op, "logits", "rows at one stride that do not overlap, to hold their gradient",
           "shape " + shape_text(logits) + " with other strides");
}

CrossEntropyParams params_of(const Inputs& in, const Options& o) {
  CrossEntropyParams p{};
  p.logits = in.rows.tensor.const_data_ptr();
  p.target = in.targets();
  p.class_weight = in.weights();
  p.rows = in.rows.rows;
  p.classes = in.rows.columns;
  p.logits_stride = in.rows.stride;
  p.ignore_index = o.ignore_index;
  p.softcap = o.softcap;
  p.label_smoothing = o.label_smoothing;
  p.z_loss = o.z_loss;
  p.dtype = in.dtype;
  return p;
}

// Like the target, with another dtype.
Tensor per_row(const char* argument, const Tensor& target, int32_t dtype) {
  const auto sizes = target.sizes();
  return allocate(kOp, argument, sizes.data(), static_cast<int64_t>(sizes.size()), dtype, target);
}
Tensor scalar(const char* op, const char* argument, Dtype dtype, const Tensor& like) {
  return allocate(op, argument, nullptr, 0, real_dtype(dtype), like);
}

struct Outputs {
  Tensor loss, lse, argmax, accuracy, denominator, row_max, row_sum;
};

// The whole forward; `dlogits` may be the logits' own memory.
Outputs forward_into(const Inputs& in, const Options& o, int64_t reduction, bool stats, Tensor* dlogits,
                     int64_t dlogits_stride) {
  check_options(kOp, o);
  if (reduction != kNone && reduction != kMean && reduction != kSum)
    refuse(kOp, "reduction", "none, mean or sum (0, 1 or 2)", std::to_string(reduction));
  check_labels(kOp, in, o.ignore_index);

  const Tensor none = allocate_vector(kOp, "no output", 0, real_dtype(in.dtype), in.target);
  const Tensor row_loss = per_row("loss", in.target, real_dtype(in.dtype));
  Outputs out{row_loss,
              per_row("lse", in.target, real_dtype(in.dtype)),
              none,
              none,
              none,
              per_row("row_max", in.target, real_dtype(in.dtype)),
              per_row("row_sum", in.target, real_dtype(in.dtype))};
  if (stats) {
    out.argmax = per_row("argmax", in.target, aoti_torch_dtype_int64());
    out.accuracy = scalar(kOp, "accuracy", in.dtype, in.target);
  } else {
    out.argmax = allocate_vector(kOp, "no output", 0, aoti_torch_dtype_int64(), in.target);
  }
  if (reduction != kNone) out.loss = scalar(kOp, "loss", in.dtype, in.target);
  if (reduction == kMean) out.denominator = scalar(kOp, "denominator", in.dtype, in.target);
  const Tensor partials = allocate_vector(kOp, "partial sums", kCrossEntropyPartials, real_dtype(in.dtype), in.target);

  CrossEntropyParams p = params_of(in, o);
  p.loss = row_loss.mutable_data_ptr();
  p.lse = out.lse.mutable_data_ptr();
  p.argmax = stats ? static_cast<int64_t*>(out.argmax.mutable_data_ptr()) : nullptr;
  p.row_max = out.row_max.mutable_data_ptr();
  p.row_sum = out.row_sum.mutable_data_ptr();
  p.skip_ignored = !stats;
  if (dlogits) {
    p.dlogits = dlogits->mutable_data_ptr();
    p.dlogits_stride = dlogits_stride;
  }
  CrossEntropyDenominatorParams d{};
  d.target = p.target;
  d.class_weight = p.class_weight;
  d.partials = partials.mutable_data_ptr();
  d.rows = p.rows;
  d.classes = p.classes;
  d.ignore_index = p.ignore_index;
  d.dtype = p.dtype;
  std::optional<Tensor> total_weight;
  if (p.class_weight && o.label_smoothing != 0) {
    total_weight = scalar(kOp, "sum of class weights", in.dtype, in.target);
    p.class_weight_total = d.class_weight_total = total_weight->mutable_data_ptr();
  }
  if (reduction == kMean) p.denominator = d.denominator = out.denominator.mutable_data_ptr();
  p.follows_denominator = d.denominator || d.class_weight_total;
  CrossEntropyReduceParams r{};
  r.loss = p.loss;
  r.denominator = p.denominator;
  r.target = p.target;
  r.argmax = p.argmax;
  r.total = reduction != kNone ? out.loss.mutable_data_ptr() : nullptr;
  r.accuracy = stats ? out.accuracy.mutable_data_ptr() : nullptr;
  r.partials = partials.mutable_data_ptr();
  r.rows = p.rows;
  r.ignore_index = p.ignore_index;
  r.follows_forward = p.rows > 0;
  r.dtype = p.dtype;
  const auto in_order = [&](auto&& denominator, auto&& forward, auto&& reduce) -> Status {
    if (p.follows_denominator) WARPSMITH_RETURN_IF_FAILED(denominator());
    if (p.rows > 0) WARPSMITH_RETURN_IF_FAILED(forward());
    return r.total || r.accuracy ? reduce() : Status();
  };
  run_on(
      kOp, in.target,
      [&](void* stream) {
        return in_order([&] { return cross_entropy_denominator_cuda(d, stream); },
                        [&] { return cross_entropy_forward_cuda(p, stream); },
                        [&] { return cross_entropy_reduce_cuda(r, stream); });
      },
      [&](const Parallel& threads) {
        return in_order([&] { return cross_entropy_denominator_cpu(d, threads); },
                        [&] { return cross_entropy_forward_cpu(p, threads); },
                        [&] { return cross_entropy_reduce_cpu(r, threads); });
      });
  return out;
}

using RowsOnly = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using RowsAndGradient = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

RowsOnly forward(Tensor logits, Tensor target, std::optional<Tensor> class_weight, int64_t ignore_index,
                 int64_t reduction, double label_smoothing, double z_loss, double softcap, bool stats) {
  const Inputs in(kOp, logits, target, class_weight);
  const Outputs out = forward_into(in, {ignore_index, label_smoothing, z_loss, softcap}, reduction, stats, nullptr, 0);
  return {out.loss, out.lse, out.argmax, out.accuracy, out.denominator, out.row_max, out.row_sum};
}

// Under tracing nothing is overwritten.
RowsOnly traced(Tensor logits, Tensor target, std::optional<Tensor> class_weight, int64_t ignore_index,
                int64_t reduction, double label_smoothing, double z_loss, double softcap, bool stats, bool) {
  return forward(logits, target, class_weight, ignore_index, reduction, label_smoothing, z_loss, softcap, stats);
}

RowsAndGradient with_gradient(Tensor logits, Tensor target, std::optional<Tensor> class_weight, int64_t ignore_index,
                              int64_t reduction, double label_smoothing, double z_loss, double softcap, bool stats) {
  const Inputs in(kOp, logits, target, class_weight);
  Tensor dlogits = allocate_like(kOp, "dlogits", logits);
  const Outputs out =
      forward_into(in, {ignore_index, label_smoothing, z_loss, softcap}, reduction, stats, &dlogits, in.rows.columns);
  return {out.loss, out.lse, out.argmax, out.accuracy, out.denominator, out.row_max, out.row_sum, dlogits};
}

RowsOnly with_gradient_inplace(Tensor logits, Tensor target, std::optional<Tensor> class_weight, int64_t ignore_index,
                               int64_t reduction, double label_smoothing, double z_loss, double softcap, bool stats) {
  Inputs in(kOp, logits, target, class_weight);
  check_writable_rows(kOp, logits, in.rows);
  const Outputs out = forward_into(in, {ignore_index, label_smoothing, z_loss, softcap}, reduction, stats,
                                   &in.rows.tensor, in.rows.stride);
  return {out.loss, out.lse, out.argmax, out.accuracy, out.denominator, out.row_max, out.row_sum};
}

void backward_into(const Inputs& in, const Options& o, const Tensor& dloss_any, const Tensor& row_max_any,
                   const Tensor& row_sum_any, const Tensor& denominator, bool late, const Tensor& dlogits,
                   int64_t dlogits_stride) {
  check_options(kBackward, o);
  const Dtype real = in.dtype == Dtype::float64 ? Dtype::float64 : Dtype::float32;
  check_dtype(kBackward, "dloss", dloss_any, real);
  if (dloss_any.dim() != 0) check_same_shape(kBackward, "dloss", dloss_any, in.target);
  check_same_device(kBackward, "dloss", dloss_any, in.target);
  const auto check_rows = [&](const char* argument, const Tensor& t) {
    check_dtype(kBackward, argument, t, real);
    check_same_shape(kBackward, argument, t, in.target);
    check_same_device(kBackward, argument, t, in.target);
  };
  check_rows("row_max", row_max_any);
  check_rows("row_sum", row_sum_any);
  if (late) check_shape(kBackward, "dloss", dloss_any, {});
  check_dtype(kBackward, "denominator", denominator, real);
  check_same_device(kBackward, "denominator", denominator, in.target);
  if (in.rows.rows == 0) return;

  const Tensor dloss = as_contiguous(dloss_any), row_max = as_contiguous(row_max_any),
               row_sum = as_contiguous(row_sum_any);
  CrossEntropyParams p = params_of(in, o);
  p.row_max = const_cast<void*>(row_max.const_data_ptr());
  p.row_sum = const_cast<void*>(row_sum.const_data_ptr());
  (late ? p.late_scale : p.grad_loss) = dloss.const_data_ptr();
  p.grad_loss_stride = dloss.dim() == 0 ? 0 : 1;
  p.denominator = denominator.numel() ? denominator.const_data_ptr() : nullptr;
  p.dlogits = dlogits.mutable_data_ptr();
  p.dlogits_stride = dlogits_stride;
  std::optional<Tensor> total, partials;
  CrossEntropyDenominatorParams d{};
  if (p.class_weight && o.label_smoothing != 0) {
    total = scalar(kBackward, "sum of class weights", in.dtype, in.target);
    partials = allocate_vector(kBackward, "partial sums", kCrossEntropyPartials, real_dtype(in.dtype), in.target);
    d.class_weight = p.class_weight;
    d.classes = p.classes;
    d.dtype = p.dtype;
    d.partials = partials->mutable_data_ptr();
    d.class_weight_total = total->mutable_data_ptr();
    p.class_weight_total = total->const_data_ptr();
  }
  run_on(
      kBackward, in.target,
      [&](void* stream) {
        if (total) WARPSMITH_RETURN_IF_FAILED(cross_entropy_denominator_cuda(d, stream));
        return cross_entropy_backward_cuda(p, stream);
      },
      [&](const Parallel& threads) {
        if (total) WARPSMITH_RETURN_IF_FAILED(cross_entropy_denominator_cpu(d, threads));
        return cross_entropy_backward_cpu(p, threads);
      });
}

Tensor backward(Tensor dloss, Tensor logits, Tensor target, std::optional<Tensor> class_weight, Tensor row_max,
                Tensor row_sum, Tensor denominator, bool late, int64_t ignore_index, double label_smoothing,
                double z_loss, double softcap) {
  const Inputs in(kBackward, logits, target, class_weight);
  Tensor dlogits = allocate_like(kBackward, "dlogits", logits);
  backward_into(in, {ignore_index, label_smoothing, z_loss, softcap}, dloss, row_max, row_sum, denominator, late,
                dlogits, in.rows.columns);
  return dlogits;
}

void backward_inplace(Tensor dloss, Tensor logits, Tensor target, std::optional<Tensor> class_weight, Tensor row_max,
                      Tensor row_sum, Tensor denominator, bool late, int64_t ignore_index, double label_smoothing,
                      double z_loss, double softcap) {
  const Inputs in(kBackward, logits, target, class_weight);
  check_writable_rows(kBackward, logits, in.rows);
  backward_into(in, {ignore_index, label_smoothing, z_loss, softcap}, dloss, row_max, row_sum, denominator, late,
                in.rows.tensor, in.rows.stride);
}

// A gradient times what came in, which is looked at where it lies.
void scale_inplace(Tensor dlogits, Tensor factor) {
  const Dtype dtype = float_dtype(kScale, "dlogits", dlogits);
  check_dtype(kScale, "factor", factor, dtype == Dtype::float64 ? Dtype::float64 : Dtype::float32);
  check_shape(kScale, "factor", factor, {});
  check_same_device(kScale, "factor", factor, dlogits);
  const Rows rows = as_rows(kScale, "dlogits", dlogits);
  check_writable_rows(kScale, dlogits, rows);
  if (rows.rows == 0 || rows.columns == 0) return;
  const CrossEntropyScaleParams p{
      rows.tensor.mutable_data_ptr(), factor.const_data_ptr(), rows.rows, rows.columns, rows.stride, dtype};
  run_on(
      kScale, dlogits, [&](void* stream) { return cross_entropy_scale_cuda(p, stream); },
      [&](const Parallel& threads) { return cross_entropy_scale_cpu(p, threads); });
}

#define WARPSMITH_INPUTS                                                                                  \
  " logits, Tensor target, Tensor? class_weight, int ignore_index, int reduction, float label_smoothing," \
  " float z_loss, float softcap, bool stats"
#define WARPSMITH_OUTPUTS \
  "Tensor loss, Tensor lse, Tensor argmax, Tensor accuracy, Tensor denominator, Tensor row_max, Tensor row_sum"
#define WARPSMITH_BACKWARD_INPUTS                                                                                     \
  " logits, Tensor target, Tensor? class_weight, Tensor row_max, Tensor row_sum, Tensor denominator, bool late, int " \
  "ignore_index, float "                                                                                              \
  "label_smoothing, float z_loss, float softcap"

WARPSMITH_SCHEMAS(m) {
  m.def("cross_entropy(Tensor" WARPSMITH_INPUTS ", bool inplace_backward) -> (" WARPSMITH_OUTPUTS ")");
  m.def("cross_entropy_forward(Tensor" WARPSMITH_INPUTS ") -> (" WARPSMITH_OUTPUTS ")");
  m.def("cross_entropy_with_gradient(Tensor" WARPSMITH_INPUTS ") -> (" WARPSMITH_OUTPUTS ", Tensor dlogits)");
  m.def("cross_entropy_with_gradient_(Tensor(a!)" WARPSMITH_INPUTS ") -> (" WARPSMITH_OUTPUTS ")");
  m.def("cross_entropy_backward(Tensor dloss, Tensor" WARPSMITH_BACKWARD_INPUTS ") -> Tensor dlogits");
  m.def("cross_entropy_backward_(Tensor dloss, Tensor(a!)" WARPSMITH_BACKWARD_INPUTS ") -> ()");
  m.def("cross_entropy_scale_(Tensor(a!) dlogits, Tensor factor) -> ()");
}

WARPSMITH_IMPLEMENTATIONS(m) {
  m.impl("cross_entropy", TORCH_BOX(&traced));
  m.impl("cross_entropy_forward", TORCH_BOX(&forward));
  m.impl("cross_entropy_with_gradient", TORCH_BOX(&with_gradient));
  m.impl("cross_entropy_with_gradient_", TORCH_BOX(&with_gradient_inplace));
  m.impl("cross_entropy_backward", TORCH_BOX(&backward));
  m.impl("cross_entropy_backward_", TORCH_BOX(&backward_inplace));
  m.impl("cross_entropy_scale_", TORCH_BOX(&scale_inplace));
}

}  // namespace
}  // namespace warpsmith
