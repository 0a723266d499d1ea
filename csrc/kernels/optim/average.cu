#include "kernels/optim/average.cuh"

#include "device/launch.h"

namespace warpsmith {

Status average_cuda(const AverageParams& p, void* stream) {
  if (p.chunk_count > 0x7fffffff) return Status::unsupported("more than 2^31 chunks in one launch");
  const LaunchConfig config{.grid = static_cast<unsigned>(p.chunk_count), .block = average::kThreads};
  return launch(average::moving_average, config, stream, p);
}

}  // namespace warpsmith
