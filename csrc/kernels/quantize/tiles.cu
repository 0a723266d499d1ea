#include "kernels/quantize/tiles.cuh"

#include <algorithm>

#include "common/visit_dtype.h"
#include "device/launch.h"
#include "kernels/quantize/quantize_launch.h"

namespace warpsmith::quantize {
namespace {

template <class T> Status launch_tiles(void (*kernel)(Tiles), TileWork work, const Tiles& t, void* stream) {
  DeviceProperties device;
  WARPSMITH_RETURN_IF_FAILED(device_properties(device));
  const int64_t resident = int64_t{device.multiprocessors} * (tile_threads_in_flight(work) / kTileThreads<T>);
  LaunchConfig config;
  config.grid.x = static_cast<unsigned>(std::min(t.down * t.across, resident));
  config.block.x = kTileThreads<T>;
  config.dynamic_shared_bytes = tile_shared_bytes<T>(work);
  return launch(kernel, config, stream, t);
}

}  // namespace

Status launch_amax(Dtype dtype, const Tiles& t, void* stream) {
  return visit_cuda_dtype(dtype, [&]<class T>() {
    return launch_tiles<T>(tiles<T, float8_e4m3, TileWork::amax>, TileWork::amax, t, stream);
  });
}

Status launch_casts(Dtype dtype, bool e5m2, const Tiles& t, void* stream) {
  return visit_cuda_dtype(dtype, [&]<class T>() {
    const auto kernel = e5m2 ? &tiles<T, float8_e5m2, TileWork::cast> : &tiles<T, float8_e4m3, TileWork::cast>;
    return launch_tiles<T>(kernel, TileWork::cast, t, stream);
  });
}

}  // namespace warpsmith::quantize
