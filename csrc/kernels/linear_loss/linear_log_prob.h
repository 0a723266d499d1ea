#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/parallel.h"
#include "common/status.h"

namespace warpsmith {

// The bias's gradient of a linear loss: sums[c] (+)= sum over rows of x[r, c], in a fixed order. "real" is float,
// double for float64.
struct ColumnSumsParams {
  const void* x;   // [rows, columns], dtype; rows x_stride apart
  void* sums;      // [columns], real
  void* partials;  // [column_sums_slices_cuda(...), columns], real; CUDA alone, and null for one slice
  int64_t rows, columns, x_stride;
  bool add;  // to what sums holds; otherwise it is written
  Dtype dtype;
};

// Into how many pieces the rows are cut. Depends on the current device.
Status column_sums_slices_cuda(const ColumnSumsParams& params, int64_t* slices);
Status column_sums_cuda(const ColumnSumsParams& params, void* stream);
Status column_sums_cpu(const ColumnSumsParams& params, const Parallel& parallel);

}  // namespace warpsmith
