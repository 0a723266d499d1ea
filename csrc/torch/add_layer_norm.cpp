#include "kernels/norm/add_layer_norm.h"

#include "torch/support/library.h"
#include "torch/support/norm.h"

namespace warpsmith {
namespace {

WARPSMITH_NORM_OP(AddLayerNorm, add_layer_norm, NormKind::layer);

std::tuple<Tensor, Tensor, Tensor, Tensor> forward(Tensor x, Tensor residual, std::optional<Tensor> weight,
                                                   std::optional<Tensor> bias, double eps) {
  const NormOutputs out =
      norm_forward<AddLayerNorm>({.x = x, .residual = residual, .weight = weight, .bias = bias, .eps = eps}, true);
  return {out.y, out.residual_out, out.mean, out.rstd};
}

std::tuple<Tensor, Tensor> inference(Tensor x, Tensor residual, std::optional<Tensor> weight,
                                     std::optional<Tensor> bias, double eps) {
  const NormOutputs out =
      norm_forward<AddLayerNorm>({.x = x, .residual = residual, .weight = weight, .bias = bias, .eps = eps}, false);
  return {out.y, out.residual_out};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(Tensor dy, std::optional<Tensor> dresidual_out, Tensor residual_out,
                                                    std::optional<Tensor> weight, std::optional<Tensor> bias,
                                                    Tensor mean, Tensor rstd, bool want_dx, bool want_dresidual,
                                                    bool want_dweight, bool want_dbias) {
  const NormGradients out = norm_backward<AddLayerNorm>({.dy = dy,
                                                         .dresidual_out = dresidual_out,
                                                         .s = residual_out,
                                                         .s_name = "residual_out",
                                                         .residual = true,
                                                         .weight = weight,
                                                         .bias = bias,
                                                         .mean = mean,
                                                         .rstd = rstd,
                                                         .want_dx = want_dx,
                                                         .want_dresidual = want_dresidual,
                                                         .want_dweight = want_dweight,
                                                         .want_dbias = want_dbias});
  return {out.dx, out.dresidual, out.dweight, out.dbias};
}

WARPSMITH_SCHEMAS(m) {
  m.def(
      "add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> (Tensor y, Tensor "
      "residual_out, Tensor mean, Tensor rstd)");
  m.def(
      "add_layer_norm_forward(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> (Tensor y, Tensor "
      "residual_out, Tensor mean, Tensor rstd)");
  m.def(
      "add_layer_norm_inference(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> (Tensor y, "
      "Tensor residual_out)");
  m.def(
      "add_layer_norm_backward(Tensor dy, Tensor? dresidual_out, Tensor residual_out, Tensor? weight, Tensor? bias, "
      "Tensor mean, Tensor rstd, bool want_dx, bool want_dresidual, bool want_dweight, bool want_dbias) -> (Tensor dx, "
      "Tensor dresidual, Tensor dweight, Tensor dbias)");
}

WARPSMITH_IMPLEMENTATIONS(m) {
  m.impl("add_layer_norm", TORCH_BOX(&forward));
  m.impl("add_layer_norm_forward", TORCH_BOX(&forward));
  m.impl("add_layer_norm_inference", TORCH_BOX(&inference));
  m.impl("add_layer_norm_backward", TORCH_BOX(&backward));
}

}  // namespace
}  // namespace warpsmith
