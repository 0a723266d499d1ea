#include "kernels/group_norm/group_norm.h"

#include <optional>
#include <string>
#include <tuple>

#include "bindings/support/device.h"
#include "bindings/support/library.h"
#include "bindings/support/pixels.h"

namespace warpsmith {
namespace {

// The bindings of group_norm: checks, views of pixels, allocation, launch. python/warpsmith/ops/_group_norm.py makes
// the same checks in the same words for fake tensors.

constexpr const char *kForward = name(GroupNorm::group_norm), *kBackward = backward_name(GroupNorm::group_norm);

void check_groups(const char* op, const Tensor& x, int64_t groups) {
  if (groups < 1 || x.size(1) % groups != 0)
    refuse(op, "num_groups", "a divisor of " + std::to_string(x.size(1)) + " channels", std::to_string(groups));
}

void set_shape(GroupNormShape& p, const Pixels& x, const Tensor& like, int64_t groups, bool silu) {
  p.samples = like.size(0);
  p.pixels = p.samples > 0 ? x.rows / p.samples : 0;
  p.channels = x.columns;
  p.groups = groups;
  p.silu = silu;
}

struct Outputs {
  Tensor y, mean, rstd;
};

Outputs forward_of(const Tensor& x_any, int64_t groups, const OptionalTensor& weight_any,
                   const OptionalTensor& bias_any, double eps, bool silu) {
  const Dtype dtype = float_dtype(kForward, "x", x_any);
  check_dimensions(kForward, x_any);
  check_groups(kForward, x_any, groups);
  GroupNormForwardParams p;
  p.dtype = dtype;
  p.weight_dtype = check_pair(kForward, "weight", weight_any, "bias", bias_any, x_any, dtype, x_any.size(1));
  check_eps(kForward, eps);
  const Pixels x = as_pixels(kForward, "x", x_any, dtype);
  const OptionalTensor weight = as_contiguous(weight_any), bias = as_contiguous(bias_any);
  set_shape(p, x, x_any, groups, silu);
  const int64_t sizes[2] = {p.samples, groups};
  const Outputs out{allocate_pixels(kForward, "y", x_any),
                    allocate(kForward, "mean", sizes, 2, real_code(dtype), x_any),
                    allocate(kForward, "rstd", sizes, 2, real_code(dtype), x_any)};
  if (x.rows == 0 || x.columns == 0) {
    Tensor mean = out.mean, rstd = out.rstd;
    torch::stable::zero_(mean);
    torch::stable::zero_(rstd);
    return out;
  }
  p.x = x.tensor.const_data_ptr();
  p.x_stride = x.stride;
  p.weight = const_at(weight);
  p.bias = const_at(bias);
  p.y = out.y.mutable_data_ptr();
  p.mean = out.mean.mutable_data_ptr();
  p.rstd = out.rstd.mutable_data_ptr();
  p.eps = eps;
  OptionalTensor sums;
  run_on(
      kForward, x_any,
      [&](void* stream) {
        GroupNormPlan plan;
        WARPSMITH_RETURN_IF_FAILED(group_norm_plan_cuda(p, false, &plan));
        sums = allocate_vector(kForward, "sums of blocks", plan.sums, aoti_torch_dtype_float64(), x_any);
        p.sums = at(sums);
        return group_norm_forward_cuda(p, stream);
      },
      [&](const Parallel& threads) { return group_norm_forward_cpu(p, threads); });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> forward(Tensor x, int64_t num_groups, OptionalTensor weight, OptionalTensor bias,
                                           double eps, bool silu) {
  const Outputs out = forward_of(x, num_groups, weight, bias, eps, silu);
  return {out.y, out.mean, out.rstd};
}

Tensor inference(Tensor x, int64_t num_groups, OptionalTensor weight, OptionalTensor bias, double eps, bool silu) {
  return forward_of(x, num_groups, weight, bias, eps, silu).y;
}

// Gradients that are not wanted have no elements.
std::tuple<Tensor, Tensor, Tensor> backward(Tensor dy_any, Tensor x_any, int64_t num_groups, OptionalTensor weight_any,
                                            OptionalTensor bias_any, Tensor mean_any, Tensor rstd_any, bool silu,
                                            bool want_dx, bool want_dweight, bool want_dbias) {
  const Dtype dtype = float_dtype(kBackward, "dy", dy_any);
  check_dimensions(kBackward, x_any);
  check_like(kBackward, "x", x_any, dy_any, dtype);
  check_groups(kBackward, x_any, num_groups);
  GroupNormBackwardParams p;
  p.dtype = dtype;
  p.weight_dtype = check_pair(kBackward, "weight", weight_any, "bias", bias_any, x_any, dtype, x_any.size(1));
  if (want_dweight && !weight_any) refuse(kBackward, "weight", "a tensor when its gradient is wanted", "None");
  if (want_dbias && !bias_any) refuse(kBackward, "bias", "a tensor when its gradient is wanted", "None");
  const Pixels x = as_pixels(kBackward, "x", x_any, dtype), dy = as_pixels(kBackward, "dy", dy_any, dtype);
  set_shape(p, x, x_any, num_groups, silu);
  for (const auto& [argument, t] : {std::pair{"mean", &mean_any}, std::pair{"rstd", &rstd_any}}) {
    check_tensor(kBackward, argument, *t, real_dtype(dtype), {p.samples, num_groups}, x_any);
  }
  const OptionalTensor weight = as_contiguous(weight_any), bias = as_contiguous(bias_any);
  const Tensor mean = as_contiguous(mean_any), rstd = as_contiguous(rstd_any);
  const Tensor none = nothing(kBackward, dtype_code(dy_any), dy_any);
  const Tensor dx = want_dx ? allocate_pixels(kBackward, "dx", x_any) : none;
  Tensor dweight =
      want_dweight ? allocate_like(kBackward, "dweight", *weight_any) : nothing(kBackward, dtype_code(dy_any), dy_any);
  Tensor dbias =
      want_dbias ? allocate_like(kBackward, "dbias", *bias_any) : nothing(kBackward, dtype_code(dy_any), dy_any);
  if (x.rows == 0 || x.columns == 0) {
    if (want_dweight) torch::stable::zero_(dweight);
    if (want_dbias) torch::stable::zero_(dbias);
    return {dx, dweight, dbias};
  }
  p.dy = dy.tensor.const_data_ptr();
  p.dy_stride = dy.stride;
  p.x = x.tensor.const_data_ptr();
  p.x_stride = x.stride;
  p.weight = const_at(weight);
  p.bias = const_at(bias);
  p.mean = mean.const_data_ptr();
  p.rstd = rstd.const_data_ptr();
  if (want_dx) p.dx = dx.mutable_data_ptr();
  if (want_dweight) p.dweight = dweight.mutable_data_ptr();
  if (want_dbias) p.dbias = dbias.mutable_data_ptr();
  OptionalTensor partials, sums;
  const auto with_partials = [&](int64_t slices) {
    const int64_t sizes[3] = {2, slices, p.channels};
    partials = allocate(kBackward, "partial sums", sizes, 3, aoti_torch_dtype_float64(), x_any);
    p.partials = at(partials);
  };
  run_on(
      kBackward, x_any,
      [&](void* stream) {
        GroupNormPlan plan;
        WARPSMITH_RETURN_IF_FAILED(group_norm_plan_cuda(p, true, &plan));
        if (p.dx) sums = allocate_vector(kBackward, "sums of blocks", plan.sums, aoti_torch_dtype_float64(), x_any);
        p.sums = at(sums);
        if (p.dweight || p.dbias) with_partials(plan.slices);
        return group_norm_backward_cuda(p, stream);
      },
      [&](const Parallel& threads) {
        with_partials(group_norm_slices_cpu(p));
        return group_norm_backward_cpu(p, threads);
      });
  return {dx, dweight, dbias};
}

WARPSMITH_OPS(m) {
  const std::string arguments = "(Tensor x, int num_groups, Tensor? weight, Tensor? bias, float eps, bool silu) -> ";
  const std::string outputs = "(Tensor y, Tensor mean, Tensor rstd)";
  m.add_forward("group_norm", arguments + outputs, TORCH_BOX(&forward));
  m.add("group_norm_inference" + arguments + "Tensor", TORCH_BOX(&inference));
  m.add(
      "group_norm_backward(Tensor dy, Tensor x, int num_groups, Tensor? weight, Tensor? bias, Tensor mean, Tensor "
      "rstd, bool silu, bool want_dx, bool want_dweight, bool want_dbias) -> (Tensor dx, Tensor dweight, Tensor "
      "dbias)",
      TORCH_BOX(&backward));
}

}  // namespace
}  // namespace warpsmith
