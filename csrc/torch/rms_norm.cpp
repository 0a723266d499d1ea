#include "kernels/norm/rms_norm.h"

#include "torch/support/library.h"
#include "torch/support/norm.h"

namespace warpsmith {
namespace {

WARPSMITH_NORM_OP(RmsNorm, rms_norm, NormKind::rms);

std::tuple<Tensor, Tensor> forward(Tensor x, std::optional<Tensor> weight, double eps, double weight_offset) {
  const NormOutputs out =
      norm_forward<RmsNorm>({.x = x, .weight = weight, .eps = eps, .weight_offset = weight_offset}, true);
  return {out.y, out.rstd};
}

Tensor inference(Tensor x, std::optional<Tensor> weight, double eps, double weight_offset) {
  return norm_forward<RmsNorm>({.x = x, .weight = weight, .eps = eps, .weight_offset = weight_offset}, false).y;
}

std::tuple<Tensor, Tensor> backward(Tensor dy, Tensor x, std::optional<Tensor> weight, Tensor rstd,
                                    double weight_offset, bool want_dx, bool want_dweight) {
  const NormGradients out = norm_backward<RmsNorm>({.dy = dy,
                                                    .s = x,
                                                    .s_name = "x",
                                                    .residual = false,
                                                    .weight = weight,
                                                    .rstd = rstd,
                                                    .weight_offset = weight_offset,
                                                    .want_dx = want_dx,
                                                    .want_dweight = want_dweight});
  return {out.dx, out.dweight};
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
