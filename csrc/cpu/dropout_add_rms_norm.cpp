#include "kernels/norm/dropout_add_rms_norm.h"

namespace warpsmith {

Status dropout_add_rms_norm_forward_cpu(const NormForwardParams& p, const Parallel& parallel) {
  return norm_forward_cpu(p, parallel);
}

Status dropout_add_rms_norm_backward_cpu(const NormBackwardParams& p, const Parallel& parallel) {
  return norm_backward_cpu(p, parallel);
}

}  // namespace warpsmith
