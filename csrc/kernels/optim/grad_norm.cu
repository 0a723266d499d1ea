#include "kernels/optim/grad_norm.cuh"

#include "device/launch.h"

namespace warpsmith {
namespace {

Status one_block_a_chunk(int64_t chunk_count, LaunchConfig* config) {
  if (chunk_count > 0x7fffffff) return Status::unsupported("more than 2^31 chunks in one launch");
  config->grid.x = static_cast<unsigned>(chunk_count);
  config->block.x = grad_norm::kThreads;
  return {};
}

}  // namespace

Status norm_chunk_elems_cuda(int64_t total_elems, int32_t* chunk_elems) {
  DeviceProperties device;
  WARPSMITH_RETURN_IF_FAILED(device_properties(device));
  *chunk_elems = static_cast<int32_t>(choose_norm_chunk(total_elems, device.multiprocessors));
  return {};
}

Status grad_norm_partials_cuda(const GradNormParams& p, void* stream) {
  if (p.norm_dtype != Dtype::float32) return Status::unsupported("a norm in float64 on CUDA");
  LaunchConfig config;
  WARPSMITH_RETURN_IF_FAILED(one_block_a_chunk(p.chunk_count, &config));
  const auto sums = [&] {
    switch (p.order) {
      case NormOrder::one: return &grad_norm::partial_sums<NormOrder::one>;
      case NormOrder::two: return &grad_norm::partial_sums<NormOrder::two>;
      default: return &grad_norm::partial_sums<NormOrder::infinity>;
    }
  }();
  return launch(sums, config, stream, p);
}

Status grad_norm_finish_cuda(const GradNormParams& p, void* stream) {
  if (p.norm_dtype != Dtype::float32) return Status::unsupported("a norm in float64 on CUDA");
  LaunchConfig one;
  one.block.x = grad_norm::kFinishThreads;
  return launch(grad_norm::finish, one, stream, p);
}

Status grad_norm_cuda(const GradNormParams& p, void* stream) {
  WARPSMITH_RETURN_IF_FAILED(grad_norm_partials_cuda(p, stream));
  return grad_norm_finish_cuda(p, stream);
}

Status grad_check_cuda(const GradCheckParams& p, void* stream) {
  WARPSMITH_RETURN_IF_FAILED(grad_norm_partials_cuda(p.norm, stream));
  LaunchConfig one, config;
  one.block.x = grad_norm::kFinishThreads;
  WARPSMITH_RETURN_IF_FAILED(launch(grad_norm::finish_check, one, stream, p));
  WARPSMITH_RETURN_IF_FAILED(one_block_a_chunk(p.norm.chunk_count, &config));
  return launch(grad_norm::count_bad, config, stream, p);
}

Status unscale_grads_cuda(const UnscaleParams& p, void* stream) {
  LaunchConfig config;
  WARPSMITH_RETURN_IF_FAILED(one_block_a_chunk(p.chunk_count, &config));
  return launch(grad_norm::unscale, config, stream, p);
}

Status clip_grads_cuda(const ClipParams& p, void* stream) {
  if (p.norm_dtype != Dtype::float32) return Status::unsupported("a norm in float64 on CUDA");
  LaunchConfig config;
  WARPSMITH_RETURN_IF_FAILED(one_block_a_chunk(p.chunk_count, &config));
  return launch(grad_norm::clip, config, stream, p);
}

}  // namespace warpsmith
