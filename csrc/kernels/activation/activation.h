#pragma once
#include <cstdint>

#include "common/dropout.h"
#include "common/dtype.h"
#include "common/float8_scale.h"
#include "common/op_list.h"
#include "common/parallel.h"
#include "common/status.h"
#include "kernels/activation/activation_ops.h"

// Params and entry points of the activation family. Columns are adjacent; strides are in elements. Arithmetic is float
// (double for float64), and each result is rounded once.
namespace warpsmith {

// ---- gated: y = f(gate) * up, element by element. A tensor of 2F columns, [gate, up], is passed as two pointers F
// elements apart with equal strides.

WARPSMITH_DEFINE_OPS(Gated, WARPSMITH_GATED_OPS)

struct GatedFwdParams {
  const void* gate;  // [rows, columns], dtype; rows gate_stride apart
  const void* up;    // [rows, columns], dtype; rows up_stride apart
  void* y;           // [rows, columns], dtype, contiguous
  int64_t rows, columns, gate_stride, up_stride;
  bool tanh;  // the op's flag; read only if its row has one
  Dtype dtype;
  Float8Rows cast = {};  // of y, beside it; CUDA alone
};

// dgate = dy * up * f'(gate), dup = dy * f(gate). dgate may be gate and dup may be up. With y, both are wanted.
struct GatedBwdParams {
  const void* dy;    // [rows, columns], dtype; rows dy_stride apart
  const void* gate;  // as in the forward
  const void* up;
  void* dgate;  // [rows, columns], dtype; rows dgate_stride apart; null: not wanted
  void* dup;    // [rows, columns], dtype; rows dup_stride apart; null: not wanted
  int64_t rows, columns, dy_stride, gate_stride, up_stride, dgate_stride, dup_stride;
  bool tanh;
  Dtype dtype;
  void* y = nullptr;  // as in the forward, with its bits, but rows dy_stride apart; may be dy; null: not wanted
};

// has_cast: set to whether params.cast was written too: by swiglu, of rows that fit (gated_row_threads).
Status gated_forward_cuda(Gated op, const GatedFwdParams& params, void* stream, bool* has_cast = nullptr);
Status gated_forward_cpu(Gated op, const GatedFwdParams& params, const Parallel& parallel);
Status gated_backward_cuda(Gated op, const GatedBwdParams& params, void* stream);
Status gated_backward_cpu(Gated op, const GatedBwdParams& params, const Parallel& parallel);

// ---- biased: y = f(x + bias), or f(x) without a bias. The sum is not rounded. y may be x, and dx may be dy.

WARPSMITH_DEFINE_OPS(Biased, WARPSMITH_BIASED_OPS)

struct BiasedFwdParams {
  const void* x;     // [rows, columns], dtype; rows x_stride apart
  const void* bias;  // [columns], bias_dtype; null: zeros
  void* y;           // [rows, columns], dtype, contiguous
  int64_t rows, columns, x_stride;
  bool tanh;                // the op's flag; read only if its row has one
  Dtype dtype, bias_dtype;  // equal, or 16-bit dtype with float32 bias
};

// dx = dy * f'(x + bias), dbias = sum over rows of dx before it is rounded.
struct BiasedBwdParams {
  const void* dy;    // [rows, columns], dtype; rows dy_stride apart
  const void* x;     // as in the forward
  const void* bias;  // as in the forward
  void* dx;          // [rows, columns], dtype, contiguous; null: not wanted
  void* dbias;       // [columns], bias_dtype; null: not wanted. Also there without a bias: the column sums of dx
  void* partials;    // [partial rows, columns], float (double for float64); null when dbias is
  int64_t rows, columns, dy_stride, x_stride;
  bool tanh;
  Dtype dtype, bias_dtype;
};

Status biased_forward_cuda(Biased op, const BiasedFwdParams& params, void* stream);
Status biased_forward_cpu(Biased op, const BiasedFwdParams& params, const Parallel& parallel);
Status biased_backward_cuda(Biased op, const BiasedBwdParams& params, void* stream);
Status biased_backward_cpu(Biased op, const BiasedBwdParams& params, const Parallel& parallel);

// dbias is summed in two stages, in a fixed order: groups of rows into `partials`, then over the partial rows. Sets
// partial_rows to the number that a backward on the current device writes.
Status biased_partial_rows_cuda(const BiasedBwdParams& params, int64_t* partial_rows);
// The same on the CPU: a group has at least 8 rows and 16,384 elements, because each group costs a row of sums.
constexpr int64_t biased_partial_rows_cpu(int64_t rows, int64_t columns) {
  const int64_t by_elements = 16384 / (columns > 0 ? columns : 1), least = by_elements > 8 ? by_elements : 8;
  return rows < 64 * least ? (rows + least - 1) / least : 64;
}

// ---- unary: y = f(x)

WARPSMITH_DEFINE_OPS(Unary, WARPSMITH_UNARY_OPS)

struct UnaryFwdParams {
  const void* x;  // [rows, columns], dtype; rows x_stride apart
  void* y;        // [rows, columns], dtype, contiguous
  int64_t rows, columns, x_stride;
  Dtype dtype;
};

// dx = dy f'(x)
struct UnaryBwdParams {
  const void* dy;  // [rows, columns], dtype; rows dy_stride apart
  const void* x;   // as in the forward
  void* dx;        // [rows, columns], dtype, contiguous
  int64_t rows, columns, dy_stride, x_stride;
  Dtype dtype;
};

Status unary_forward_cuda(Unary op, const UnaryFwdParams& params, void* stream);
Status unary_forward_cpu(Unary op, const UnaryFwdParams& params, const Parallel& parallel);
Status unary_backward_cuda(Unary op, const UnaryBwdParams& params, void* stream);
Status unary_backward_cpu(Unary op, const UnaryBwdParams& params, const Parallel& parallel);

// ---- dropout_add: y = residual + keep * scale * x, with the mask of common/dropout.h over the elements of x

struct DropoutAddFwdParams {
  const void* x;         // [rows, columns], dtype; rows x_stride apart
  const void* residual;  // [rows, columns], dtype; rows residual_stride apart
  void* y;               // [rows, columns], dtype, contiguous
  Dropout dropout;       // no seed: y = residual + x
  int64_t rows, columns, x_stride, residual_stride;
  Dtype dtype;
};

// dx = keep * scale * dy; the gradient of residual is dy.
struct DropoutAddBwdParams {
  const void* dy;   // [rows, columns], dtype; rows dy_stride apart
  void* dx;         // [rows, columns], dtype, contiguous
  Dropout dropout;  // with a seed
  int64_t rows, columns, dy_stride;
  Dtype dtype;
};

Status dropout_add_forward_cuda(const DropoutAddFwdParams& params, void* stream);
Status dropout_add_forward_cpu(const DropoutAddFwdParams& params, const Parallel& parallel);
Status dropout_add_backward_cuda(const DropoutAddBwdParams& params, void* stream);
Status dropout_add_backward_cpu(const DropoutAddBwdParams& params, const Parallel& parallel);

}  // namespace warpsmith
