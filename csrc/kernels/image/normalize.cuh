#pragma once
#include "device/fast_divide.h"
#include "device/packed.h"
#include "kernels/image/image.h"

// y = x * scale + shift by channel, samples with a flag mirrored. Reads each byte of x once and each flag once a
// vector, writes y once. Mirrored samples, and those that are not made of vectors, are read byte by byte.
namespace warpsmith::image {

// The divisors of a launch.
struct Sizes {
  device::FastDivide vectors, row;  // vectors of a sample, elements of a row
  explicit Sizes(const NormalizeImageParams& p, const ImageConfig& c)
      : vectors(c.vectors), row(p.width * kImageChannels) {}
};

// A channel's two numbers, of the elements from `phase` on.
__device__ __forceinline__ void rotate(float (&to)[kImageChannels], const float (&from)[kImageChannels], int phase) {
  to[0] = phase == 0 ? from[0] : phase == 1 ? from[1] : from[2];
  to[1] = phase == 0 ? from[1] : phase == 1 ? from[2] : from[0];
  to[2] = phase == 0 ? from[2] : phase == 1 ? from[0] : from[1];
}

// The elements from `first` of a sample on, of which `here` exist.
template <int N> __device__ __forceinline__ void read_bytes(uint8_t (&to)[N], const NormalizeImageParams& p,
                                                            const uint8_t* sample, const Sizes& sizes, int64_t first,
                                                            int64_t here, bool flipped) {
  const int64_t length = p.width * kImageChannels;
  int64_t row = sizes.row.quotient(first) * length, at = first - row;
  int channel = static_cast<int>(at % kImageChannels);
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if (k >= here) break;
    to[k] = device::load(sample + row + (flipped ? length - kImageChannels - at + 2 * channel : at));
    channel = channel == kImageChannels - 1 ? 0 : channel + 1;
    if (++at == length) at = 0, row += length;
  }
}

template <class T> __global__ void __launch_bounds__(kImageThreads)
    normalize_image(NormalizeImageParams p, ImageConfig c, Sizes sizes) {
  constexpr int N = 16 / sizeof(T), U = kImageTogether;
  const int64_t block = int64_t{blockIdx.x} * (kImageThreads * U) + threadIdx.x, all = p.samples * c.vectors;
  const int64_t elems = p.elems();
  device::Vector<uint8_t, N> x[U] = {};
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const int64_t v = block + u * kImageThreads;
    if (v >= all) break;
    const int64_t sample = sizes.vectors.quotient(v), first = (v - sample * c.vectors) * N;
    const uint8_t* from = p.x + sample * elems;
    const bool flipped = p.flip && device::load(p.flip + sample);
    if (c.whole && !flipped)
      x[u] = device::load_vector<N, device::Cache::streaming>(from + first);
    else
      read_bytes<N>(x[u].at, p, from, sizes, first, elems - first, flipped);
  }
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const int64_t v = block + u * kImageThreads;
    if (v >= all) break;
    const int64_t sample = sizes.vectors.quotient(v), first = (v - sample * c.vectors) * N, here = elems - first;
    float scale[kImageChannels], shift[kImageChannels], y[N];
    const int phase = static_cast<int>(first % kImageChannels);
    rotate(scale, p.scale, phase);
    rotate(shift, p.shift, phase);
#pragma unroll
    for (int k = 0; k < N; ++k)
      y[k] = fmaf(static_cast<float>(x[u].at[k]), scale[k % kImageChannels], shift[k % kImageChannels]);
    T* to = static_cast<T*>(p.y) + sample * elems + first;
    if (c.whole) {
      device::store<device::Cache::streaming>(device::packed_at<T, N>(to, 0), device::rounded<T>(y));
      continue;
    }
#pragma unroll
    for (int k = 0; k < N; ++k)
      if (k < here) device::store(to + k, device::from_float<T>(y[k]));
  }
}

}  // namespace warpsmith::image
