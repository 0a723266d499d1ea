#pragma once
#include "warpsmith/gated.h"

namespace warpsmith {
namespace detail {

struct Geglu {
  static constexpr const char* kName = "geglu";
  static constexpr bool kTanh = true;
};

}  // namespace detail

// y = gelu(gate) * up, with gradients for both. Without up, gate holds [gate, up] along its last dimension,
// as one matrix product gives them, and has one gradient.
//
// gate: (..., F), or (..., 2F) without up; float32, float16, bfloat16, or float64 on the CPU. up: like gate.
// tanh: whether gelu is its approximation by tanh.
// inplace_backward: the backward may write the gradients over gate and up, which are then lost, where they are
// contiguous and lie apart; none of them may be a leaf that requires a gradient.
//
// Input that does not fit throws an error that names op, argument, what was expected and what came.
inline at::Tensor geglu(const at::Tensor& gate, const std::optional<at::Tensor>& up = std::nullopt, bool tanh = false,
                        bool inplace_backward = false) {
  return detail::gated<detail::Geglu>(gate, up, tanh, inplace_backward);
}

}  // namespace warpsmith
