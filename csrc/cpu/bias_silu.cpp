#include "kernels/activation/bias_silu.h"

#include "cpu/biased.h"

namespace warpsmith {
namespace cpu {
namespace {

WARPSMITH_BIASED_CPU(silu, Silu)

}  // namespace
}  // namespace cpu

Status bias_silu_forward_cpu(const BiasedFwdParams& p, const Parallel& parallel) {
  return cpu::biased_forward_cpu<cpu::silu>(p, parallel);
}
Status bias_silu_backward_cpu(const BiasedBwdParams& p, const Parallel& parallel) {
  return cpu::biased_backward_cpu<cpu::silu>(p, parallel);
}

}  // namespace warpsmith
