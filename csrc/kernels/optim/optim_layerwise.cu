#include "common/visit_dtype.h"
#include "device/launch.h"
#include "kernels/optim/layerwise.cuh"

namespace warpsmith {
namespace {

template <class P, bool kMaster, bool kRuntimeDtype> Status launch_kernels(const LayerwiseParams& p, void* stream) {
  const LaunchConfig config{.grid = static_cast<unsigned>(p.step.chunk_count), .block = layerwise::kThreads};
  if (!is_layerwise(p.step.optimizer)) return Status::unsupported("an optimizer that is not layerwise");
  WARPSMITH_RETURN_IF_FAILED(launch(layerwise::layerwise_moments<LAMB, P, kMaster, kRuntimeDtype>, config, stream, p));
  return launch(layerwise::layerwise_apply<LAMB, P, kMaster, kRuntimeDtype>, config, stream, p);
}

template <class P, bool kMaster> Status launch_layerwise(const LayerwiseParams& p, void* stream) {
  return p.step.mixed_grads ? launch_kernels<P, kMaster, true>(p, stream)
                            : launch_kernels<P, kMaster, false>(p, stream);
}

}  // namespace

Status layerwise_cuda(const LayerwiseParams& p, void* stream) {
  if (p.step.chunk_count > 0x7fffffff) return Status::unsupported("more than 2^31 chunks in one launch");
  switch (p.step.storage) {
    case Storage::float32: return launch_layerwise<float, false>(p, stream);
    case Storage::bfloat16_master: return launch_layerwise<bfloat16, true>(p, stream);
    case Storage::float16_master: return launch_layerwise<float16, true>(p, stream);
    case Storage::float64: return no_cuda_kernel(Dtype::float64);
    default: return Status::unsupported("a storage other than float32 and masters");
  }
}

}  // namespace warpsmith
