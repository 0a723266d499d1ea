#pragma once
#include "kernels/activation/gated.cuh"
#include "kernels/activation/reglu.h"

// reglu is the gated body with max(x, 0): forward reads gate and up and writes y, backward reads dy, gate and up and
// writes dgate and dup; arithmetic is float, each result is rounded once.
namespace warpsmith::activation {

inline Status run(const GatedFwdParams& p, void* stream) { return gated_forward_cuda<Relu>(p, stream); }
inline Status run(const GatedBwdParams& p, void* stream) { return gated_backward_cuda<Relu>(p, stream); }

}  // namespace warpsmith::activation
