#pragma once
#include "kernels/max_pool/place.cuh"

// dx = the sum of dy of the windows whose index names the pixel, in float, in the order of windows, rounded once.
// Without atomics: each pixel looks at the windows that cover it. Writes dx once.
namespace warpsmith::max_pool {

// Windows of K x K at stride 2: a thread makes the 2 x 2 pixels whose place, counted with the padding, begins at an
// even row and column. At most 2 x 2 windows cover them.
template <class T, int N, int K> __global__ void __launch_bounds__(kThreads, 2)
    backward_square(MaxPoolBackwardParams p, Places places) {
  constexpr int D = (K + 1) / 2;  // windows of a row
  using Index = device::Vector<uint8_t, N>;
  const Place at(places);
  if (!at.here) return;
  const int64_t vectors = places.vector_count, stride = p.dy_stride / N;
  Packed<T, N> dy[D][D];
  Index index[D][D];
#pragma unroll
  for (int r = 0; r < D; ++r)
#pragma unroll
    for (int c = 0; c < D; ++c) {
      const int i = at.row + r - (D - 1), j = at.column + c - (D - 1);
      dy[r][c] = {};
#pragma unroll
      for (int k = 0; k < N; ++k) index[r][c].at[k] = 255;  // no pixel's
      if (!within(i, p.out_height) || !within(j, p.out_width)) continue;
      const int64_t window = (at.sample * p.out_height + i) * p.out_width + j;
      dy[r][c] = device::load(vector_at<T, N>(p.dy, window * stride + at.vector));
      index[r][c] = device::load(reinterpret_cast<const Index*>(p.index) + window * vectors + at.vector);
    }
  float dx[2][2][N] = {};
#pragma unroll
  for (int r = 0; r < D; ++r)
#pragma unroll
    for (int c = 0; c < D; ++c)
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float d = element<T, N>(dy[r][c], k);
        const int number = index[r][c].at[k];
#pragma unroll
        for (int v = 0; v < 2; ++v)
#pragma unroll
          for (int w = 0; w < 2; ++w) {
            const int row = v + 2 * (D - 1 - r), column = w + 2 * (D - 1 - c);  // in the window
            if (row < K && column < K && number == row * K + column) dx[v][w][k] += d;
          }
      }
#pragma unroll
  for (int v = 0; v < 2; ++v)
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      const int h = 2 * at.row + v - p.padding[0], column = 2 * at.column + w - p.padding[1];
      if (!within(h, p.height) || !within(column, p.width)) continue;
      const int64_t pixel = (at.sample * p.height + h) * p.width + column;
      device::store<device::Cache::streaming>(vector_at<T, N>(p.dx, pixel * vectors + at.vector),
                                              device::rounded<T>(dx[v][w]));
    }
}

// Any windows: a thread makes one pixel of dx.
template <class T, int N> __global__ void __launch_bounds__(kThreads, 2)
    backward_any(MaxPoolBackwardParams p, Places places) {
  using Index = device::Vector<uint8_t, N>;
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
      const Index index = device::load(reinterpret_cast<const Index*>(p.index) + window * vectors + at.vector);
      const int number = (h - i * p.stride[0]) * p.kernel[1] + w - j * p.stride[1];
#pragma unroll
      for (int k = 0; k < N; ++k)
        if (index.at[k] == number) dx[k] += element<T, N>(dy, k);
    }
  const int64_t pixel = (at.sample * p.height + at.row) * p.width + at.column;
  device::store<device::Cache::streaming>(vector_at<T, N>(p.dx, pixel * vectors + at.vector), device::rounded<T>(dx));
}

}  // namespace warpsmith::max_pool
