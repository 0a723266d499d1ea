#include "kernels/norm/layer_norm.h"

namespace warpsmith {

Status layer_norm_forward_cpu(const NormForwardParams& p, const Parallel& parallel) {
  return norm_forward_cpu(p, parallel);
}

Status layer_norm_backward_cpu(const NormBackwardParams& p, const Parallel& parallel) {
  return norm_backward_cpu(p, parallel);
}

}  // namespace warpsmith
