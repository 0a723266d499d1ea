#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/parallel.h"
#include "common/status.h"

namespace warpsmith {

// A linear cross-entropy makes its gradients in the forward; this is what is left to do when the incoming gradient is
// known. With s = factor / denominator, for each element of x (made in the forward, or summed over chunks):
//   sum is null:  out = x * s, rounded to out_dtype. Where out is x, nothing is touched if s is 1.
//   otherwise:    sum += x * s, and x becomes 0.
// "real" is float, double for float64. factor and denominator stay on their device.
struct LinearFinishParams {
  void* x;                  // [count], dtype
  void* out;                // [count], out_dtype; may be x if the dtypes are equal; null with sum
  void* sum;                // [count], real; or null
  const void* factor;       // [1], real
  const void* denominator;  // [1], real; null: 1. Zero counts as 1: x is zero then, because no row counts
  int64_t count;
  Dtype dtype;      // float32 for 16-bit out_dtype, or out_dtype itself; with sum any
  Dtype out_dtype;  // dtype with sum
};

Status linear_finish_cuda(const LinearFinishParams& params, void* stream);
Status linear_finish_cpu(const LinearFinishParams& params, const Parallel& parallel);

}  // namespace warpsmith
