#include "kernels/image/image.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "common/half_host.h"
#include "common/visit_dtype.h"

// A table of the 256 results of each channel, then three loads a pixel: no arithmetic, so any instruction set does it.
namespace warpsmith {
namespace {

constexpr int kBytes = 256;
constexpr int64_t kGrainElems = 16 * 1024;  // least elements per thread

template <class T> void row(const T* table, const uint8_t* x, T* y, int64_t width, bool flipped) {
  const int64_t step = flipped ? -kImageChannels : kImageChannels;
  if (flipped) x += (width - 1) * kImageChannels;
  for (int64_t w = 0; w < width; ++w, x += step, y += kImageChannels) {
    y[0] = table[x[0]];
    y[1] = table[kBytes + x[1]];
    y[2] = table[2 * kBytes + x[2]];
  }
}

}  // namespace

Status normalize_image_cpu(const NormalizeImageParams& p, const Parallel& parallel) {
  return visit_cuda_dtype(p.dtype, [&]<class T>() {
    std::vector<T> table(kImageChannels * kBytes);
    for (int c = 0; c < kImageChannels; ++c)
      for (int b = 0; b < kBytes; ++b)
        table[c * kBytes + b] = from_float<T>(std::fmaf(static_cast<float>(b), p.scale[c], p.shift[c]));
    const int64_t length = p.width * kImageChannels, grain = kGrainElems / std::max<int64_t>(1, length);
    parallel(p.samples * p.height, std::max<int64_t>(1, grain), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        row(table.data(), p.x + r * length, static_cast<T*>(p.y) + r * length, p.width, p.flip && p.flip[r / p.height]);
    });
  });
}

}  // namespace warpsmith
