#pragma once
#include <cstdint>

#include "common/dropout.h"
#include "common/dtype.h"
#include "common/parallel.h"
#include "common/status.h"

// y = residual + keep * scale * x, with the mask of common/dropout.h over the elements of x. Columns are adjacent;
// strides are in elements. Arithmetic is float (double for float64).
namespace warpsmith {

struct DropoutAddFwdParams {
  const void* x;         // [rows, columns], dtype; rows x_stride apart
  const void* residual;  // [rows, columns], dtype; rows residual_stride apart
  void* y;               // [rows, columns], dtype, contiguous
  Dropout dropout;       // without a seed: y = residual + x
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
