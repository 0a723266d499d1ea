#pragma once
#include "device/launch.h"
#include "kernels/optim/step.cuh"

// Launches of `step`. Each group of storages has a file of its own that instantiates them, so the files compile in
// parallel.
namespace warpsmith::optim {

// Launch the storages of optim_16bit.cu, optim_mixed.cu, optim_refined.cu and optim_8bit.cu.
Status launch_16bit(const OptimParams& p, const LaunchConfig& config, void* stream);
Status launch_mixed(const OptimParams& p, const LaunchConfig& config, void* stream);
Status launch_refined(const OptimParams& p, const LaunchConfig& config, void* stream);
Status launch_8bit(const OptimParams& p, const LaunchConfig& config, void* stream);

// Launches `step` for the functor's first variant that has all states of p.most. kCasts: of AdamW's first there is one
// that casts weights, too.
template <class F, class In, bool kCasts, size_t kFirst = 0>
Status launch_variant(const OptimParams& p, const LaunchConfig& config, void* stream) {
  constexpr unsigned kMost = F::kVariants[kFirst];
  if constexpr (kCasts && std::is_same_v<F, AdamW> && kFirst == 0)
    if (p.casts) return launch(step<F, In, kMost, true>, config, stream, p);
  if ((p.most & ~kMost) == 0) return launch(step<F, In, kMost>, config, stream, p);
  if constexpr (kFirst + 1 < std::size(F::kVariants))
    return launch_variant<F, In, kCasts, kFirst + 1>(p, config, stream);
  else
    return Status::unsupported("states that the optimizer does not have");
}

template <class In, bool kCasts = false>
Status launch_step(const OptimParams& p, const LaunchConfig& config, void* stream) {
  return visit_optimizer(p.optimizer, [&]<class F>() { return launch_variant<F, In, kCasts>(p, config, stream); });
}

}  // namespace warpsmith::optim
