#include "kernels/activation/bias_gelu.h"

#include "cpu/biased.h"

namespace warpsmith {
namespace cpu {
namespace {

WARPSMITH_BIASED_CPU(exact, Gelu)
WARPSMITH_BIASED_CPU(by_tanh, GeluTanh)

}  // namespace
}  // namespace cpu

Status bias_gelu_forward_cpu(const BiasedFwdParams& p, const Parallel& parallel) {
  return p.tanh ? cpu::biased_forward_cpu<cpu::by_tanh>(p, parallel) : cpu::biased_forward_cpu<cpu::exact>(p, parallel);
}
Status bias_gelu_backward_cpu(const BiasedBwdParams& p, const Parallel& parallel) {
  return p.tanh ? cpu::biased_backward_cpu<cpu::by_tanh>(p, parallel)
                : cpu::biased_backward_cpu<cpu::exact>(p, parallel);
}

}  // namespace warpsmith
