#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/parallel.h"
#include "common/status.h"

namespace warpsmith {

// y = x * rstd * (weight + weight_offset), rstd = 1 / sqrt(mean(x^2) + eps), each row by itself.
// Sums and rstd are fp32 (fp64 for float64). Columns are adjacent; strides are in elements.
struct RmsNormFwdParams {
  const void* x;       // [rows, columns], dtype; rows x_stride apart
  const void* weight;  // [columns], weight_dtype; null: all ones (weight_offset is then not used)
  void* y;             // [rows, columns], dtype, contiguous
  void* rstd;          // [rows], float (double for float64); null: not wanted
  int64_t rows, columns, x_stride;
  double eps, weight_offset;
  Dtype dtype, weight_dtype;  // equal, or 16-bit dtype with float32 weight
};

// With x_hat = x * rstd and g = dy * (weight + weight_offset):
//   dx = rstd * (g - x_hat * mean(g * x_hat)),   dweight = sum over rows of dy * x_hat.
struct RmsNormBwdParams {
  const void* dy;      // [rows, columns], dtype; rows dy_stride apart
  const void* x;       // [rows, columns], dtype; rows x_stride apart
  const void* weight;  // [columns], weight_dtype, or null
  const void* rstd;    // [rows], float (double for float64)
  void* dx;            // [rows, columns], dtype, contiguous; null: not wanted
  void* dweight;       // [columns], weight_dtype; null: not wanted
  void* partials;      // [rms_norm_partial_rows(...), columns], float (double for float64); null when dweight is
  int64_t rows, columns, dy_stride, x_stride;
  double weight_offset;
  Dtype dtype, weight_dtype;
};

Status rms_norm_forward_cuda(const RmsNormFwdParams& params, void* stream);
Status rms_norm_forward_cpu(const RmsNormFwdParams& params, const Parallel& parallel);

// dweight is summed in two stages in a fixed order: into `partials` by row blocks, then over them.
// How many partial rows a backward writes. The CUDA answer depends on the current device.
Status rms_norm_partial_rows_cuda(const RmsNormBwdParams& params, int64_t* partial_rows);
int64_t rms_norm_partial_rows_cpu(int64_t rows);

Status rms_norm_backward_cuda(const RmsNormBwdParams& params, void* stream);

// With a configuration of the caller's choice (tuning and tests); `partials` must have its rms_norm_partial_rows.
struct RmsNormConfig;
Status rms_norm_forward_cuda_with(const RmsNormConfig& config, const RmsNormFwdParams& params, void* stream);
Status rms_norm_backward_cuda_with(const RmsNormConfig& config, const RmsNormBwdParams& params, void* stream);

Status rms_norm_backward_cpu(const RmsNormBwdParams& params, const Parallel& parallel);

}  // namespace warpsmith
