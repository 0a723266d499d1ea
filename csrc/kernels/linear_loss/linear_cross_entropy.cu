#include <algorithm>
#include <string>

#include "common/launch.h"
#include "kernels/linear_loss/linear_cross_entropy_kernel.cuh"

namespace warpsmith {
namespace {

using linear_loss::kFinishElems;
using linear_loss::kFinishThreads;

constexpr int64_t kBlocksAMultiprocessor = 8;  // 2,048 threads

bool on_16_bytes(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

template <class Kernel> Status launch_over(Kernel kernel, const LinearFinishParams& p, int elems, void* stream) {
  DeviceProperties device;
  WARPSMITH_RETURN_IF_FAILED(device_properties(device));
  const int64_t a_block = int64_t{kFinishThreads} * elems;
  LaunchConfig grid;
  grid.grid.x = static_cast<unsigned>(
      std::min((p.count + a_block - 1) / a_block, kBlocksAMultiprocessor * device.multiprocessors));
  grid.block.x = kFinishThreads;
  return launch(kernel, grid, stream, p);
}

template <class In, class Out> Status run_finish(const LinearFinishParams& p, void* stream) {
  if (on_16_bytes(p.x) && on_16_bytes(p.out))
    return launch_over(linear_loss::finish<In, Out, kFinishElems>, p, kFinishElems, stream);
  return launch_over(linear_loss::finish<In, Out, 1>, p, 1, stream);
}

template <class T> Status run_sum(const LinearFinishParams& p, void* stream) {
  if (on_16_bytes(p.x) && on_16_bytes(p.sum))
    return launch_over(linear_loss::finish_into_sum<T, kFinishElems>, p, kFinishElems, stream);
  return launch_over(linear_loss::finish_into_sum<T, 1>, p, 1, stream);
}

Status no_kernel(const LinearFinishParams& p) {
  return Status::unsupported(std::string("no CUDA kernel from ") + name(p.dtype) + " to " + name(p.out_dtype));
}

}  // namespace

Status linear_finish_cuda(const LinearFinishParams& p, void* stream) {
  if (p.count == 0) return {};
  if (p.dtype == Dtype::float32 && !p.sum) {
    if (p.out_dtype == Dtype::float32) return run_finish<float, float>(p, stream);
    if (p.out_dtype == Dtype::float16) return run_finish<float, float16>(p, stream);
    if (p.out_dtype == Dtype::bfloat16) return run_finish<float, bfloat16>(p, stream);
    return no_kernel(p);
  }
  if (p.dtype != p.out_dtype) return no_kernel(p);
  switch (p.dtype) {
    case Dtype::float32: return run_sum<float>(p, stream);
    case Dtype::float16: return p.sum ? run_sum<float16>(p, stream) : run_finish<float16, float16>(p, stream);
    case Dtype::bfloat16: return p.sum ? run_sum<bfloat16>(p, stream) : run_finish<bfloat16, bfloat16>(p, stream);
    case Dtype::float64: break;
  }
  return no_kernel(p);
}

}  // namespace warpsmith
