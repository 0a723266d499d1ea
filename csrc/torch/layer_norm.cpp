#include "kernels/norm/layer_norm.h"

#include "torch/support/library.h"
#include "torch/support/norm.h"

namespace warpsmith {
namespace {

WARPSMITH_NORM_OP(LayerNorm, layer_norm, NormKind::layer);

std::tuple<Tensor, Tensor, Tensor> forward(Tensor x, std::optional<Tensor> weight, std::optional<Tensor> bias,
                                           double eps) {
  const NormOutputs out = norm_forward<LayerNorm>({.x = x, .weight = weight, .bias = bias, .eps = eps}, true);
  return {out.y, out.mean, out.rstd};
}

Tensor inference(Tensor x, std::optional<Tensor> weight, std::optional<Tensor> bias, double eps) {
  return norm_forward<LayerNorm>({.x = x, .weight = weight, .bias = bias, .eps = eps}, false).y;
}

std::tuple<Tensor, Tensor, Tensor> backward(Tensor dy, Tensor x, std::optional<Tensor> weight,
                                            std::optional<Tensor> bias, Tensor mean, Tensor rstd, bool want_dx,
                                            bool want_dweight, bool want_dbias) {
  const NormGradients out = norm_backward<LayerNorm>({.dy = dy,
                                                      .s = x,
                                                      .s_name = "x",
                                                      .residual = false,
                                                      .weight = weight,
                                                      .bias = bias,
                                                      .mean = mean,
                                                      .rstd = rstd,
                                                      .want_dx = want_dx,
                                                      .want_dweight = want_dweight,
                                                      .want_dbias = want_dbias});
  return {out.dx, out.dweight, out.dbias};
}

WARPSMITH_SCHEMAS(m) {
  m.def("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor y, Tensor mean, Tensor rstd)");
  m.def(
      "layer_norm_forward(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor y, Tensor mean, Tensor rstd)");
  m.def("layer_norm_inference(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor y");
  m.def(
      "layer_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, bool want_dx, "
      "bool want_dweight, bool want_dbias) -> (Tensor dx, Tensor dweight, Tensor dbias)");
}

WARPSMITH_IMPLEMENTATIONS(m) {
  m.impl("layer_norm", TORCH_BOX(&forward));
  m.impl("layer_norm_forward", TORCH_BOX(&forward));
  m.impl("layer_norm_inference", TORCH_BOX(&inference));
  m.impl("layer_norm_backward", TORCH_BOX(&backward));
}

}  // namespace
}  // namespace warpsmith
