#pragma once
#include "warpsmith/gated.h"

namespace warpsmith {
namespace detail {

struct Reglu {
  static constexpr const char* kName = "reglu";
  static constexpr bool kTanh = false;
};

}  // namespace detail

// y = max(gate, 0) * up, with gradients for both. Without up, gate holds [gate, up] along its last dimension,
// as one matrix product gives them, and has one gradient.
//
// gate: (..., F), or (..., 2F) without up; float32, float16, bfloat16, or float64 on the CPU. up: like gate.
// inplace_backward: the backward may write the gradients over gate and up, which are then lost, where they are
// contiguous and lie apart; none of them may be a leaf that requires a gradient.
//
// Input that does not fit throws an error that names op, argument, what was expected and what came.
inline at::Tensor reglu(const at::Tensor& gate, const std::optional<at::Tensor>& up = std::nullopt,
                        bool inplace_backward = false) {
  return detail::gated<detail::Reglu>(gate, up, false, inplace_backward);
}

}  // namespace warpsmith
