#pragma once
#include <cstdint>

#include "common/dropout.h"
#include "common/dtype.h"
#include "common/float8_scale.h"
#include "common/op_list.h"
#include "common/parallel.h"
#include "common/status.h"
#include "kernels/norm/norm_ops.h"

// Params and entry points of the norm family. Columns are adjacent; strides are in elements. Sums and statistics are
// float (double for float64).
namespace warpsmith {

WARPSMITH_DEFINE_OPS(Norm, WARPSMITH_NORM_OPS)

// The flags of an op's row.
struct NormRow {
  bool layer, residual, dropout;
};
constexpr NormRow row_of(Norm op) {
#define WARPSMITH_ROW(op, ...) {__VA_ARGS__},
  constexpr NormRow rows[] = {WARPSMITH_NORM_OPS(WARPSMITH_ROW)};
#undef WARPSMITH_ROW
  return rows[static_cast<int>(op)];
}

// With s = x, or s = dropout(x) + residual rounded to residual_dtype (what residual_out holds), for each row:
//   rms:    y = s * rstd * (weight + weight_offset) + bias,           rstd = 1 / sqrt(mean(s^2) + eps)
//   layer:  y = (s - mean(s)) * rstd * (weight + weight_offset) + bias,    rstd = 1 / sqrt(mean((s - mean(s))^2) + eps)
struct NormForwardParams {
  const void* x = nullptr;         // [rows, columns], dtype; rows x_stride apart
  const void* residual = nullptr;  // [rows, columns], residual_dtype; rows residual_stride apart; null: the op has none
  const void* weight = nullptr;    // [columns], weight_dtype; null: all ones (weight_offset is then not used)
  const void* bias = nullptr;      // [columns], weight_dtype; null: zeros (always so for rms)
  void* y = nullptr;               // [rows, columns], dtype, contiguous
  void* residual_out = nullptr;    // [rows, columns], residual_dtype, contiguous; null exactly when residual is
  void* mean = nullptr;            // [rows], float (double for float64); null: not wanted (always so for rms)
  void* rstd = nullptr;            // [rows], float (double for float64); null: not wanted
  int64_t rows = 0, columns = 0, x_stride = 0, residual_stride = 0;
  double eps = 0, weight_offset = 0;
  Dropout dropout = {nullptr, 0, 1};  // of x, elements counted as row * columns + column; only with a residual
  Norm op = Norm::rms_norm;
  Dtype dtype = Dtype::float32;           // of x and y
  Dtype residual_dtype = Dtype::float32;  // dtype, or float32 beside a 16-bit dtype; dtype without a residual
  Dtype weight_dtype = Dtype::float32;    // dtype, or float32 beside a 16-bit dtype
  Float8Rows cast = {};                   // beside y; CUDA alone
  bool as_added = false;                  // as in NormProblem
};

// With s_hat = (s - mean) * rstd (mean = 0 for rms) and g = dy * (weight + weight_offset):
//   ds = rstd * (g - s_hat * mean(g * s_hat) - mean(g)) + dresidual_out     (rms: without mean(g))
//   dresidual = ds,   dx = ds, or ds * scale where the element was kept and 0 where it was dropped
//   dweight = sum over rows of dy * s_hat,   dbias = sum over rows of dy.
struct NormBackwardParams {
  const void* dy = nullptr;             // [rows, columns], dtype; rows dy_stride apart
  const void* dresidual_out = nullptr;  // [rows, columns], residual_dtype; rows dresidual_out_stride apart; null: zeros
  const void* s = nullptr;  // [rows, columns], residual_dtype; rows s_stride apart: x, or residual_out of the forward
  const void* weight = nullptr;  // [columns], weight_dtype, or null
  const void* mean = nullptr;    // [rows], float (double for float64); null for rms
  const void* rstd = nullptr;    // [rows], float (double for float64)
  void* dx = nullptr;            // [rows, columns], dtype, contiguous; null: not wanted
  void* dresidual = nullptr;     // [rows, columns], residual_dtype, contiguous; null: not wanted, or the same as dx (no
                                 // dropout, residual_dtype equal to dtype: the caller hands out dx for both)
  void* dweight = nullptr;       // [columns], weight_dtype; null: not wanted
  void* dbias = nullptr;         // [columns], weight_dtype; null: not wanted
  void* dweight_partials = nullptr;  // [partial rows, columns], float (double for float64); null when dweight is
  void* dbias_partials = nullptr;    // [partial rows, columns], float (double for float64); null when dbias is
  int64_t rows = 0, columns = 0, dy_stride = 0, dresidual_out_stride = 0, s_stride = 0;
  double weight_offset = 0;
  Dropout dropout = {nullptr, 0, 1};  // as in the forward
  Norm op = Norm::rms_norm;
  Dtype dtype = Dtype::float32;           // of dy and dx
  Dtype residual_dtype = Dtype::float32;  // of s, dresidual_out and dresidual; dtype without a residual
  Dtype weight_dtype = Dtype::float32;
};

// has_cast: set to whether params.cast was written too, which not every kernel does (norm_casts).
Status norm_forward_cuda(const NormForwardParams& params, void* stream, bool* has_cast = nullptr);
Status norm_forward_cpu(const NormForwardParams& params, const Parallel& parallel);
Status norm_backward_cuda(const NormBackwardParams& params, void* stream);
Status norm_backward_cpu(const NormBackwardParams& params, const Parallel& parallel);

// dweight and dbias are summed in two stages, in a fixed order: groups of rows into partial rows, then over the partial
// rows. Sets partial_rows to the number that a backward on the current device writes. It depends on alignment: set all
// pointers but the partials before the call.
Status norm_partial_rows_cuda(const NormBackwardParams& params, int64_t* partial_rows);
// Returns that number on the CPU.
int64_t norm_partial_rows_cpu(int64_t rows, int64_t columns);

}  // namespace warpsmith
