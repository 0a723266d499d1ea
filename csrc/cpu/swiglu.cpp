#include "kernels/activation/swiglu.h"

#include "cpu/gated.h"

namespace warpsmith {
namespace cpu {
namespace {

WARPSMITH_GATED_CPU(swiglu, Silu)

}  // namespace
}  // namespace cpu

Status swiglu_forward_cpu(const GatedFwdParams& p, const Parallel& parallel) {
  return cpu::gated_forward_cpu<cpu::swiglu>(p, parallel);
}
Status swiglu_backward_cpu(const GatedBwdParams& p, const Parallel& parallel) {
  return cpu::gated_backward_cpu<cpu::swiglu>(p, parallel);
}

}  // namespace warpsmith
