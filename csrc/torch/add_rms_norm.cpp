#include "kernels/norm/add_rms_norm.h"

#include "torch/support/library.h"
#include "torch/support/norm.h"

namespace warpsmith {
namespace {

WARPSMITH_NORM_OP(AddRmsNorm, add_rms_norm, NormKind::rms);

std::tuple<Tensor, Tensor, Tensor> forward(Tensor x, Tensor residual, std::optional<Tensor> weight, double eps,
                                           double weight_offset) {
  const NormOutputs out = norm_forward<AddRmsNorm>(
      {.x = x, .residual = residual, .weight = weight, .eps = eps, .weight_offset = weight_offset}, true);
  return {out.y, out.residual_out, out.rstd};
}

std::tuple<Tensor, Tensor> inference(Tensor x, Tensor residual, std::optional<Tensor> weight, double eps,
                                     double weight_offset) {
  const NormOutputs out = norm_forward<AddRmsNorm>(
      {.x = x, .residual = residual, .weight = weight, .eps = eps, .weight_offset = weight_offset}, false);
  return {out.y, out.residual_out};
}

std::tuple<Tensor, Tensor, Tensor> backward(Tensor dy, std::optional<Tensor> dresidual_out, Tensor residual_out,
                                            std::optional<Tensor> weight, Tensor rstd, double weight_offset,
                                            bool want_dx, bool want_dresidual, bool want_dweight) {
  const NormGradients out = norm_backward<AddRmsNorm>({.dy = dy,
                                                       .dresidual_out = dresidual_out,
                                                       .s = residual_out,
                                                       .s_name = "residual_out",
                                                       .residual = true,
                                                       .weight = weight,
                                                       .rstd = rstd,
                                                       .weight_offset = weight_offset,
                                                       .want_dx = want_dx,
                                                       .want_dresidual = want_dresidual,
                                                       .want_dweight = want_dweight});
  return {out.dx, out.dresidual, out.dweight};
}

WARPSMITH_SCHEMAS(m) {
  m.def(
      "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset) -> (Tensor y, Tensor "
      "residual_out, Tensor rstd)");
  m.def(
      "add_rms_norm_forward(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset) -> (Tensor y, "
      "Tensor residual_out, Tensor rstd)");
  m.def(
      "add_rms_norm_inference(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset) -> (Tensor y, "
      "Tensor residual_out)");
  m.def(
      "add_rms_norm_backward(Tensor dy, Tensor? dresidual_out, Tensor residual_out, Tensor? weight, Tensor rstd, float "
      "weight_offset, bool want_dx, bool want_dresidual, bool want_dweight) -> (Tensor dx, Tensor dresidual, Tensor "
      "dweight)");
}

WARPSMITH_IMPLEMENTATIONS(m) {
  m.impl("add_rms_norm", TORCH_BOX(&forward));
  m.impl("add_rms_norm_forward", TORCH_BOX(&forward));
  m.impl("add_rms_norm_inference", TORCH_BOX(&inference));
  m.impl("add_rms_norm_backward", TORCH_BOX(&backward));
}

}  // namespace
}  // namespace warpsmith
