#pragma once
#include "kernels/activation/gated.h"

// y = gelu(gate) * up; gelu(x) = x Phi(x), or with params.tanh its approximation
// x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2.
namespace warpsmith {

Status geglu_forward_cuda(const GatedFwdParams& params, void* stream);
Status geglu_forward_cpu(const GatedFwdParams& params, const Parallel& parallel);

Status geglu_backward_cuda(const GatedBwdParams& params, void* stream);
Status geglu_backward_cpu(const GatedBwdParams& params, const Parallel& parallel);

}  // namespace warpsmith
