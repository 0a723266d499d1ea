#include "kernels/activation/bias_gelu.h"

#include "torch/support/biased.h"
#include "torch/support/library.h"

namespace warpsmith {
namespace {

struct BiasGelu {
  static constexpr const char *kForward = "bias_gelu", *kBackward = "bias_gelu_backward";
  static Status cuda(const BiasedFwdParams& p, void* stream) { return bias_gelu_forward_cuda(p, stream); }
  static Status cuda(const BiasedBwdParams& p, void* stream) { return bias_gelu_backward_cuda(p, stream); }
  static Status partial_rows(const BiasedBwdParams& p, int64_t* rows) { return bias_gelu_partial_rows_cuda(p, rows); }
  static Status cpu(const BiasedFwdParams& p, const Parallel& threads) { return bias_gelu_forward_cpu(p, threads); }
  static Status cpu(const BiasedBwdParams& p, const Parallel& threads) { return bias_gelu_backward_cpu(p, threads); }
};

Tensor forward(Tensor x, Tensor bias, bool tanh) { return biased_forward<BiasGelu>(x, bias, tanh); }

std::tuple<Tensor, Tensor> backward(Tensor dy, Tensor x, Tensor bias, bool want_dx, bool want_dbias, bool tanh) {
  return biased_backward<BiasGelu>(dy, x, bias, tanh, want_dx, want_dbias);
}

WARPSMITH_SCHEMAS(m) {
  m.def("bias_gelu(Tensor x, Tensor bias, bool tanh) -> Tensor y");
  m.def("bias_gelu_forward(Tensor x, Tensor bias, bool tanh) -> Tensor y");
  m.def(
      "bias_gelu_backward(Tensor dy, Tensor x, Tensor bias, bool want_dx, bool want_dbias, bool tanh) -> (Tensor dx, "
      "Tensor dbias)");
}

WARPSMITH_IMPLEMENTATIONS(m) {
  m.impl("bias_gelu", TORCH_BOX(&forward));
  m.impl("bias_gelu_forward", TORCH_BOX(&forward));
  m.impl("bias_gelu_backward", TORCH_BOX(&backward));
}

}  // namespace
}  // namespace warpsmith
