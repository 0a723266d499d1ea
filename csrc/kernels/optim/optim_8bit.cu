#include "device/launch.h"
#include "kernels/optim/step_8bit.cuh"
#include "kernels/optim/step_launch.cuh"

// 8-bit states.
namespace warpsmith::optim {
namespace {

template <class F, class P, unsigned kMost>
Status launch_states(const OptimParams& p, const LaunchConfig& config, void* stream) {
  if ((p.most & ~kMost) != 0) return Status::unsupported("8-bit states other than the optimizer's first ones");
  return p.mixed_grads ? launch(step_8bit<F, P, kMost, true>, config, stream, p)
                       : launch(step_8bit<F, P, kMost, false>, config, stream, p);
}

template <class P> Status launch_params(const OptimParams& p, const LaunchConfig& config, void* stream) {
  switch (p.optimizer) {
    case Optimizer::adamw: return launch_states<AdamW, P, 0b011>(p, config, stream);
    case Optimizer::adam: return launch_states<Adam, P, 0b011>(p, config, stream);
    case Optimizer::sgd: return launch_states<SGD, P, 0b1>(p, config, stream);
    case Optimizer::lion: return launch_states<Lion, P, 0b1>(p, config, stream);
    default: return Status::unsupported("8-bit states of this optimizer");
  }
}

}  // namespace

Status launch_8bit(const OptimParams& p, const LaunchConfig& config, void* stream) {
  switch (p.storage) {
    case Storage::bfloat16_8bit: return launch_params<bfloat16>(p, config, stream);
    case Storage::float16_8bit: return launch_params<float16>(p, config, stream);
    default: return launch_params<float>(p, config, stream);
  }
}

}  // namespace warpsmith::optim
