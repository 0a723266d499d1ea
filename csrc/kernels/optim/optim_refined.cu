#include "kernels/optim/step_launch.cuh"

// bfloat16 parameters with a refinement.
namespace warpsmith::optim {

Status launch_refined(const OptimParams& p, const LaunchConfig& config, void* stream) {
  switch (p.storage) {
    case Storage::bfloat16_stochastic: return launch_step<Refined<bfloat16, Refinement::stochastic>>(p, config, stream);
    case Storage::bfloat16_compensated:
      return launch_step<Refined<bfloat16, Refinement::compensated>>(p, config, stream);
    default:
      return launch_step<Refined<float, Refinement::remainder>, casts_weights(Storage::bfloat16_remainder)>(p, config,
                                                                                                            stream);
  }
}

}  // namespace warpsmith::optim
