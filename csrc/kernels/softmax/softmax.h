#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/op_list.h"
#include "common/parallel.h"
#include "common/status.h"
#include "kernels/softmax/softmax_config.h"
#include "kernels/softmax/softmax_ops.h"

// Params and entry points of the softmax family, of both directions.
namespace warpsmith {

WARPSMITH_DEFINE_OPS(Softmax, WARPSMITH_SOFTMAX_OPS)

// Forward, with m the row's maximum and s = sum of exp(x - m):   result = exp(x - m) / s,   log: x - m - log s
// Backward, with y the forward's result:   result = y * (dy - sum of y * dy),   log: dy - exp(y) * sum of dy
// Strides are in elements. The columns of a row are adjacent. Sums are float, of float64 double.
struct SoftmaxParams {
  const void* x = nullptr;   // [rows, columns], dtype; rows x_stride apart: x, or backward y
  const void* dy = nullptr;  // [rows, columns], dtype; rows dy_stride apart; null: forward. Kernels want every row to
                             // begin as many elements behind an address of 16 bytes as that of x
  void* result = nullptr;    // [rows, columns], result_dtype, contiguous: y, or backward dx
  int64_t rows = 0, columns = 0, x_stride = 0, dy_stride = 0;
  Dtype dtype = Dtype::float32, result_dtype = Dtype::float32;  // equal, or one is float32 and the other has 16 bits
  bool log = false;
};

Status softmax_cuda(const SoftmaxParams& params, void* stream);
Status softmax_cpu(const SoftmaxParams& params, const Parallel& parallel);

}  // namespace warpsmith
