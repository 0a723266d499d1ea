#include "common/visit_dtype.h"
#include "device/launch.h"
#include "kernels/optim/optim_config.h"
#include "kernels/optim/step_launch.cuh"
#include "kernels/optim/table_upload.cuh"

namespace warpsmith {

Status optim_upload_cuda(const int64_t* host, int64_t* device, int64_t words, void* stream) {
  return table_upload::upload(host, device, words, stream);
}

Status optim_chunk_elems_cuda(int64_t total_elems, Storage storage, int32_t* chunk_elems) {
  DeviceProperties device;
  WARPSMITH_RETURN_IF_FAILED(device_properties(device));
  *chunk_elems = choose_optim(total_elems, device.multiprocessors, storage).chunk_elems;
  return {};
}

Status optim_cuda(const OptimParams& p, void* stream) {
  if (p.chunk_count > 0x7fffffff) return Status::unsupported("more than 2^31 chunks in one launch");
  const LaunchConfig config{.grid = static_cast<unsigned>(p.chunk_count), .block = kOptimThreads};
  switch (p.storage) {
    case Storage::float32:
      return optim::launch_step<optim::Stored<float, float, false>, casts_weights(Storage::float32)>(p, config, stream);
    case Storage::float64: return no_cuda_kernel(Dtype::float64);
    case Storage::bfloat16:
    case Storage::float16: return optim::launch_16bit(p, config, stream);
    case Storage::bfloat16_stochastic:
    case Storage::bfloat16_compensated:
    case Storage::bfloat16_remainder: return optim::launch_refined(p, config, stream);
    case Storage::float32_8bit:
    case Storage::bfloat16_8bit:
    case Storage::float16_8bit: return optim::launch_8bit(p, config, stream);
    default: return optim::launch_mixed(p, config, stream);
  }
}

}  // namespace warpsmith
