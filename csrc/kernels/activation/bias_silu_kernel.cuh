#pragma once
#include "kernels/activation/bias_silu.h"
#include "kernels/activation/biased.cuh"

// bias_silu is the biased body with silu: forward reads x and the bias and writes y, backward reads dy, x and the bias
// and writes dx and dbias; arithmetic is float, each result is rounded once.
namespace warpsmith::activation {

inline Status run(const BiasedFwdParams& p, void* stream) { return biased_forward_cuda<Silu>(p, stream); }
inline Status run(const BiasedBwdParams& p, void* stream) { return biased_backward_cuda<Silu>(p, stream); }

}  // namespace warpsmith::activation
