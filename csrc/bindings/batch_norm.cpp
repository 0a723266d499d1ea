#include "kernels/batch_norm/batch_norm.h"

#include <optional>
#include <string>
#include <tuple>

#include "bindings/support/device.h"
#include "bindings/support/library.h"
#include "bindings/support/pixels.h"

namespace warpsmith {
namespace {

// The bindings of batch_norm: checks, views of pixels, allocation, launch. python/warpsmith/ops/_batch_norm.py makes
// the same checks in the same words for fake tensors.

constexpr const char *kForward = name(BatchNorm::batch_norm), *kBackward = backward_name(BatchNorm::batch_norm),
                     *kStatistics = "batch_norm_statistics";

// What ranks have gathered of `rows` numbers a channel.
const double* of_ranks_in(const char* op, const char* argument, const Tensor& t, int64_t rows, int64_t columns,
                          const Tensor& like, int64_t* ranks) {
  *ranks = t.dim() > 0 ? t.size(0) : 0;
  if (t.scalar_type() != ScalarType::Double) refuse(op, argument, "float64", dtype_text(t.scalar_type()));
  check_shape(op, argument, t, {*ranks, rows, columns});
  check_same_device(op, argument, t, like);
  if (*ranks == 0 || !t.is_contiguous()) refuse(op, argument, "a contiguous tensor of a rank and more", shape_text(t));
  return static_cast<const double*>(t.const_data_ptr());
}

OptionalTensor allocate_partials(const char* op, int64_t slices, int64_t columns, Dtype dtype, const Tensor& like) {
  const int64_t sizes[3] = {2, slices, columns};
  const bool floats = runs_kernels(like) && dtype != Dtype::float64;
  return allocate(op, "partial sums", sizes, 3, floats ? aoti_torch_dtype_float32() : aoti_torch_dtype_float64(), like);
}

void run_forward(const char* op, BatchNormForwardParams& p, const Tensor& x) {
  OptionalTensor partials;
  const auto with_partials = [&](int64_t slices) {
    if (p.training) partials = allocate_partials(op, slices, p.columns, p.dtype, x);
    p.partials = at(partials);
  };
  run_with_partials<BatchNormForwardParams, batch_norm_slices_cuda, batch_norm_forward_cuda, batch_norm_forward_cpu>(
      op, x, p, batch_norm_slices_cpu(p.rows, p.columns), with_partials);
}

struct Outputs {
  Tensor y, new_mean, new_var, mean, rstd, mask;
};

Outputs forward(const Tensor& x_any, const OptionalTensor& residual_any, const OptionalTensor& weight_any,
                const OptionalTensor& bias_any, const OptionalTensor& running_mean, const OptionalTensor& running_var,
                bool training, double momentum, double eps, bool relu, bool with_mask, bool in_place,
                const OptionalTensor& of_ranks = std::nullopt) {
  const Dtype dtype = float_dtype(kForward, "x", x_any);
  check_dimensions(kForward, x_any);
  BatchNormForwardParams p;
  p.dtype = dtype;
  if (residual_any) check_like(kForward, "residual", *residual_any, x_any, dtype);
  p.weight_dtype = check_pair(kForward, "weight", weight_any, "bias", bias_any, x_any, dtype, x_any.size(1));
  p.running_dtype =
      check_pair(kForward, "running_mean", running_mean, "running_var", running_var, x_any, dtype, x_any.size(1));
  if (!training && !of_ranks && !running_mean)
    refuse(kForward, "running_mean", "a tensor when training is False", "None");
  if (running_mean.has_value() != running_var.has_value())
    refuse(kForward, "running_var", running_mean ? "a tensor beside running_mean" : "None beside no running_mean",
           running_mean ? "None" : "a tensor");
  check_eps(kForward, eps);
  check_finite(kForward, "momentum", momentum, dtype);
  int64_t rows = 1;
  for (int64_t i = 0; i < x_any.dim(); ++i) rows *= i == 1 ? 1 : x_any.size(i);
  if (training && rows == 1)
    refuse(kForward, "x", "more than 1 value per channel when training", "input size " + shape_text(x_any));
  const Pixels x = as_pixels(kForward, "x", x_any, dtype);
  std::optional<Pixels> residual;
  if (residual_any) residual = as_pixels(kForward, "residual", *residual_any, dtype);
  const OptionalTensor weight = as_contiguous(weight_any), bias = as_contiguous(bias_any);
  const OptionalTensor old_mean = as_contiguous(running_mean), old_var = as_contiguous(running_var);

  Outputs out;
  const Tensor none = nothing(kForward, dtype_code(x_any), x_any);
  const bool update = (training || of_ranks) && running_mean, fresh = update && !in_place;
  out.y = allocate_pixels(kForward, "y", x_any);
  out.new_mean = fresh ? allocate_like(kForward, "new_mean", *running_mean) : none;
  out.new_var = fresh ? allocate_like(kForward, "new_var", *running_var) : nothing(kForward, dtype_code(x_any), x_any);
  out.mean = allocate_vector(kForward, "mean", x.columns, real_code(dtype), x_any);
  out.rstd = allocate_vector(kForward, "rstd", x.columns, real_code(dtype), x_any);
  const int64_t mask_sizes[2] = {x.rows, x.columns / batch_norm_vector(x.columns, size_bytes(dtype))};
  const int64_t no_mask[2] = {0, 0};
  const bool masked = with_mask && relu && residual;
  out.mask = allocate(kForward, "mask", masked ? mask_sizes : no_mask, 2, aoti_torch_dtype_uint8(), x_any);
  if (of_ranks) p.of_ranks = of_ranks_in(kForward, "of_ranks", *of_ranks, 3, x.columns, x_any, &p.ranks);
  if ((x.rows == 0 && !of_ranks) || x.columns == 0) {  // nothing is learnt of no values
    if (fresh) {
      torch::stable::copy_(out.new_mean, *running_mean);
      torch::stable::copy_(out.new_var, *running_var);
    }
    torch::stable::zero_(out.mean);
    torch::stable::zero_(out.rstd);
    return out;
  }
  p.x = x.tensor.const_data_ptr();
  p.x_stride = x.stride;
  if (residual) {
    p.residual = residual->tensor.const_data_ptr();
    p.residual_stride = residual->stride;
  }
  p.weight = const_at(weight);
  p.bias = const_at(bias);
  p.running_mean = const_at(old_mean);
  p.running_var = const_at(old_var);
  if (x.rows > 0) p.y = out.y.mutable_data_ptr();
  if (masked) p.mask = static_cast<uint8_t*>(out.mask.mutable_data_ptr());
  p.mean = out.mean.mutable_data_ptr();
  p.rstd = out.rstd.mutable_data_ptr();
  if (update) {  // in place: each channel is read before it is written
    p.new_mean = fresh ? out.new_mean.mutable_data_ptr() : old_mean->mutable_data_ptr();
    p.new_var = fresh ? out.new_var.mutable_data_ptr() : old_var->mutable_data_ptr();
  }
  p.rows = x.rows;
  p.columns = x.columns;
  p.momentum = momentum;
  p.eps = eps;
  p.training = training;
  p.relu = relu;
  run_forward(kForward, p, x_any);
  const auto write_back = [&](const Tensor& from, Tensor to) {
    if (!to.is_contiguous()) torch::stable::copy_(to, from);
  };
  if (update && in_place) {
    write_back(*old_mean, *running_mean);
    write_back(*old_var, *running_var);
  }
  return out;
}

template <bool in_place> std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> with_statistics(
    Tensor x, OptionalTensor residual, OptionalTensor weight, OptionalTensor bias, OptionalTensor running_mean,
    OptionalTensor running_var, bool training, double momentum, double eps, bool relu) {
  const Outputs out =
      forward(x, residual, weight, bias, running_mean, running_var, training, momentum, eps, relu, true, in_place);
  return {out.y, out.new_mean, out.new_var, out.mean, out.rstd, out.mask};
}

// g++ 12 does not instantiate a function whose address only a template takes.
[[maybe_unused]] constexpr decltype(&with_statistics<true>) kInstances[] = {&with_statistics<false>,
                                                                            &with_statistics<true>};

std::tuple<Tensor, Tensor, Tensor> inference(Tensor x, OptionalTensor residual, OptionalTensor weight,
                                             OptionalTensor bias, OptionalTensor running_mean,
                                             OptionalTensor running_var, bool training, double momentum, double eps,
                                             bool relu) {
  const Outputs out =
      forward(x, residual, weight, bias, running_mean, running_var, training, momentum, eps, relu, false, true);
  return {out.y, out.new_mean, out.new_var};
}

// The same with the statistics of several ranks, of each `statistics`.
std::tuple<Tensor, Tensor, Tensor, Tensor> forward_of_ranks(Tensor x, OptionalTensor residual, OptionalTensor weight,
                                                            OptionalTensor bias, OptionalTensor running_mean,
                                                            OptionalTensor running_var, Tensor of_ranks,
                                                            double momentum, double eps, bool relu) {
  const Outputs out =
      forward(x, residual, weight, bias, running_mean, running_var, false, momentum, eps, relu, true, true, of_ranks);
  return {out.y, out.mean, out.rstd, out.mask};
}

// (3, C) in float64: mean, variance and number of the values of each channel that are here, zeros where there are none.
Tensor statistics(Tensor x_any) {
  const Dtype dtype = float_dtype(kStatistics, "x", x_any);
  check_dimensions(kStatistics, x_any);
  const Pixels x = as_pixels(kStatistics, "x", x_any, dtype);
  const int64_t sizes[2] = {2, x.columns}, exact_sizes[2] = {3, x.columns};
  Tensor exact = allocate(kStatistics, "statistics", exact_sizes, 2, aoti_torch_dtype_float64(), x_any);
  if (x.rows == 0 || x.columns == 0) {
    torch::stable::zero_(exact);
    return exact;
  }
  const Tensor rounded = allocate(kStatistics, "statistics", sizes, 2, real_code(dtype), x_any);
  BatchNormForwardParams p;
  p.dtype = dtype;
  p.x = x.tensor.const_data_ptr();
  p.x_stride = x.stride;
  p.mean = rounded.mutable_data_ptr();
  p.rstd = static_cast<char*>(p.mean) + x.columns * size_bytes(real_dtype(dtype));
  p.exact = static_cast<double*>(exact.mutable_data_ptr());
  p.rows = x.rows;
  p.columns = x.columns;
  p.training = true;
  run_forward(kStatistics, p, x_any);
  return exact;
}

// The sums of several ranks and what counts their rows; or where this rank's are wanted.
struct RanksBackward {
  const Tensor *sums = nullptr, *statistics = nullptr;
  std::optional<Tensor>* exact = nullptr;
};

// Gradients that are not wanted have no elements. So has dresidual without `relu`: dy stands for it.
std::tuple<Tensor, Tensor, Tensor, Tensor> gradients(const Tensor& dy_any, const Tensor& x_any,
                                                     const OptionalTensor& weight_any, const OptionalTensor& bias_any,
                                                     const Tensor& mean_any, const Tensor& rstd_any, const Tensor& mask,
                                                     const RanksBackward& ranks, bool training, bool relu, bool want_dx,
                                                     bool want_dresidual, bool want_dweight, bool want_dbias) {
  const Dtype dtype = float_dtype(kBackward, "dy", dy_any);
  check_dimensions(kBackward, x_any);
  check_like(kBackward, "x", x_any, dy_any, dtype);
  BatchNormBackwardParams p;
  p.dtype = dtype;
  p.weight_dtype = check_pair(kBackward, "weight", weight_any, "bias", bias_any, x_any, dtype, x_any.size(1));
  if (want_dweight && !weight_any) refuse(kBackward, "weight", "a tensor when its gradient is wanted", "None");
  if (want_dbias && !bias_any) refuse(kBackward, "bias", "a tensor when its gradient is wanted", "None");
  const Pixels x = as_pixels(kBackward, "x", x_any, dtype), dy = as_pixels(kBackward, "dy", dy_any, dtype);
  for (const auto& [argument, t] : {std::pair{"mean", &mean_any}, std::pair{"rstd", &rstd_any}}) {
    check_tensor(kBackward, argument, *t, real_dtype(dtype), {x.columns}, x_any);
  }
  if (ranks.sums) {
    p.sums_of_ranks = of_ranks_in(kBackward, "sums", *ranks.sums, 2, x.columns, x_any, &p.ranks);
    p.statistics_of_ranks = of_ranks_in(kBackward, "statistics", *ranks.statistics, 3, x.columns, x_any, &p.ranks);
    if (ranks.sums->size(0) != p.ranks) refuse(kBackward, "sums", "those of all ranks", shape_text(*ranks.sums));
  }
  const bool masked = mask.numel() > 0;
  if (mask.scalar_type() != ScalarType::Byte) refuse(kBackward, "mask", "uint8", dtype_text(mask.scalar_type()));
  if (masked) {
    check_shape(kBackward, "mask", mask, {x.rows, x.columns / batch_norm_vector(x.columns, size_bytes(dtype))});
    check_same_device(kBackward, "mask", mask, x_any);
  }
  const OptionalTensor weight = as_contiguous(weight_any), bias = as_contiguous(bias_any);
  const Tensor mean = as_contiguous(mean_any), rstd = as_contiguous(rstd_any), bits = as_contiguous(mask);

  const bool give_dresidual = want_dresidual && relu;
  const Tensor none = nothing(kBackward, dtype_code(dy_any), dy_any);
  const Tensor dx = want_dx ? allocate_pixels(kBackward, "dx", x_any) : none;
  const Tensor dresidual = give_dresidual ? allocate_pixels(kBackward, "dresidual", x_any) : none;
  Tensor dweight = want_dweight ? allocate_like(kBackward, "dweight", *weight_any) : none;
  Tensor dbias = want_dbias ? allocate_like(kBackward, "dbias", *bias_any) : none;
  const int64_t sums_sizes[2] = {2, x.columns};
  if (ranks.exact) *ranks.exact = allocate(kBackward, "sums", sums_sizes, 2, aoti_torch_dtype_float64(), x_any);
  if (x.rows == 0 || x.columns == 0) {
    if (want_dweight) torch::stable::zero_(dweight);
    if (want_dbias) torch::stable::zero_(dbias);
    if (ranks.exact) torch::stable::zero_(**ranks.exact);
    return {dx, dresidual, dweight, dbias};
  }
  p.dy = dy.tensor.const_data_ptr();
  p.dy_stride = dy.stride;
  p.x = x.tensor.const_data_ptr();
  p.x_stride = x.stride;
  p.weight = const_at(weight);
  p.bias = const_at(bias);
  p.mean = mean.const_data_ptr();
  p.rstd = rstd.const_data_ptr();
  if (ranks.exact) p.exact = static_cast<double*>((*ranks.exact)->mutable_data_ptr());
  if (relu && masked) p.mask = static_cast<const uint8_t*>(bits.const_data_ptr());
  if (want_dx) p.dx = dx.mutable_data_ptr();
  if (give_dresidual) p.dresidual = dresidual.mutable_data_ptr();
  if (want_dweight) p.dweight = dweight.mutable_data_ptr();
  if (want_dbias) p.dbias = dbias.mutable_data_ptr();
  p.rows = x.rows;
  p.columns = x.columns;
  p.training = training;
  p.relu = relu;
  OptionalTensor partials;
  const auto with_partials = [&](int64_t slices) {
    if (p.needs_sums() || p.sums_of_ranks)
      partials = allocate_partials(kBackward, p.sums_of_ranks ? 1 : slices + 1, p.columns, dtype, x_any);
    p.partials = at(partials);
  };
  run_with_partials<BatchNormBackwardParams, batch_norm_slices_cuda, batch_norm_backward_cuda, batch_norm_backward_cpu>(
      kBackward, x_any, p, batch_norm_slices_cpu(p.rows, p.columns), with_partials);
  return {dx, dresidual, dweight, dbias};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(Tensor dy, Tensor x, OptionalTensor weight, OptionalTensor bias,
                                                    Tensor mean, Tensor rstd, Tensor mask, bool training, bool relu,
                                                    bool want_dx, bool want_dresidual, bool want_dweight,
                                                    bool want_dbias) {
  return gradients(dy, x, weight, bias, mean, rstd, mask, {}, training, relu, want_dx, want_dresidual, want_dweight,
                   want_dbias);
}

// (2, C) in float64: sums of g and of g * x_hat over the rows here, and the gradients that they are.
std::tuple<Tensor, Tensor, Tensor> sums(Tensor dy, Tensor x, OptionalTensor weight, OptionalTensor bias, Tensor mean,
                                        Tensor rstd, Tensor mask, bool relu, bool want_dweight, bool want_dbias) {
  std::optional<Tensor> exact;
  const auto found = gradients(dy, x, weight, bias, mean, rstd, mask, {.exact = &exact}, true, relu, false, false,
                               want_dweight, want_dbias);
  return {*exact, std::get<2>(found), std::get<3>(found)};
}

// dx and dresidual where the means are over the batches of several ranks: what they have gathered of `sums` and of
// `statistics`.
std::tuple<Tensor, Tensor> backward_of_ranks(Tensor dy, Tensor x, OptionalTensor weight, OptionalTensor bias,
                                             Tensor mean, Tensor rstd, Tensor mask, Tensor sums, Tensor statistics,
                                             bool relu, bool want_dx, bool want_dresidual) {
  const auto found = gradients(dy, x, weight, bias, mean, rstd, mask, {.sums = &sums, .statistics = &statistics}, true,
                               relu, want_dx, want_dresidual, false, false);
  return {std::get<0>(found), std::get<1>(found)};
}

// `batch_norm`, which is traced, writes nothing in place: it returns the new running statistics.
std::string schema(const char* op, bool in_place, const char* more) {
  const auto running = [&](const char* name, const char* alias) {
    return std::string("Tensor") + (in_place ? alias : "") + "? " + name + ", ";
  };
  return std::string(op) + "(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, " +
         running("running_mean", "(a!)") + running("running_var", "(b!)") +
         "bool training, float momentum, float eps, bool relu) -> (Tensor y, Tensor new_mean, Tensor new_var" + more +
         ")";
}

WARPSMITH_OPS(m) {
  const char* const and_statistics = ", Tensor mean, Tensor rstd, Tensor mask";
  m.add(schema("batch_norm", false, and_statistics), TORCH_BOX(&with_statistics<false>));
  m.add(schema("batch_norm_forward", true, and_statistics), TORCH_BOX(&with_statistics<true>));
  m.add(schema("batch_norm_inference", true, ""), TORCH_BOX(&inference));
  m.add(
      "batch_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, Tensor mask, "
      "bool training, bool relu, bool want_dx, bool want_dresidual, bool want_dweight, bool want_dbias) -> "
      "(Tensor dx, Tensor dresidual, Tensor dweight, Tensor dbias)",
      TORCH_BOX(&backward));
  m.add("batch_norm_statistics(Tensor x) -> Tensor", TORCH_BOX(&statistics));
  m.add(
      "batch_norm_forward_of_ranks(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, "
      "Tensor(b!)? running_var, Tensor of_ranks, float momentum, float eps, bool relu) -> "
      "(Tensor y, Tensor mean, Tensor rstd, Tensor mask)",
      TORCH_BOX(&forward_of_ranks));
  m.add(
      "batch_norm_sums(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, Tensor mask, "
      "bool relu, bool want_dweight, bool want_dbias) -> (Tensor sums, Tensor dweight, Tensor dbias)",
      TORCH_BOX(&sums));
  m.add(
      "batch_norm_backward_of_ranks(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, "
      "Tensor mask, Tensor sums, Tensor statistics, bool relu, bool want_dx, bool want_dresidual) -> (Tensor dx, "
      "Tensor dresidual)",
      TORCH_BOX(&backward_of_ranks));
}

}  // namespace
}  // namespace warpsmith
