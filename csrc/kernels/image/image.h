#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/op_list.h"
#include "common/parallel.h"
#include "common/status.h"
#include "kernels/image/image_config.h"
#include "kernels/image/image_ops.h"

// Params and entry points of the image family.
namespace warpsmith {

WARPSMITH_DEFINE_OPS(Image, WARPSMITH_IMAGE_OPS)

constexpr int kImageChannels = 3;

// y[n, h, w, c] = x[n, h, v, c] * scale[c] + shift[c] in float, rounded once; v = width - 1 - w where flip[n], else w.
struct NormalizeImageParams {
  const uint8_t* x = nullptr;     // [samples, height, width, 3], contiguous
  const uint8_t* flip = nullptr;  // [samples], 0 or 1; null: zeros
  void* y = nullptr;              // [samples, height, width, 3], dtype, contiguous
  int64_t samples = 0, height = 0, width = 0;
  float scale[kImageChannels] = {}, shift[kImageChannels] = {};
  Dtype dtype = Dtype::float16;

  constexpr int64_t elems() const { return height * width * kImageChannels; }
};

Status normalize_image_cuda(const NormalizeImageParams& params, void* stream);
Status normalize_image_cpu(const NormalizeImageParams& params, const Parallel& parallel);

}  // namespace warpsmith
