#include "kernels/activation/geglu.h"

#include "torch/support/gated.h"
#include "torch/support/library.h"

namespace warpsmith {
namespace {

struct Geglu {
  static constexpr const char *kForward = "geglu", *kBackward = "geglu_backward";
  static Status cuda(const GatedFwdParams& p, void* stream) { return geglu_forward_cuda(p, stream); }
  static Status cuda(const GatedBwdParams& p, void* stream) { return geglu_backward_cuda(p, stream); }
  static Status cpu(const GatedFwdParams& p, const Parallel& threads) { return geglu_forward_cpu(p, threads); }
  static Status cpu(const GatedBwdParams& p, const Parallel& threads) { return geglu_backward_cpu(p, threads); }
};

Tensor forward(Tensor gate, std::optional<Tensor> up, bool, bool tanh) { return gated_forward<Geglu>(gate, up, tanh); }

std::tuple<Tensor, Tensor> backward(Tensor dy, Tensor gate, std::optional<Tensor> up, bool want_dgate, bool want_dup,
                                    bool tanh) {
  return gated_backward<Geglu>(dy, gate, up, tanh, want_dgate, want_dup);
}

void backward_inplace(Tensor dy, Tensor gate, std::optional<Tensor> up, bool want_dgate, bool want_dup, bool tanh) {
  gated_backward_inplace<Geglu>(dy, gate, up, tanh, want_dgate, want_dup);
}

WARPSMITH_SCHEMAS(m) {
  // inplace_backward speaks to autograd alone.
  m.def("geglu(Tensor gate, Tensor? up, bool inplace_backward, bool tanh) -> Tensor y");
  m.def("geglu_forward(Tensor gate, Tensor? up, bool inplace_backward, bool tanh) -> Tensor y");
  m.def(
      "geglu_backward(Tensor dy, Tensor gate, Tensor? up, bool want_dgate, bool want_dup, bool tanh) -> (Tensor dgate, "
      "Tensor "
      "dup)");
  m.def("geglu_backward_(Tensor dy, Tensor(a!) gate, Tensor(b!)? up, bool want_dgate, bool want_dup, bool tanh) -> ()");
}

WARPSMITH_IMPLEMENTATIONS(m) {
  m.impl("geglu", TORCH_BOX(&forward));
  m.impl("geglu_forward", TORCH_BOX(&forward));
  m.impl("geglu_backward", TORCH_BOX(&backward));
  m.impl("geglu_backward_", TORCH_BOX(&backward_inplace));
}

}  // namespace
}  // namespace warpsmith
