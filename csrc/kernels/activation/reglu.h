#pragma once
#include "kernels/activation/gated.h"

// y = max(gate, 0) * up.
namespace warpsmith {

Status reglu_forward_cuda(const GatedFwdParams& params, void* stream);
Status reglu_forward_cpu(const GatedFwdParams& params, const Parallel& parallel);

Status reglu_backward_cuda(const GatedBwdParams& params, void* stream);
Status reglu_backward_cpu(const GatedBwdParams& params, const Parallel& parallel);

}  // namespace warpsmith
