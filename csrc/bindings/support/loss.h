#pragma once
#include <cmath>
#include <limits>

#include "bindings/support/device.h"
#include "bindings/support/tensor.h"
#include "kernels/cross_entropy/cross_entropy.h"

// What the bindings of cross_entropy and the linear losses share: options, targets, class weights, and the sums
// computed before and after the pass over the logits.
namespace warpsmith {

constexpr int64_t kNoRowIsIgnored = std::numeric_limits<int64_t>::min();

struct LossOptions {
  int64_t ignore_index = kNoRowIsIgnored;
  double label_smoothing = 0, z_loss = 0, softcap = 0;
};

// Refuses a divisor that kernels cannot use in the arithmetic of the logits. They compute with its value and with its
// reciprocal, and both must be normal numbers there.
inline void check_divisor(const char* op, const char* argument, double value, Dtype dtype) {
  const int exponent = dtype == Dtype::float64 ? 1022 : 126;
  if (value >= std::ldexp(1.0, -exponent) && value <= std::ldexp(1.0, exponent)) return;
  const std::string power = std::to_string(exponent);
  refuse(op, argument, "a number from 2^-" + power + " to 2^" + power, short_text(value));
}

inline void check_options(const char* op, const LossOptions& o, Dtype dtype) {
  if (!(o.label_smoothing >= 0 && o.label_smoothing <= 1))
    refuse(op, "label_smoothing", "a number from 0 to 1", std::to_string(o.label_smoothing));
  for (const auto& [what, value] : {std::pair{"z_loss", o.z_loss}, std::pair{"softcap", o.softcap}})
    if (!(value >= 0 && std::isfinite(value))) refuse(op, what, "a finite number >= 0", std::to_string(value));
  check_finite(op, "z_loss", o.z_loss, dtype);
  if (o.softcap > 0) check_divisor(op, "softcap", o.softcap, dtype);
}

inline Reduction check_reduction(const char* op, int64_t number) {
  const auto reduction = static_cast<Reduction>(number);
  if (reduction != Reduction::none && reduction != Reduction::mean && reduction != Reduction::sum)
    refuse(op, "reduction", "none, mean or sum (0, 1 or 2)", std::to_string(number));
  return reduction;
}

// Returns the targets of the rows of `like` (its last dimension is a row) as int64. Accepts uint8 classes, as torch's
// losses do.
inline Tensor check_target(const char* op, const Tensor& target, const Tensor& like) {
  const ScalarType dtype = dtype_of(op, "target", target);
  if (dtype != ScalarType::Long && dtype != ScalarType::Byte)
    refuse(op, "target", "int64 or uint8 class indices", dtype_text(dtype));
  bool same = target.dim() == like.dim() - 1;
  std::string expected;
  for (int64_t i = 0; i < like.dim() - 1; ++i) {
    same = same && target.size(i) == like.size(i);
    expected += (i ? ", " : "") + std::to_string(like.size(i));
  }
  if (!same) refuse(op, "target", "shape (" + expected + ")", shape_text(target));
  check_same_device(op, "target", target, like);
  return as_contiguous(in_dtype(op, "target", target, aoti_torch_dtype_int64()));
}

// What a loss knows of its rows, without their logits.
struct LossRows {
  const char* op;
  Dtype dtype;    // of the logits
  Tensor target;  // [rows], contiguous
  int64_t rows, classes;
  LossOptions options;
  std::optional<Tensor> class_weight;  // [classes], real

  const int64_t* target_at(int64_t row) const { return static_cast<const int64_t*>(target.const_data_ptr()) + row; }

  void set_class_weight(const std::optional<Tensor>& weight) {
    if (!weight) return;
    check_parameter(op, "class_weight", *weight, dtype, {classes}, target);
    class_weight = as_contiguous(in_dtype(op, "class_weight", *weight, real_code(dtype)));
  }

  // Refuses labels that are neither classes nor ignore_index, and names the first. On CUDA the host would have to wait
  // for the device, so labels there are checked only if `on_cuda_too`.
  void check_labels(bool on_cuda_too = false) const {
    if (runs_kernels(target) && !on_cuda_too) return;
    Tensor labels = target;
    if (target.is_cuda()) {
      const int64_t stride = 1;
      AtenTensorHandle copy = nullptr, flat = nullptr;
      TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &rows, &stride, aoti_torch_dtype_int64(),
                                                      aoti_torch_device_type_cpu(), 0, &copy));
      TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(target.get(), 1, &rows, &stride, 0, &flat));
      labels = Tensor(copy);
      torch::stable::copy_(labels, Tensor(flat));
    }
    const auto* label = static_cast<const int64_t*>(labels.const_data_ptr());
    const int64_t ignored = options.ignore_index;
    const int64_t bad = cross_entropy_first_bad_target_cpu(label, rows, classes, ignored);
    if (bad < 0) return;
    refuse(op, "target",
           "classes in [0, " + std::to_string(classes) + ")" +
               (ignored != kNoRowIsIgnored ? " or ignore_index " + std::to_string(ignored) : ""),
           std::to_string(label[bad]) + " at position " + std::to_string(bad));
  }

  // Params for `count` rows from row `first` on. The rows of `logits` are `stride` elements apart.
  CrossEntropyParams params(const Tensor& logits, int64_t stride, int64_t first, int64_t count) const {
    CrossEntropyParams p{};
    p.logits = logits.const_data_ptr();
    p.target = target_at(first);
    p.class_weight = const_at(class_weight);
    p.rows = count;
    p.classes = classes;
    p.logits_stride = stride;
    p.ignore_index = options.ignore_index;
    p.softcap = options.softcap;
    p.label_smoothing = options.label_smoothing;
    p.z_loss = options.z_loss;
    p.dtype = dtype;
    return p;
  }

  template <class Cuda, class Cpu> void run(Cuda&& cuda, Cpu&& cpu) const { run_on(op, target, cuda, cpu); }
};

// The buffer for sums over rows. One sum after the other may use it.
inline Tensor allocate_partials(const LossRows& in) {
  return allocate_vector(in.op, "partial sums", kCrossEntropyPartials, real_code(in.dtype), in.target);
}

// Sums computed before any logit is read: what a mean divides by, and for label smoothing the sum of class weights.
struct Denominator {
  std::optional<Tensor> denominator, class_weight_total;  // scalars
  CrossEntropyDenominatorParams p{};

  Denominator(const LossRows& in, bool mean, const std::optional<Tensor>& partials) {
    const bool total = in.class_weight && in.options.label_smoothing != 0;
    if (mean) denominator = allocate_scalar(in.op, "denominator", real_code(in.dtype), in.target);
    if (total) class_weight_total = allocate_scalar(in.op, "sum of class weights", real_code(in.dtype), in.target);
    if (!wanted()) return;
    p = {in.target_at(0), const_at(in.class_weight), at(denominator), at(class_weight_total), at(partials), in.rows,
         in.classes,      in.options.ignore_index,   in.dtype};
  }

  bool wanted() const { return denominator || class_weight_total; }
  Status cuda(void* stream) const { return wanted() ? cross_entropy_denominator_cuda(p, stream) : Status(); }
  Status cpu(const Parallel& threads) const { return wanted() ? cross_entropy_denominator_cpu(p, threads) : Status(); }
};

// Sums over the results of all rows: the loss, unless reduction is none, and with `argmax` the accuracy.
struct Reduced {
  std::optional<Tensor> loss, accuracy;  // scalars
  CrossEntropyReduceParams p{};

  Reduced(const LossRows& in, Reduction reduction, const Tensor& row_loss, const std::optional<Tensor>& argmax,
          const std::optional<Tensor>& denominator, const std::optional<Tensor>& partials) {
    if (reduction != Reduction::none) loss = allocate_scalar(in.op, "loss", real_code(in.dtype), in.target);
    if (argmax) accuracy = allocate_scalar(in.op, "accuracy", real_code(in.dtype), in.target);
    if (!wanted()) return;
    p.loss = row_loss.const_data_ptr();
    p.denominator = const_at(denominator);
    p.target = in.target_at(0);
    p.argmax = static_cast<const int64_t*>(const_at(argmax));
    p.total = at(loss);
    p.accuracy = at(accuracy);
    p.partials = at(partials);
    p.rows = in.rows;
    p.ignore_index = in.options.ignore_index;
    p.dtype = in.dtype;
  }

  bool wanted() const { return loss || accuracy; }
  Status cuda(void* stream) const { return wanted() ? cross_entropy_reduce_cuda(p, stream) : Status(); }
  Status cpu(const Parallel& threads) const { return wanted() ? cross_entropy_reduce_cpu(p, threads) : Status(); }
};

// Computes a Denominator or a Reduced.
template <class Sums> void run_sums(const LossRows& in, const Sums& sums) {
  if (!sums.wanted()) return;
  in.run([&](void* stream) { return sums.cuda(stream); }, [&](const Parallel& threads) { return sums.cpu(threads); });
}

}  // namespace warpsmith
