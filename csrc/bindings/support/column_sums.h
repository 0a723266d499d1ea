#pragma once
#include <optional>

#include "bindings/support/device.h"
#include "bindings/support/tensor.h"
#include "kernels/linear/linear.h"

namespace warpsmith {

// sums[c] (+)= sum over rows of x[r, c], in a fixed order, rounded once: the gradient of a linear layer's bias. x has
// adjacent columns; sums is of the dtype of x, or real.
inline void add_column_sums(const char* op, const Tensor& x, const Tensor& sums, Dtype dtype, Dtype sums_dtype,
                            bool add) {
  ColumnSumsParams p{
      x.const_data_ptr(), sums.mutable_data_ptr(), nullptr, x.size(0), x.size(1), x.stride(0), add, dtype, sums_dtype};
  std::optional<Tensor> partials;
  run_on(
      op, x,
      [&](void* stream) {
        int64_t slices = 0;
        WARPSMITH_RETURN_IF_FAILED(column_sums_slices_cuda(p, &slices));
        const int64_t sizes[2] = {slices, p.columns};
        partials = allocate(op, "partial sums of the bias's gradient", sizes, 2, real_code(dtype), x);
        p.partials = partials->mutable_data_ptr();
        return column_sums_cuda(p, stream);
      },
      [&](const Parallel& threads) { return column_sums_cpu(p, threads); });
}

}  // namespace warpsmith
