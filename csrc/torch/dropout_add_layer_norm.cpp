#include "kernels/norm/dropout_add_layer_norm.h"

#include "torch/support/library.h"
#include "torch/support/norm.h"

namespace warpsmith {
namespace {

WARPSMITH_NORM_OP(DropoutAddLayerNorm, dropout_add_layer_norm, NormKind::layer);

std::tuple<Tensor, Tensor, Tensor, Tensor> forward(Tensor x, Tensor residual, std::optional<Tensor> weight,
                                                   std::optional<Tensor> bias, std::optional<Tensor> seed, double p,
                                                   double eps) {
  const NormOutputs out = norm_forward<DropoutAddLayerNorm>(
      {.x = x, .residual = residual, .weight = weight, .bias = bias, .seed = seed, .p = p, .eps = eps}, true);
  return {out.y, out.residual_out, out.mean, out.rstd};
}

std::tuple<Tensor, Tensor> inference(Tensor x, Tensor residual, std::optional<Tensor> weight,
                                     std::optional<Tensor> bias, std::optional<Tensor> seed, double p, double eps) {
  const NormOutputs out = norm_forward<DropoutAddLayerNorm>(
      {.x = x, .residual = residual, .weight = weight, .bias = bias, .seed = seed, .p = p, .eps = eps}, false);
  return {out.y, out.residual_out};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(Tensor dy, std::optional<Tensor> dresidual_out, Tensor residual_out,
                                                    std::optional<Tensor> weight, std::optional<Tensor> bias,
                                                    Tensor mean, Tensor rstd, std::optional<Tensor> seed, double p,
                                                    bool want_dx, bool want_dresidual, bool want_dweight,
                                                    bool want_dbias) {
  const NormGradients out = norm_backward<DropoutAddLayerNorm>({.dy = dy,
                                                                .dresidual_out = dresidual_out,
                                                                .s = residual_out,
                                                                .s_name = "residual_out",
                                                                .residual = true,
                                                                .weight = weight,
                                                                .bias = bias,
                                                                .mean = mean,
                                                                .rstd = rstd,
                                                                .seed = seed,
                                                                .p = p,
                                                                .want_dx = want_dx,
                                                                .want_dresidual = want_dresidual,
                                                                .want_dweight = want_dweight,
                                                                .want_dbias = want_dbias});
  return {out.dx, out.dresidual, out.dweight, out.dbias};
}

WARPSMITH_SCHEMAS(m) {
  m.def(
      "dropout_add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, Tensor? seed, float p, float "
      "eps) -> (Tensor y, Tensor residual_out, Tensor mean, Tensor rstd)");
  m.def(
      "dropout_add_layer_norm_forward(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, Tensor? seed, float p, "
      "float eps) -> (Tensor y, Tensor residual_out, Tensor mean, Tensor rstd)");
  m.def(
      "dropout_add_layer_norm_inference(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, Tensor? seed, float "
      "p, float eps) -> (Tensor y, Tensor residual_out)");
  m.def(
      "dropout_add_layer_norm_backward(Tensor dy, Tensor? dresidual_out, Tensor residual_out, Tensor? weight, Tensor? "
      "bias, Tensor mean, Tensor rstd, Tensor? seed, float p, bool want_dx, bool want_dresidual, bool want_dweight, "
      "bool want_dbias) -> (Tensor dx, Tensor dresidual, Tensor dweight, Tensor dbias)");
}

WARPSMITH_IMPLEMENTATIONS(m) {
  m.impl("dropout_add_layer_norm", TORCH_BOX(&forward));
  m.impl("dropout_add_layer_norm_forward", TORCH_BOX(&forward));
  m.impl("dropout_add_layer_norm_inference", TORCH_BOX(&inference));
  m.impl("dropout_add_layer_norm_backward", TORCH_BOX(&backward));
}

}  // namespace
}  // namespace warpsmith
