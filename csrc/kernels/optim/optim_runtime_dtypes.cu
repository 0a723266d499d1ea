#include "common/visit_dtype.h"
#include "device/launch.h"
#include "kernels/optim/step_launch.cuh"
#include "kernels/optim/step_runtime_dtypes.cuh"

// Gradients of any dtype.
namespace warpsmith {

Status optim_runtime_dtypes_cuda(const OptimParams& p, void* stream) {
  if (p.chunk_count > 0x7fffffff) return Status::unsupported("more than 2^31 chunks in one launch");
  if (p.storage == Storage::float64) return no_cuda_kernel(Dtype::float64);
  const LaunchConfig config{.grid = static_cast<unsigned>(p.chunk_count), .block = kOptimThreads};
  if (is_8bit(p.storage)) return optim::launch_8bit(p, config, stream);
  const optim::RuntimeStorage storage{param_dtype(p.storage), state_dtype(p.storage), has_master(p.storage),
                                      refinement_of(p.storage)};
  return visit_optimizer(p.optimizer,
                         [&]<class F>() { return launch(optim::step_runtime_dtypes<F>, config, stream, p, storage); });
}

}  // namespace warpsmith
