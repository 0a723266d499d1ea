#include "kernels/activation/bias_silu.h"

#include "torch/support/biased.h"
#include "torch/support/library.h"

namespace warpsmith {
namespace {

struct BiasSilu {
  static constexpr const char *kForward = "bias_silu", *kBackward = "bias_silu_backward";
  static Status cuda(const BiasedFwdParams& p, void* stream) { return bias_silu_forward_cuda(p, stream); }
  static Status cuda(const BiasedBwdParams& p, void* stream) { return bias_silu_backward_cuda(p, stream); }
  static Status partial_rows(const BiasedBwdParams& p, int64_t* rows) { return bias_silu_partial_rows_cuda(p, rows); }
  static Status cpu(const BiasedFwdParams& p, const Parallel& threads) { return bias_silu_forward_cpu(p, threads); }
  static Status cpu(const BiasedBwdParams& p, const Parallel& threads) { return bias_silu_backward_cpu(p, threads); }
};

Tensor forward(Tensor x, Tensor bias) { return biased_forward<BiasSilu>(x, bias, false); }

std::tuple<Tensor, Tensor> backward(Tensor dy, Tensor x, Tensor bias, bool want_dx, bool want_dbias) {
  return biased_backward<BiasSilu>(dy, x, bias, false, want_dx, want_dbias);
}

WARPSMITH_SCHEMAS(m) {
  m.def("bias_silu(Tensor x, Tensor bias) -> Tensor y");
  m.def("bias_silu_forward(Tensor x, Tensor bias) -> Tensor y");
  m.def(
      "bias_silu_backward(Tensor dy, Tensor x, Tensor bias, bool want_dx, bool want_dbias) -> (Tensor dx, Tensor "
      "dbias)");
}

WARPSMITH_IMPLEMENTATIONS(m) {
  m.impl("bias_silu", TORCH_BOX(&forward));
  m.impl("bias_silu_forward", TORCH_BOX(&forward));
  m.impl("bias_silu_backward", TORCH_BOX(&backward));
}

}  // namespace
}  // namespace warpsmith
