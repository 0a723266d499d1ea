#include "kernels/image/image.h"

#include "common/visit_dtype.h"
#include "device/launch.h"
#include "kernels/image/normalize.cuh"

// From params to launches.
namespace warpsmith {

Status normalize_image_cuda(const NormalizeImageParams& p, void* stream) {
  if (p.samples == 0 || p.elems() == 0) return {};
  const ImageConfig c = choose_image({p.samples, p.elems(), size_bytes(p.dtype), on_16_bytes(p.x)});
  const LaunchConfig config{.grid = static_cast<unsigned>(c.blocks), .block = kImageThreads};
  return visit_cuda_dtype(
      p.dtype, [&]<class T>() { return launch(image::normalize_image<T>, config, stream, p, c, image::Sizes(p, c)); });
}

}  // namespace warpsmith
