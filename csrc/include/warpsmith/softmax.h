#pragma once
#include "warpsmith/detail/softmax_ops.h"
#include "warpsmith/op.h"

namespace warpsmith {

// softmax and log_softmax over the last dimension, with their gradient. x: (..., C), float32, float16, bfloat16, or
// float64 on the CPU. wide: the result of a 16-bit x is float32.
#define WARPSMITH_ROW(op, log)                                   \
  inline at::Tensor op(const at::Tensor& x, bool wide = false) { \
    static const detail::Op raw({.name = #op});                  \
    return detail::call(raw, {x, wide})[0];                      \
  }
WARPSMITH_SOFTMAX_OPS(WARPSMITH_ROW)
#undef WARPSMITH_ROW

}  // namespace warpsmith
