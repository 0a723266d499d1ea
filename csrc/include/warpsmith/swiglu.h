#pragma once
#include "warpsmith/gated.h"

namespace warpsmith {
namespace detail {

struct Swiglu {
  static constexpr const char* kName = "swiglu";

  static at::Tensor forward(const at::Tensor& gate, const std::optional<at::Tensor>& up, bool) {
    using Signature = at::Tensor(const at::Tensor&, const std::optional<at::Tensor>&, bool);
    static const auto op = find_op<Signature>("warpsmith::swiglu_forward");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return op.call(gate, up, false);
  }

  static variable_list backward(const at::Tensor& dy, const at::Tensor& gate, const std::optional<at::Tensor>& up, bool,
                                bool want_dgate, bool want_dup) {
    using Signature = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&,
                                                         const std::optional<at::Tensor>&, bool, bool);
    static const auto op = find_op<Signature>("warpsmith::swiglu_backward");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [dgate, dup] = op.call(dy, gate, up, want_dgate, want_dup);
    return {std::move(dgate), std::move(dup)};
  }

  static void backward_inplace(const at::Tensor& dy, const at::Tensor& gate, const std::optional<at::Tensor>& up, bool,
                               bool want_dgate, bool want_dup) {
    using Signature = void(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, bool, bool);
    static const auto op = find_op<Signature>("warpsmith::swiglu_backward_");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    op.call(dy, gate, up, want_dgate, want_dup);
  }
};

}  // namespace detail

// y = gate / (1 + e^-gate) * up, with gradients for both. Without up, gate holds [gate, up] along its last dimension,
// as one matrix product gives them, and has one gradient.
//
// gate: (..., F), or (..., 2F) without up; float32, float16, bfloat16, or float64 on the CPU. up: like gate.
// inplace_backward: the backward may write the gradients over gate and up, which are then lost, where they are
// contiguous and lie apart; none of them may be a leaf that requires a gradient.
//
// Input that does not fit throws an error that names op, argument, what was expected and what came.
inline at::Tensor swiglu(const at::Tensor& gate, const std::optional<at::Tensor>& up = std::nullopt,
                         bool inplace_backward = false) {
  return detail::gated<detail::Swiglu>(gate, up, false, inplace_backward);
}

}  // namespace warpsmith
