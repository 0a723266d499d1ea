#pragma once
#include "kernels/attention/attention.h"

// The Hopper backward for head dimensions to 256 (backward_wide.cuh), for problems that the chooser gives kBackward256.
namespace warpsmith::attention {

int64_t wide_workspace_bytes(const AttentionProblem& p);
Status run_wide_backward(const AttentionBwdParams& x, void* stream);

}  // namespace warpsmith::attention
