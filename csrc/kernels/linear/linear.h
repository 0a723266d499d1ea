#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/op_list.h"
#include "common/parallel.h"
#include "common/status.h"
#include "kernels/linear/linear_config.h"
#include "kernels/linear/linear_ops.h"

// The linear family's own kernel, and who computes its products. Activations are the kernels of
// kernels/activation/activation.h. "real" is float; double for float64.
namespace warpsmith {

WARPSMITH_DEFINE_OPS(LinearOp, WARPSMITH_LINEAR_OPS)

// The bias gradient: sums[c] (+)= sum over rows of x[r, c], in a fixed order.
struct ColumnSumsParams {
  const void* x;   // [rows, columns], dtype; rows x_stride apart
  void* sums;      // [columns], real
  void* partials;  // [column_sums_slices_cuda(...), columns], real; CUDA alone, and null for one slice
  int64_t rows, columns, x_stride;
  bool add;  // to what sums holds; otherwise it is written
  Dtype dtype;
};

// Into how many slices the rows are cut. Depends on the current device.
Status column_sums_slices_cuda(const ColumnSumsParams& params, int64_t* slices);
Status column_sums_cuda(const ColumnSumsParams& params, void* stream);
Status column_sums_cpu(const ColumnSumsParams& params, const Parallel& parallel);

// Fills in what the current device says of a problem: the code that runs there.
Status linear_problem_on_device(LinearProblem* problem);

}  // namespace warpsmith
