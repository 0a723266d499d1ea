#include "kernels/quantize/tiles.cuh"

#include <algorithm>

#include "common/visit_dtype.h"
#include "device/launch.h"
#include "kernels/quantize/quantize_launch.h"

namespace warpsmith::quantize {
namespace {

template <class T> LaunchConfig grid_of(const Tiles& tiles) {
  const int64_t along_y = std::min(tiles.down, kMostDown), along_z = ceil_div(tiles.down, kMostDown);
  return {
      .grid = dim3(static_cast<unsigned>(tiles.across), static_cast<unsigned>(along_y), static_cast<unsigned>(along_z)),
      .block = kTileThreads<T>,
      .dynamic_shared_bytes = kTile * kTile * sizeof(T)};
}

}  // namespace

Status launch_amax(Dtype dtype, const Tiles& t, void* stream) {
  return visit_cuda_dtype(
      dtype, [&]<class T>() { return launch(tiles<T, float8_e4m3, TileWork::amax>, grid_of<T>(t), stream, t); });
}

Status launch_casts(Dtype dtype, bool e5m2, const Tiles& t, void* stream) {
  return visit_cuda_dtype(dtype, [&]<class T>() {
    const auto kernel = e5m2 ? &tiles<T, float8_e5m2, TileWork::cast> : &tiles<T, float8_e4m3, TileWork::cast>;
    return launch(kernel, grid_of<T>(t), stream, t);
  });
}

}  // namespace warpsmith::quantize
