#include <string>

#include "common/launch.h"
#include "kernels/optim/adamw_config.h"
#include "kernels/optim/adamw_kernel.cuh"
#include "kernels/optim/table_upload.cuh"

namespace warpsmith {

Status adamw_upload_cuda(const int64_t* host, int64_t* device, int64_t words, void* stream) {
  return table_upload::upload(host, device, words, stream);
}

Status adamw_chunk_elems_cuda(int64_t total_elems, int32_t* chunk_elems) {
  DeviceProperties device;
  WARPSMITH_RETURN_IF_FAILED(device_properties(device));
  *chunk_elems = choose_adamw(total_elems, device.multiprocessors).chunk_elems;
  return {};
}

Status adamw_cuda(const AdamWParams& p, void* stream) {
  if (p.dtype != Dtype::float32) return Status::unsupported(std::string("no CUDA kernel for ") + name(p.dtype));
  if (p.chunk_count > 0x7fffffff) return Status::unsupported("more than 2^31 chunks in one launch");
  LaunchConfig launch_config;
  launch_config.grid.x = static_cast<unsigned>(p.chunk_count);
  launch_config.block.x = kAdamWThreads;
  return launch(p.amsgrad ? adamw::step<true> : adamw::step<false>, launch_config, stream, p);
}

}  // namespace warpsmith
