#include "kernels/optim/rank_mean.cuh"

#include "common/visit_dtype.h"
#include "device/launch.h"

namespace warpsmith {
namespace {

bool all_aligned(const RankMeanParams& p) {
  bool aligned = p.stride * size_bytes(p.dtype) % 16 == 0 && reinterpret_cast<uintptr_t>(p.parts) % 16 == 0 &&
                 reinterpret_cast<uintptr_t>(p.own) % 16 == 0;
  for (int i = 0; i < p.out_count; ++i) aligned = aligned && reinterpret_cast<uintptr_t>(p.outs[i].data) % 16 == 0;
  return aligned;
}

template <class T, int N> Status launch_tiles(const RankMeanParams& p, void* stream) {
  constexpr int64_t kTile = int64_t{rank_mean::kThreads} * rank_mean::kVectors * N;
  const int64_t tiles = (p.count + kTile - 1) / kTile;
  if (tiles > 0x7fffffff) return Status::unsupported("more than 2^31 tiles in one launch");
  return launch(rank_mean::rank_mean<T, N>, {.grid = static_cast<unsigned>(tiles), .block = rank_mean::kThreads},
                stream, p);
}

}  // namespace

Status rank_mean_cuda(const RankMeanParams& p, void* stream) {
  if (p.count == 0 || p.out_count == 0) return {};
  return visit_cuda_dtype(p.dtype, [&]<class T>() {
    return all_aligned(p) ? launch_tiles<T, device::kElementsPer16Bytes<T>>(p, stream) : launch_tiles<T, 1>(p, stream);
  });
}

}  // namespace warpsmith
