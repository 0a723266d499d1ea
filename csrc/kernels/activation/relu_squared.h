#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/parallel.h"
#include "common/status.h"

// y = max(x, 0)^2. Columns are adjacent; strides are in elements. Arithmetic is float (double for float64).
namespace warpsmith {

struct ReluSquaredFwdParams {
  const void* x;  // [rows, columns], dtype; rows x_stride apart
  void* y;        // [rows, columns], dtype, contiguous
  int64_t rows, columns, x_stride;
  Dtype dtype;
};

// dx = 2 dy max(x, 0)
struct ReluSquaredBwdParams {
  const void* dy;  // [rows, columns], dtype; rows dy_stride apart
  const void* x;   // as in the forward
  void* dx;        // [rows, columns], dtype, contiguous
  int64_t rows, columns, dy_stride, x_stride;
  Dtype dtype;
};

Status relu_squared_forward_cuda(const ReluSquaredFwdParams& params, void* stream);
Status relu_squared_forward_cpu(const ReluSquaredFwdParams& params, const Parallel& parallel);

Status relu_squared_backward_cuda(const ReluSquaredBwdParams& params, void* stream);
Status relu_squared_backward_cpu(const ReluSquaredBwdParams& params, const Parallel& parallel);

}  // namespace warpsmith
