#include "kernels/activation/reglu.h"

#include "cpu/gated.h"

namespace warpsmith {
namespace cpu {
namespace {

WARPSMITH_GATED_CPU(reglu, Relu)

}  // namespace
}  // namespace cpu

Status reglu_forward_cpu(const GatedFwdParams& p, const Parallel& parallel) {
  return cpu::gated_forward_cpu<cpu::reglu>(p, parallel);
}
Status reglu_backward_cpu(const GatedBwdParams& p, const Parallel& parallel) {
  return cpu::gated_backward_cpu<cpu::reglu>(p, parallel);
}

}  // namespace warpsmith
