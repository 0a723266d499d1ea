#pragma once
#include "kernels/activation/bias_gelu.h"
#include "kernels/activation/biased.cuh"

// bias_gelu is the biased body with gelu, exact or by tanh: forward reads x and the bias and writes y, backward reads
// dy, x and the bias and writes dx and dbias; arithmetic is float, each result is rounded once.
namespace warpsmith::activation {

inline Status run(const BiasedFwdParams& p, void* stream) {
  return p.tanh ? biased_forward_cuda<GeluTanh>(p, stream) : biased_forward_cuda<Gelu>(p, stream);
}
inline Status run(const BiasedBwdParams& p, void* stream) {
  return p.tanh ? biased_backward_cuda<GeluTanh>(p, stream) : biased_backward_cuda<Gelu>(p, stream);
}

}  // namespace warpsmith::activation
