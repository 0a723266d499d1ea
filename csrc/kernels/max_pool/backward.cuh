#pragma once
#include <type_traits>

#include "kernels/max_pool/place.cuh"

// dx = the sum of dy of the windows whose index names the pixel, in float, in the order of windows, rounded once.
// Without atomics: each pixel looks at the windows that cover it. Writes dx once.
namespace warpsmith::max_pool {

// The indices of a vector, in words: bytes would be unpacked before they are compared.
template <int N> struct Indices {
  static constexpr int kWords = N < 4 ? 1 : N / 4;
  uint32_t words[kWords];

  using Stored = std::conditional_t<(N < 4), uint8_t, device::Vector<uint32_t, kWords>>;

  __device__ __forceinline__ static const Stored* at(const uint8_t* base, int64_t vector) {
    return reinterpret_cast<const Stored*>(base) + vector;
  }
  __device__ __forceinline__ void load(const Stored* from) {
    const Stored stored = device::load(from);
    if constexpr (N < 4) {
      words[0] = stored;
    } else {
#pragma unroll
      for (int w = 0; w < kWords; ++w) words[w] = stored.at[w];
    }
  }
  // Whether the k-th is this number.
  __device__ __forceinline__ bool is(int k, uint32_t number) const {
    return ((words[k / 4] ^ 0x01010101u * number) & 0xffu << 8 * (k % 4)) == 0;
  }
};

// Windows of K x K at stride 2: a thread makes the 2 x 2 pixels whose place, counted with the padding, begins at an
// even row and column. At most 2 x 2 windows cover them.
template <class T, int N, int K> __global__ void __launch_bounds__(kThreads, 2)
    backward_square(MaxPoolBackwardParams p, Places places) {
  constexpr int D = (K + 1) / 2;  // windows of a row
  const Place at(places);
  if (!at.here) return;
  const int64_t vectors = places.vector_count, stride = p.dy_stride / N;
  Packed<T, N> dy[D][D];
  Indices<N> index[D][D];
  const int top = at.row - (D - 1), left = at.column - (D - 1);
  const int64_t first = (at.sample * p.out_height + top) * p.out_width + left;
  const auto* dy_row = vector_at<T, N>(p.dy, first * stride + at.vector);
  const auto* index_row = Indices<N>::at(p.index, first * vectors + at.vector);
#pragma unroll
  for (int r = 0; r < D; ++r, dy_row += p.out_width * stride, index_row += p.out_width * vectors) {
    const auto* from = dy_row;
    const auto* numbers = index_row;
#pragma unroll
    for (int c = 0; c < D; ++c, from += stride, numbers += vectors) {
      dy[r][c] = {};
#pragma unroll
      for (uint32_t& word : index[r][c].words) word = ~0u;  // no pixel's
      if (!within(top + r, p.out_height) || !within(left + c, p.out_width)) continue;
      dy[r][c] = device::load(from);
      index[r][c].load(numbers);
    }
  }
  float dx[2][2][N] = {};
#pragma unroll
  for (int r = 0; r < D; ++r)
#pragma unroll
    for (int c = 0; c < D; ++c)
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float d = element<T, N>(dy[r][c], k);
#pragma unroll
        for (int v = 0; v < 2; ++v)
#pragma unroll
          for (int w = 0; w < 2; ++w) {
            const int row = v + 2 * (D - 1 - r), column = w + 2 * (D - 1 - c);  // in the window
            if (row < K && column < K && index[r][c].is(k, row * K + column)) dx[v][w][k] += d;
          }
      }
  const int h = 2 * at.row - p.padding[0], w = 2 * at.column - p.padding[1];
  auto* to_row = vector_at<T, N>(p.dx, ((at.sample * p.height + h) * p.width + w) * vectors + at.vector);
#pragma unroll
  for (int r = 0; r < 2; ++r, to_row += p.width * vectors) {
    auto* to = to_row;
#pragma unroll
    for (int c = 0; c < 2; ++c, to += vectors)
      if (within(h + r, p.height) && within(w + c, p.width))
        device::store<device::Cache::streaming>(to, device::rounded<T>(dx[r][c]));
  }
}

// Any windows: a thread makes one pixel of dx.
template <class T, int N> __global__ void __launch_bounds__(kThreads, 2)
    backward_any(MaxPoolBackwardParams p, Places places) {
  const Place at(places);
  if (!at.here) return;
  const int64_t vectors = places.vector_count, stride = p.dy_stride / N;
  const int h = at.row + p.padding[0], w = at.column + p.padding[1];
  const auto first = [](int place, int kernel, int step) { return place < kernel ? 0 : (place - kernel) / step + 1; };
  const int last_row = min(h / p.stride[0], p.out_height - 1), last_column = min(w / p.stride[1], p.out_width - 1);
  float dx[N] = {};
  for (int i = first(h, p.kernel[0], p.stride[0]); i <= last_row; ++i)
    for (int j = first(w, p.kernel[1], p.stride[1]); j <= last_column; ++j) {
      const int64_t window = (at.sample * p.out_height + i) * p.out_width + j;
      const auto dy = device::load(vector_at<T, N>(p.dy, window * stride + at.vector));
      Indices<N> index;
      index.load(Indices<N>::at(p.index, window * vectors + at.vector));
      const int number = (h - i * p.stride[0]) * p.kernel[1] + w - j * p.stride[1];
#pragma unroll
      for (int k = 0; k < N; ++k)
        if (index.is(k, number)) dx[k] += element<T, N>(dy, k);
    }
  const int64_t pixel = (at.sample * p.height + at.row) * p.width + at.column;
  device::store<device::Cache::streaming>(vector_at<T, N>(p.dx, pixel * vectors + at.vector), device::rounded<T>(dx));
}

}  // namespace warpsmith::max_pool
