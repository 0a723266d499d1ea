#include "kernels/optim/step_launch.cuh"

// 16-bit parameters with masters, and 16-bit states.
namespace warpsmith::optim {

Status launch_mixed(const OptimParams& p, const LaunchConfig& config, void* stream) {
  switch (p.storage) {
    case Storage::bfloat16_master:
      return launch_step<Stored<bfloat16, float, true>, casts_weights(Storage::bfloat16_master)>(p, config, stream);
    case Storage::float16_master: return launch_step<Stored<float16, float, true>>(p, config, stream);
    default: return launch_step<Stored<float, bfloat16, false>>(p, config, stream);
  }
}

}  // namespace warpsmith::optim
