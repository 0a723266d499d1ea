#pragma once
#include "bindings/support/tensor.h"

namespace warpsmith {

// A tensor read as rows over its last dimension: adjacent columns, one stride between rows. A tensor whose columns are
// not adjacent, or whose leading dimensions do not collapse to one stride, is copied; `tensor` keeps the copy alive.
struct Rows {
  Tensor tensor;
  int64_t rows = 1;
  int64_t columns = 1;
  int64_t stride = 0;  // elements from row to row
};

inline Rows as_rows(const char* op, const char* argument, const Tensor& t) {
  const int64_t dim = t.dim();
  if (dim == 0) refuse(op, argument, "at least one dimension", "a tensor without dimensions");
  const auto sizes = t.sizes(), strides = t.strides();
  Rows r{t, 1, sizes[dim - 1], sizes[dim - 1]};
  bool collapses = r.columns <= 1 || strides[dim - 1] == 1;
  bool stride_known = false;
  int64_t next = 0;  // the stride that the next outer dimension must have
  for (int64_t i = dim - 2; i >= 0; --i) {
    r.rows *= sizes[i];
    if (sizes[i] == 1) continue;
    if (!stride_known) {
      r.stride = strides[i];
      stride_known = true;
    } else if (strides[i] != next) {
      collapses = false;
    }
    next = strides[i] * sizes[i];
  }
  if (!collapses) {
    r.tensor = as_contiguous(t, op);
    r.stride = r.columns;
  }
  return r;
}

}  // namespace warpsmith
