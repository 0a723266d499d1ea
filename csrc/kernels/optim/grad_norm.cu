#include "kernels/optim/grad_norm.cuh"

#include "device/launch.h"

namespace warpsmith {
namespace {

// With a block for each chunk.
template <class Params> Status launch_chunks(void (*kernel)(Params), int64_t chunks, const Params& p, void* stream) {
  if (chunks > 0x7fffffff) return Status::unsupported("more than 2^31 chunks in one launch");
  return launch(kernel, {.grid = static_cast<unsigned>(chunks), .block = grad_norm::kThreads}, stream, p);
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
  const auto sums = [&] {
    switch (p.order) {
      case NormOrder::one: return &grad_norm::partial_sums<NormOrder::one>;
      case NormOrder::two: return &grad_norm::partial_sums<NormOrder::two>;
      default: return &grad_norm::partial_sums<NormOrder::infinity>;
    }
  }();
  return launch_chunks(sums, p.chunk_count, p, stream);
}

Status grad_norm_finish_cuda(const GradNormParams& p, void* stream) {
  if (p.norm_dtype != Dtype::float32) return Status::unsupported("a norm in float64 on CUDA");
  return launch(grad_norm::finish, {.block = grad_norm::kFinishThreads}, stream, p);
}

Status grad_norm_cuda(const GradNormParams& p, void* stream) {
  WARPSMITH_RETURN_IF_FAILED(grad_norm_partials_cuda(p, stream));
  return grad_norm_finish_cuda(p, stream);
}

Status grad_check_cuda(const GradCheckParams& p, void* stream) {
  WARPSMITH_RETURN_IF_FAILED(grad_norm_partials_cuda(p.norm, stream));
  WARPSMITH_RETURN_IF_FAILED(launch(grad_norm::finish_check, {.block = grad_norm::kFinishThreads}, stream, p));
  return launch_chunks(grad_norm::count_bad, p.norm.chunk_count, p, stream);
}

Status unscale_grads_cuda(const UnscaleParams& p, void* stream) {
  return launch_chunks(grad_norm::unscale, p.chunk_count, p, stream);
}

Status clip_grads_cuda(const ClipParams& p, void* stream) {
  if (p.norm_dtype != Dtype::float32) return Status::unsupported("a norm in float64 on CUDA");
  return launch_chunks(grad_norm::clip, p.chunk_count, p, stream);
}

}  // namespace warpsmith
