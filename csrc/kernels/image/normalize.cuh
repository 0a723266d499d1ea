#pragma once
#include "device/fast_divide.h"
#include "device/packed.h"
#include "kernels/image/image.h"

// y = x * scale + shift by channel, samples with a flag mirrored. Reads each byte of x once and each flag once a
// vector, writes y once. Mirrored samples are read byte by byte; those that are not made of vectors in a loop.
namespace warpsmith::image {

// The divisors of a launch.
struct Sizes {
  device::FastDivide vectors, row;  // vectors of a sample, elements of a row
  explicit Sizes(const NormalizeImageParams& p, const ImageConfig& c)
      : vectors(c.vectors), row(p.width * kImageChannels) {}
};

// A channel's two numbers, of the elements from `phase` on.
__device__ __forceinline__ void rotate(float (&to)[kImageChannels], const float (&from)[kImageChannels],
                                       unsigned phase) {
  to[0] = phase == 0 ? from[0] : phase == 1 ? from[1] : from[2];
  to[1] = phase == 0 ? from[1] : phase == 1 ? from[2] : from[0];
  to[2] = phase == 0 ? from[2] : phase == 1 ? from[0] : from[1];
}

// N bytes, as they lie in memory.
template <int N> using Bytes = device::Vector<uint32_t, N / 4>;

// The elements from `first` of a sample on, of which `here` exist, singly.
template <int N> __device__ __forceinline__ Bytes<N> read_singly(const NormalizeImageParams& p, const uint8_t* sample,
                                                                 const Sizes& sizes, int64_t first, int64_t here,
                                                                 bool flipped) {
  const int64_t length = p.width * kImageChannels;
  int64_t row = sizes.row.quotient(first) * length, at = first - row;
  int channel = static_cast<int>(at % kImageChannels);
  uint64_t bytes = 0;
#pragma unroll 1
  for (int k = 0; k < N && k < here; ++k) {
    const int64_t from = row + (flipped ? length - kImageChannels - at + 2 * channel : at);
    bytes |= uint64_t{device::load(sample + from)} << (8 * k);
    channel = channel == kImageChannels - 1 ? 0 : channel + 1;
    if (++at == length) at = 0, row += length;
  }
  Bytes<N> to;
#pragma unroll
  for (int w = 0; w < N / 4; ++w) to.at[w] = static_cast<uint32_t>(bytes >> (32 * w));
  return to;
}

// N elements of one row, mirrored: pixels backwards, their channels forwards.
template <int N> __device__ __forceinline__ Bytes<N> read_mirrored(const NormalizeImageParams& p, const uint8_t* sample,
                                                                   const Sizes& sizes, int64_t first) {
  const int64_t length = p.width * kImageChannels, row = sizes.row.quotient(first) * length, at = first - row;
  const int channel = static_cast<int>(at % kImageChannels);
  const uint8_t* from = sample + row + length - kImageChannels - at + 2 * channel;
  Bytes<N> to = {};
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const int pixels = k / kImageChannels + (channel + k % kImageChannels >= kImageChannels);
    to.at[k / 4] |= uint32_t{device::load(from + k - 2 * kImageChannels * pixels)} << (8 * (k % 4));
  }
  return to;
}

template <class T> __global__ void __launch_bounds__(kImageThreads)
    normalize_image(NormalizeImageParams p, ImageConfig c, Sizes sizes) {
  constexpr int N = 16 / sizeof(T), U = kImageTogether;
  const int64_t block = int64_t{blockIdx.x} * (kImageThreads * U), all = p.samples * c.vectors;
  const int64_t elems = p.elems();
  // Whole samples follow each other without a gap, so that a vector is found without its sample.
  Bytes<N> x[U] = {};
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const int64_t v = block + threadIdx.x + u * kImageThreads;
    if (v >= all) break;
    const auto* whole = reinterpret_cast<const Bytes<N>*>(p.x) + v;
    if (c.whole && !p.flip) {
      x[u] = device::load<device::Cache::streaming>(whole);
      continue;
    }
    const int64_t sample = sizes.vectors.quotient(v), first = (v - sample * c.vectors) * N;
    const bool flipped = p.flip && device::load(p.flip + sample);
    if (c.whole && !flipped)
      x[u] = device::load<device::Cache::streaming>(whole);
    else if (c.whole && p.width % N == 0)
      x[u] = read_mirrored<N>(p, p.x + sample * elems, sizes, first);
    else
      x[u] = read_singly<N>(p, p.x + sample * elems, sizes, first, elems - first, flipped);
  }
  // A whole sample is a multiple of the channels, and so is what lies between blocks and between a thread's vectors.
  static_assert(kImageThreads % kImageChannels == 0);
  float scale[kImageChannels], shift[kImageChannels];
  const auto begin_at = [&](unsigned phase) {
    rotate(scale, p.scale, phase);
    rotate(shift, p.shift, phase);
  };
  begin_at(threadIdx.x * N % kImageChannels);
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const int64_t v = block + threadIdx.x + u * kImageThreads;
    if (v >= all) break;
    int64_t sample = 0, first = v * N;
    if (!c.whole) {
      sample = sizes.vectors.quotient(v);
      first = (v - sample * c.vectors) * N;
      begin_at(static_cast<unsigned>(first % kImageChannels));
    }
    float y[N];
#pragma unroll
    for (int k = 0; k < N; ++k)
      y[k] = fmaf(static_cast<float>(x[u].at[k / 4] >> (8 * (k % 4)) & 0xffu), scale[k % kImageChannels],
                  shift[k % kImageChannels]);
    T* to = static_cast<T*>(p.y) + sample * elems;
    if (c.whole) {
      device::store<device::Cache::streaming>(device::packed_at<T, N>(to, first), device::rounded<T>(y));
      continue;
    }
#pragma unroll
    for (int k = 0; k < N; ++k)
      if (k < elems - first) device::store(to + first + k, device::from_float<T>(y[k]));
  }
}

}  // namespace warpsmith::image
