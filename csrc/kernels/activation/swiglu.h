#pragma once
#include "kernels/activation/gated.h"

// y = silu(gate) * up, silu(x) = x / (1 + e^-x).
namespace warpsmith {

Status swiglu_forward_cuda(const GatedFwdParams& params, void* stream);
Status swiglu_forward_cpu(const GatedFwdParams& params, const Parallel& parallel);

Status swiglu_backward_cuda(const GatedBwdParams& params, void* stream);
Status swiglu_backward_cpu(const GatedBwdParams& params, const Parallel& parallel);

}  // namespace warpsmith
