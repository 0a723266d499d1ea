#include "kernels/activation/reglu.h"

#include "torch/support/gated.h"
#include "torch/support/library.h"

namespace warpsmith {
namespace {

struct Reglu {
  static constexpr const char *kForward = "reglu", *kBackward = "reglu_backward";
  static Status cuda(const GatedFwdParams& p, void* stream) { return reglu_forward_cuda(p, stream); }
  static Status cuda(const GatedBwdParams& p, void* stream) { return reglu_backward_cuda(p, stream); }
  static Status cpu(const GatedFwdParams& p, const Parallel& threads) { return reglu_forward_cpu(p, threads); }
  static Status cpu(const GatedBwdParams& p, const Parallel& threads) { return reglu_backward_cpu(p, threads); }
};

Tensor forward(Tensor gate, std::optional<Tensor> up, bool) { return gated_forward<Reglu>(gate, up, false); }

std::tuple<Tensor, Tensor> backward(Tensor dy, Tensor gate, std::optional<Tensor> up, bool want_dgate, bool want_dup) {
  return gated_backward<Reglu>(dy, gate, up, false, want_dgate, want_dup);
}

void backward_inplace(Tensor dy, Tensor gate, std::optional<Tensor> up, bool want_dgate, bool want_dup) {
  gated_backward_inplace<Reglu>(dy, gate, up, false, want_dgate, want_dup);
}

WARPSMITH_SCHEMAS(m) {
  // inplace_backward speaks to autograd alone.
  m.def("reglu(Tensor gate, Tensor? up, bool inplace_backward) -> Tensor y");
  m.def("reglu_forward(Tensor gate, Tensor? up, bool inplace_backward) -> Tensor y");
  m.def(
      "reglu_backward(Tensor dy, Tensor gate, Tensor? up, bool want_dgate, bool want_dup) -> (Tensor dgate, Tensor "
      "dup)");
  m.def("reglu_backward_(Tensor dy, Tensor(a!) gate, Tensor(b!)? up, bool want_dgate, bool want_dup) -> ()");
}

WARPSMITH_IMPLEMENTATIONS(m) {
  m.impl("reglu", TORCH_BOX(&forward));
  m.impl("reglu_forward", TORCH_BOX(&forward));
  m.impl("reglu_backward", TORCH_BOX(&backward));
  m.impl("reglu_backward_", TORCH_BOX(&backward_inplace));
}

}  // namespace
}  // namespace warpsmith
