#pragma once
#include "kernels/activation/gated.cuh"
#include "kernels/activation/swiglu.h"

// swiglu is the gated body with silu: forward reads gate and up and writes y, backward reads dy, gate and up and writes
// dgate and dup; arithmetic is float, each result is rounded once.
namespace warpsmith::activation {

inline Status run(const GatedFwdParams& p, void* stream) { return gated_forward_cuda<Silu>(p, stream); }
inline Status run(const GatedBwdParams& p, void* stream) { return gated_backward_cuda<Silu>(p, stream); }

}  // namespace warpsmith::activation
