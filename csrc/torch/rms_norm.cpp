#include "kernels/norm/rms_norm.h"

#include "torch/support/library.h"
#include "torch/support/norm.h"

namespace warpsmith {
namespace {

constexpr const char* kForward = "rms_norm";
constexpr const char* kBackward = "rms_norm_backward";

// Fills y, and rstd where the caller wants it.
Tensor forward_into(const Tensor& x_any, const std::optional<Tensor>& weight_any, double eps, double weight_offset,
                    Tensor* rstd) {
  const Dtype dtype = float_dtype(kForward, "x", x_any);
  const Rows x = as_rows(kForward, "x", x_any);
  const Dtype weight_dtype = check_weight(kForward, weight_any, x_any, dtype, x.columns);
  check_eps(kForward, eps);
  const std::optional<Tensor> weight = adjacent(weight_any);

  Tensor y = allocate_like(kForward, "y", x_any);
  if (rstd) *rstd = allocate_vector(kForward, "rstd", x.rows, statistics_code(dtype), x_any);
  if (x.rows == 0 || x.columns == 0) {
    if (rstd) torch::stable::zero_(*rstd);
    return y;
  }
  const RmsNormFwdParams p{x.tensor.const_data_ptr(),
                           pointer(weight),
                           y.mutable_data_ptr(),
                           rstd ? rstd->mutable_data_ptr() : nullptr,
                           x.rows,
                           x.columns,
                           x.stride,
                           eps,
                           weight_offset,
                           dtype,
                           weight_dtype};
  run_on(
      kForward, x_any, [&](void* stream) { return rms_norm_forward_cuda(p, stream); },
      [&](const Parallel& threads) { return rms_norm_forward_cpu(p, threads); });
  return y;
}

std::tuple<Tensor, Tensor> forward(Tensor x, std::optional<Tensor> weight, double eps, double weight_offset) {
  Tensor rstd;
  Tensor y = forward_into(x, weight, eps, weight_offset, &rstd);
  return {y, rstd};
}

Tensor inference(Tensor x, std::optional<Tensor> weight, double eps, double weight_offset) {
  return forward_into(x, weight, eps, weight_offset, nullptr);
}

// Gradients that are not wanted come back with zero elements.
std::tuple<Tensor, Tensor> backward(Tensor dy_any, Tensor x_any, std::optional<Tensor> weight_any, Tensor rstd_any,
                                    double weight_offset, bool want_dx, bool want_dweight) {
  const Dtype dtype = float_dtype(kBackward, "x", x_any);
  check_dtype(kBackward, "dy", dy_any, dtype);
  check_same_shape(kBackward, "dy", dy_any, x_any);
  check_same_device(kBackward, "dy", dy_any, x_any);
  const Rows x = as_rows(kBackward, "x", x_any), dy = as_rows(kBackward, "dy", dy_any);
  const Dtype weight_dtype = check_weight(kBackward, weight_any, x_any, dtype, x.columns);
  const Tensor rstd = check_statistics(kBackward, "rstd", rstd_any, dtype, x.rows, x_any);
  if (want_dweight && !weight_any) refuse(kBackward, "weight", "a tensor when its gradient is wanted", "None");
  const std::optional<Tensor> weight = adjacent(weight_any);

  const Tensor none = allocate_vector(kBackward, "no gradient", 0, dtype_code(x_any), x_any);
  Tensor dx = want_dx ? allocate_like(kBackward, "dx", x_any) : none;
  Tensor dweight = want_dweight ? allocate_like(kBackward, "dweight", *weight) : none;
  if (x.rows == 0 || x.columns == 0) {
    if (want_dweight) torch::stable::zero_(dweight);
    return {dx, dweight};
  }
  if (!want_dx && !want_dweight) return {dx, dweight};

  RmsNormBwdParams p{dy.tensor.const_data_ptr(),
                     x.tensor.const_data_ptr(),
                     pointer(weight),
                     rstd.const_data_ptr(),
                     want_dx ? dx.mutable_data_ptr() : nullptr,
                     want_dweight ? dweight.mutable_data_ptr() : nullptr,
                     nullptr,
                     x.rows,
                     x.columns,
                     dy.stride,
                     x.stride,
                     weight_offset,
                     dtype,
                     weight_dtype};
  std::optional<Tensor> partials;
  const auto with_partials = [&](int64_t partial_rows) {
    if (!want_dweight) return;
    const int64_t sizes[2] = {partial_rows, x.columns};
    partials = allocate(kBackward, "partial sums of dweight", sizes, 2, statistics_code(dtype), x_any);
    p.partials = partials->mutable_data_ptr();
  };
  run_on(
      kBackward, x_any,
      [&](void* stream) {
        int64_t partial_rows = 0;
        WARPSMITH_RETURN_IF_FAILED(rms_norm_partial_rows_cuda(p, &partial_rows));
        with_partials(partial_rows);
        return rms_norm_backward_cuda(p, stream);
      },
      [&](const Parallel& threads) {
        with_partials(rms_norm_partial_rows_cpu(x.rows));
        return rms_norm_backward_cpu(p, threads);
      });
  return {dx, dweight};
}

WARPSMITH_SCHEMAS(m) {
  m.def("rms_norm(Tensor x, Tensor? weight, float eps, float weight_offset) -> (Tensor y, Tensor rstd)");
  m.def("rms_norm_forward(Tensor x, Tensor? weight, float eps, float weight_offset) -> (Tensor y, Tensor rstd)");
  m.def("rms_norm_inference(Tensor x, Tensor? weight, float eps, float weight_offset) -> Tensor y");
  m.def(
      "rms_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, float weight_offset, bool want_dx, bool "
      "want_dweight)"
      " -> (Tensor dx, Tensor dweight)");
}

WARPSMITH_IMPLEMENTATIONS(m) {
  m.impl("rms_norm", TORCH_BOX(&forward));
  m.impl("rms_norm_forward", TORCH_BOX(&forward));
  m.impl("rms_norm_inference", TORCH_BOX(&inference));
  m.impl("rms_norm_backward", TORCH_BOX(&backward));
}

}  // namespace
}  // namespace warpsmith
