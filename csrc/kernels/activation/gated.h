#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/parallel.h"
#include "common/status.h"

// Gated activations: y = f(gate) * up, element by element, for f = silu (swiglu), gelu (geglu) and relu (reglu).
// Columns are adjacent; strides are in elements. One tensor of 2F columns, [gate, up], is two pointers F apart with
// equal strides. Arithmetic is float (double for float64).
namespace warpsmith {

struct GatedFwdParams {
  const void* gate;  // [rows, columns], dtype; rows gate_stride apart
  const void* up;    // [rows, columns], dtype; rows up_stride apart
  void* y;           // [rows, columns], dtype, contiguous
  int64_t rows, columns, gate_stride, up_stride;
  bool tanh;  // geglu: the approximation of gelu by tanh; the others do not read it
  Dtype dtype;
};

// dgate = dy * up * f'(gate), dup = dy * f(gate). dgate may be gate and dup may be up.
struct GatedBwdParams {
  const void* dy;    // [rows, columns], dtype; rows dy_stride apart
  const void* gate;  // as in the forward
  const void* up;
  void* dgate;  // [rows, columns], dtype; rows dgate_stride apart; null: not wanted
  void* dup;    // [rows, columns], dtype; rows dup_stride apart; null: not wanted
  int64_t rows, columns, dy_stride, gate_stride, up_stride, dgate_stride, dup_stride;
  bool tanh;
  Dtype dtype;
};

}  // namespace warpsmith
