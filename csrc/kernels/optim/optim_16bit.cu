#include "kernels/optim/step_launch.cuh"

// Everything in 16 bits.
namespace warpsmith::optim {

Status launch_16bit(const OptimParams& p, const LaunchConfig& config, void* stream) {
  if (p.storage == Storage::bfloat16)
    return launch_step<Stored<bfloat16, bfloat16, false>, casts_weights(Storage::bfloat16)>(p, config, stream);
  return launch_step<Stored<float16, float16, false>>(p, config, stream);
}

}  // namespace warpsmith::optim
