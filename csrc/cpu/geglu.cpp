#include "kernels/activation/geglu.h"

#include "cpu/gated.h"

namespace warpsmith {
namespace cpu {
namespace {

WARPSMITH_GATED_CPU(exact, Gelu)
WARPSMITH_GATED_CPU(by_tanh, GeluTanh)

}  // namespace
}  // namespace cpu

Status geglu_forward_cpu(const GatedFwdParams& p, const Parallel& parallel) {
  return p.tanh ? cpu::gated_forward_cpu<cpu::by_tanh>(p, parallel) : cpu::gated_forward_cpu<cpu::exact>(p, parallel);
}
Status geglu_backward_cpu(const GatedBwdParams& p, const Parallel& parallel) {
  return p.tanh ? cpu::gated_backward_cpu<cpu::by_tanh>(p, parallel) : cpu::gated_backward_cpu<cpu::exact>(p, parallel);
}

}  // namespace warpsmith
