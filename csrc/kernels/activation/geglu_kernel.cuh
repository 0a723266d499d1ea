#pragma once
#include "kernels/activation/gated.cuh"
#include "kernels/activation/geglu.h"

// geglu is the gated body with gelu, exact or by tanh: forward reads gate and up and writes y, backward reads dy, gate
// and up and writes dgate and dup; arithmetic is float, each result is rounded once.
namespace warpsmith::activation {

inline Status run(const GatedFwdParams& p, void* stream) {
  return p.tanh ? gated_forward_cuda<GeluTanh>(p, stream) : gated_forward_cuda<Gelu>(p, stream);
}
inline Status run(const GatedBwdParams& p, void* stream) {
  return p.tanh ? gated_backward_cuda<GeluTanh>(p, stream) : gated_backward_cuda<Gelu>(p, stream);
}

}  // namespace warpsmith::activation
