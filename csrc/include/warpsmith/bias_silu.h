#pragma once
#include "warpsmith/biased.h"

namespace warpsmith {
namespace detail {

struct BiasSilu {
  static constexpr const char* kName = "bias_silu";
  static constexpr bool kTanh = false;
};

}  // namespace detail

// y = z / (1 + e^-z) of z = x + bias, with gradients for both; the sum is not rounded in between.
//
// x: (..., F), float32, float16, bfloat16, or float64 on the CPU. bias: (F,), the dtype of x, or float32 beside a
// 16-bit x. Sums are float32 (float64 for float64) in a fixed order: equal inputs give equal bits.
//
// Input that does not fit throws an error that names op, argument, what was expected and what came.
inline at::Tensor bias_silu(const at::Tensor& x, const at::Tensor& bias) {
  return detail::biased<detail::BiasSilu>(x, bias, false);
}

}  // namespace warpsmith
