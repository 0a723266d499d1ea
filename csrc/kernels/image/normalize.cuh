#pragma once
#include "device/fast_divide.h"
#include "device/packed.h"
#include "kernels/image/image.h"

// y = x * scale + shift by channel, samples with a flag mirrored. Reads each byte of x once and each flag once a
// thread and sample, writes y once. Mirrored samples are read by words, twice as many as they have; those that are not
// made of vectors byte by byte in a loop.
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

// Mirrors rows: pixels backwards, their channels forwards. The bytes of a vector lie in 3 or 4 pixels (N = 8), or 2,
// that are one behind the other in x; digits of __byte_perm put them into their places.
template <int N> struct Mirror {
  static_assert(N == 4 || N == 8);
  static constexpr int kWords = N == 8 ? 3 : 2;  // of the pixels
  int start;                                     // of the pixels: beside the vector's distance to the end of its row
  unsigned digits[3];                            // of the first word, in two steps, and of the last

  // Of vectors whose first element has this channel.
  __device__ __forceinline__ explicit Mirror(unsigned channel) {
    start = static_cast<int>(channel) - kImageChannels -
            (static_cast<int>(channel) + N - 1) / kImageChannels * kImageChannels;
    const unsigned phase = N == 8 ? channel : channel == 0 ? 2 : channel - 1;
    digits[0] = phase == 0 ? 0x0432u : phase == 1 ? 0x0043u : 0x4327u;
    digits[1] = phase == 0 ? 0x7210u : phase == 1 ? 0x3710u : 0x3210u;
    digits[2] = phase == 0 ? 0x1054u : phase == 1 ? 0x2105u : 0x0543u;
  }

  // Loads the words with the N elements from `first` of a sample on, of one row; not those behind the sample. Returns
  // how far the pixels lie behind the first word's begin.
  __device__ __forceinline__ unsigned load(uint32_t (&words)[kWords + 1], const uint8_t* sample, unsigned elems,
                                           unsigned length, const Sizes& sizes, unsigned first) const {
    const auto row = static_cast<unsigned>(sizes.row.quotient(first)) * length;
    const unsigned from = 2 * row + length + start - first, ahead = from % 4, at = from - ahead;
    const auto* const source = reinterpret_cast<const uint32_t*>(sample + at);
#pragma unroll
    for (int w = 0; w <= kWords; ++w) words[w] = w == 0 || at + 4 * w < elems ? device::load(source + w) : 0;
    return ahead;
  }

  __device__ __forceinline__ Bytes<N> arrange(const uint32_t (&words)[kWords + 1], unsigned ahead) const {
    uint32_t at[kWords];
#pragma unroll
    for (int w = 0; w < kWords; ++w) at[w] = __byte_perm(words[w], words[w + 1], 0x3210u + 0x1111u * ahead);
    Bytes<N> to;
    to.at[N / 4 - 1] = __byte_perm(at[0], at[1], digits[2]);
    if constexpr (N == 8) to.at[0] = __byte_perm(__byte_perm(at[1], at[2], digits[0]), at[0], digits[1]);
    return to;
  }
};

template <class T> __global__ void __launch_bounds__(kImageThreads, 4)
    normalize_image(NormalizeImageParams p, ImageConfig c, Sizes sizes) {
  constexpr int N = 16 / sizeof(T), U = kImageTogether;
  const int64_t block = int64_t{blockIdx.x} * (kImageThreads * U), all = p.samples * c.vectors;
  const int64_t elems = p.elems();
  // A whole sample is a multiple of the channels, and so is what lies between blocks and between a thread's vectors.
  static_assert(kImageThreads % kImageChannels == 0);
  const unsigned channel = threadIdx.x * N % kImageChannels;
  Bytes<N> x[U] = {};
  const auto read_whole = [&](int64_t v) {  // samples follow each other without a gap
    return device::load<device::Cache::streaming>(reinterpret_cast<const Bytes<N>*>(p.x) + v);
  };
  if (c.whole && !p.flip) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t v = block + threadIdx.x + u * kImageThreads;
      if (v < all) x[u] = read_whole(v);
    }
  } else {
    const bool by_words = c.whole && p.width % N == 0 && elems < (int64_t{1} << 30);
    const Mirror<N> mirror(channel);
    constexpr unsigned kAsItIs = 4;
    int64_t sample = -1, first = elems;
    bool flipped = false;
    uint32_t words[U][Mirror<N>::kWords + 1];
    unsigned ahead[U];
    const auto keep = [&](int u, const Bytes<N>& bytes) {
      ahead[u] = kAsItIs;
#pragma unroll
      for (int w = 0; w < N / 4; ++w) words[u][w] = bytes.at[w];
    };
#pragma unroll
    for (int u = 0; u < U; ++u, first += kImageThreads * N) {  // all loads, before the first is waited for
      const int64_t v = block + threadIdx.x + u * kImageThreads;
      if (v >= all) break;
      if (first >= elems) {  // of another sample than the vector before
        sample = sizes.vectors.quotient(v);
        first = (v - sample * c.vectors) * N;
        flipped = p.flip && device::load(p.flip + sample);
      }
      const uint8_t* const from = p.x + sample * elems;
      if (c.whole && !flipped)
        keep(u, read_whole(v));
      else if (by_words)
        ahead[u] = mirror.load(words[u], from, static_cast<unsigned>(elems),
                               static_cast<unsigned>(p.width * kImageChannels), sizes, static_cast<unsigned>(first));
      else
        keep(u, read_singly<N>(p, from, sizes, first, elems - first, flipped));
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (block + threadIdx.x + u * kImageThreads >= all) break;
      if (ahead[u] < kAsItIs) {
        x[u] = mirror.arrange(words[u], ahead[u]);
        continue;
      }
#pragma unroll
      for (int w = 0; w < N / 4; ++w) x[u].at[w] = words[u][w];
    }
  }
  float scale[kImageChannels], shift[kImageChannels];
  const auto begin_at = [&](unsigned phase) {
    rotate(scale, p.scale, phase);
    rotate(shift, p.shift, phase);
  };
  begin_at(channel);
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
