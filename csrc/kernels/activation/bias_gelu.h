#pragma once
#include "kernels/activation/biased.h"

// y = gelu(x + bias); gelu(z) = z Phi(z), or with params.tanh its approximation
// z (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3))) / 2.
namespace warpsmith {

Status bias_gelu_forward_cuda(const BiasedFwdParams& params, void* stream);
Status bias_gelu_forward_cpu(const BiasedFwdParams& params, const Parallel& parallel);

// How many rows of partial sums a backward on the current device writes.
Status bias_gelu_partial_rows_cuda(const BiasedBwdParams& params, int64_t* partial_rows);
Status bias_gelu_backward_cuda(const BiasedBwdParams& params, void* stream);
Status bias_gelu_backward_cpu(const BiasedBwdParams& params, const Parallel& parallel);

}  // namespace warpsmith
