#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/parallel.h"
#include "common/status.h"

// Activations of a sum: y = f(x + bias), for f = gelu (bias_gelu) and silu (bias_silu). Columns are adjacent; strides
// are in elements. Arithmetic is float (double for float64), and so is the sum, which is not rounded in between.
namespace warpsmith {

struct BiasedFwdParams {
  const void* x;     // [rows, columns], dtype; rows x_stride apart
  const void* bias;  // [columns], bias_dtype
  void* y;           // [rows, columns], dtype, contiguous
  int64_t rows, columns, x_stride;
  bool tanh;                // bias_gelu: the approximation of gelu by tanh; bias_silu does not read it
  Dtype dtype, bias_dtype;  // equal, or 16-bit dtype with float32 bias
};

// dx = dy * f'(x + bias), dbias = sum over rows of dx before it is rounded.
struct BiasedBwdParams {
  const void* dy;    // [rows, columns], dtype; rows dy_stride apart
  const void* x;     // as in the forward
  const void* bias;  // as in the forward
  void* dx;          // [rows, columns], dtype, contiguous; null: not wanted
  void* dbias;       // [columns], bias_dtype; null: not wanted
  void* partials;    // [partial rows, columns], float (double for float64); null when dbias is
  int64_t rows, columns, dy_stride, x_stride;
  bool tanh;
  Dtype dtype, bias_dtype;
};

// dbias is summed in two stages in a fixed order: into `partials` by groups of rows, then over them. How many partial
// rows the CPU writes, of at least 8 rows and 16,384 elements each, since each costs a row of sums; the CUDA launchers
// have a function that says it of the current device.
constexpr int64_t biased_partial_rows_cpu(int64_t rows, int64_t columns) {
  const int64_t by_elements = 16384 / (columns > 0 ? columns : 1), least = by_elements > 8 ? by_elements : 8;
  return rows < 64 * least ? (rows + least - 1) / least : 64;
}

}  // namespace warpsmith
