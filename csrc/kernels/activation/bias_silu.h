#pragma once
#include "kernels/activation/biased.h"

// y = silu(x + bias), silu(z) = z / (1 + e^-z).
namespace warpsmith {

Status bias_silu_forward_cuda(const BiasedFwdParams& params, void* stream);
Status bias_silu_forward_cpu(const BiasedFwdParams& params, const Parallel& parallel);

// How many rows of partial sums a backward on the current device writes.
Status bias_silu_partial_rows_cuda(const BiasedBwdParams& params, int64_t* partial_rows);
Status bias_silu_backward_cuda(const BiasedBwdParams& params, void* stream);
Status bias_silu_backward_cpu(const BiasedBwdParams& params, const Parallel& parallel);

}  // namespace warpsmith
