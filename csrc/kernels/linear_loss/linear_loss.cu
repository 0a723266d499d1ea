#include <algorithm>
#include <string>

#include "common/alignment.h"
#include "common/visit_dtype.h"
#include "device/launch.h"
#include "kernels/linear_loss/finish.cuh"

namespace warpsmith {
namespace {

using namespace linear_loss;

constexpr int64_t kBlocksAMultiprocessor = 8;  // 2,048 threads

template <class Kernel> Status launch_over(Kernel kernel, const LinearFinishParams& p, int elems, void* stream) {
  DeviceProperties device;
  WARPSMITH_RETURN_IF_FAILED(device_properties(device));
  const int64_t blocks = ceil_div(p.count, int64_t{kFinishThreads} * elems);
  const int64_t most = kBlocksAMultiprocessor * device.multiprocessors;
  return launch(kernel, {.grid = static_cast<unsigned>(std::min(blocks, most)), .block = kFinishThreads}, stream, p);
}

template <class In, class Out> Status run_finish(const LinearFinishParams& p, void* stream) {
  if (on_16_bytes(p.x) && on_16_bytes(p.out))
    return launch_over(finish<In, Out, kFinishElems>, p, kFinishElems, stream);
  return launch_over(finish<In, Out, 1>, p, 1, stream);
}

template <class T> Status run_sum(const LinearFinishParams& p, void* stream) {
  if (on_16_bytes(p.x) && on_16_bytes(p.sum))
    return launch_over(finish_into_sum<T, kFinishElems>, p, kFinishElems, stream);
  return launch_over(finish_into_sum<T, 1>, p, 1, stream);
}

}  // namespace

Status linear_finish_cuda(const LinearFinishParams& p, void* stream) {
  if (p.count == 0) return {};
  const bool widened = p.dtype == Dtype::float32 && size_bytes(p.out_dtype) == 2 && !p.sum;
  if (p.dtype == Dtype::float64 || (p.dtype != p.out_dtype && !widened))
    return Status::unsupported(std::string("no CUDA kernel from ") + name(p.dtype) + " to " + name(p.out_dtype));
  return visit_cuda_dtype(p.out_dtype, [&]<class T>() {
    if (p.sum) return run_sum<T>(p, stream);
    return widened ? run_finish<float, T>(p, stream) : run_finish<T, T>(p, stream);
  });
}

}  // namespace warpsmith
