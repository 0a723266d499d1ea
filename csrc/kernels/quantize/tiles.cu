#include "kernels/quantize/tiles.cuh"

#include <algorithm>

#include "common/visit_dtype.h"
#include "device/launch.h"
#include "kernels/quantize/quantize_launch.h"

namespace warpsmith::quantize {
namespace {

template <class T> LaunchConfig grid_of(const Tiles& tiles) {
  LaunchConfig config;
  config.grid.x = static_cast<unsigned>(tiles.across);
  config.grid.y = static_cast<unsigned>(std::min(tiles.down, kMostDown));
  config.grid.z = static_cast<unsigned>(ceil_div(tiles.down, kMostDown));
  config.block.x = kTileThreads<T>;
  config.dynamic_shared_bytes = kTile * kTile * sizeof(T);
  return config;
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
