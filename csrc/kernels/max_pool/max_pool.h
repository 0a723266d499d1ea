#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/op_list.h"
#include "common/parallel.h"
#include "common/status.h"
#include "kernels/max_pool/max_pool_config.h"
#include "kernels/max_pool/max_pool_ops.h"

// Params and entry points of the max_pool family: pixels of adjacent channels (NHWC).
namespace warpsmith {

WARPSMITH_DEFINE_OPS(MaxPool, WARPSMITH_MAX_POOL_OPS)

// Window (i, j) of a sample begins at row i * stride[0] - padding[0] of x, column j * stride[1] - padding[1]. It has at
// least one pixel of x. Its pixels are numbered row by row, those outside of x too.
struct MaxPoolShape {
  int64_t samples = 0, channels = 0;
  int height = 0, width = 0, out_height = 0, out_width = 0;
  int kernel[2] = {1, 1}, stride[2] = {1, 1}, padding[2] = {0, 0};  // of rows, of columns
  Dtype dtype = Dtype::float32;

  constexpr MaxPoolProblem problem() const {
    return {samples,
            channels,
            height,
            width,
            out_height,
            out_width,
            {kernel[0], kernel[1]},
            {stride[0], stride[1]},
            {padding[0], padding[1]},
            size_bytes(dtype)};
  }
};

// y is the largest element of each window: the last NaN, else the first of equal ones. index is its number.
struct MaxPoolForwardParams : MaxPoolShape {
  const void* x = nullptr;   // [samples, height, width, channels], pixels x_stride elements apart
  void* y = nullptr;         // [samples, out_height, out_width, channels], contiguous
  uint8_t* index = nullptr;  // likewise, or null
  int64_t x_stride = 0;
};

// dx is the sum, in float (double for float64), of dy of those windows whose index names the pixel, row by row.
struct MaxPoolBackwardParams : MaxPoolShape {
  const void* dy = nullptr;        // [samples, out_height, out_width, channels], pixels dy_stride elements apart
  const uint8_t* index = nullptr;  // [samples, out_height, out_width, channels], contiguous
  void* dx = nullptr;              // [samples, height, width, channels], contiguous
  int64_t dy_stride = 0;
};

Status max_pool2d_forward_cuda(const MaxPoolForwardParams& params, void* stream);
Status max_pool2d_backward_cuda(const MaxPoolBackwardParams& params, void* stream);
Status max_pool2d_forward_cpu(const MaxPoolForwardParams& params, const Parallel& parallel);
Status max_pool2d_backward_cpu(const MaxPoolBackwardParams& params, const Parallel& parallel);

}  // namespace warpsmith
