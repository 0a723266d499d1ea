#pragma once
#include "kernels/max_pool/place.cuh"

// y = the largest of each window, index = its number in the window, one byte. Reads every row of x that windows share
// once a thread, writes y and index once.
namespace warpsmith::max_pool {

// The largest element so far of each channel, and its number. Without branches: the threads of a warp differ.
template <int N> struct Largest {
  float value[N];
  int at[N];

  // NaN is larger than anything before it.
  __device__ __forceinline__ void take(int k, float x, int number) {
    const bool larger = (x > value[k]) | (x != x);
    value[k] = larger ? x : value[k];
    at[k] = larger ? number : at[k];
  }
  template <class T> __device__ __forceinline__ void take(const Packed<T, N>& x, int number) {
#pragma unroll
    for (int k = 0; k < N; ++k) take(k, element<T, N>(x, k), number);
  }
  __device__ __forceinline__ void take(const Largest& row) {
#pragma unroll
    for (int k = 0; k < N; ++k) take(k, row.value[k], row.at[k]);
  }
};

// What stands for a pixel outside of x.
template <class T, int N> __device__ __forceinline__ Packed<T, N> lowest() {
  float x[N];
#pragma unroll
  for (int k = 0; k < N; ++k) x[k] = -INFINITY;
  return device::rounded<T>(x);
}

template <class T, int N>
__device__ __forceinline__ void write(const MaxPoolForwardParams& p, const Largest<N>& found, int64_t vector) {
  device::store<device::Cache::streaming>(vector_at<T, N>(p.y, vector), device::rounded<T>(found.value));
  if (!p.index) return;
  device::Vector<uint8_t, N> index;
#pragma unroll
  for (int k = 0; k < N; ++k) index.at[k] = static_cast<uint8_t>(found.at[k]);
  device::store<device::Cache::streaming>(reinterpret_cast<device::Vector<uint8_t, N>*>(p.index) + vector, index);
}

// Windows of K x K at stride 2: a thread goes down a column of y, and a row that two windows share is read and compared
// once.
template <class T, int N, int K> __global__ void __launch_bounds__(kThreads, 2)
    forward_square(MaxPoolForwardParams p, Places places) {
  constexpr int kShared = K - 2;  // rows
  static_assert(kShared == 0 || kShared == 1);
  const Place at(places);
  if (!at.here) return;
  const int64_t stride = p.x_stride / N, line = p.width * stride;
  const int w0 = at.column * 2 - p.padding[1], first_column = w0 < 0 ? 1 : 0;
  bool inside[K];
#pragma unroll
  for (int c = 0; c < K; ++c) inside[c] = within(w0 + c, p.width);
  const auto load_row = [&](Packed<T, N>(&to)[K], const Packed<T, N>* from, int h) {
    const bool row_inside = within(h, p.height);
#pragma unroll
    for (int c = 0; c < K; ++c) {
      to[c] = lowest<T, N>();
      if (row_inside && inside[c]) to[c] = device::load(from + c * stride);
    }
  };
  // Of a row whose first pixel has this number. Where all are minus infinity, the first pixel of x stays.
  const auto largest_of = [&](const Packed<T, N>(&row)[K], int number) {
    Largest<N> found;
#pragma unroll
    for (int k = 0; k < N; ++k) found.value[k] = element<T, N>(row[0], k), found.at[k] = number + first_column;
#pragma unroll
    for (int c = 1; c < K; ++c) found.template take<T>(row[c], number + c);
    return found;
  };
  const int begin = at.row * kMaxPoolRows;
  int h = begin * 2 - p.padding[0];
  const auto* x = vector_at<T, N>(p.x, (at.sample * p.height + h) * line + w0 * stride + at.vector);
  int64_t to = ((at.sample * p.out_height + begin) * p.out_width + at.column) * places.vector_count + at.vector;
  Packed<T, N> rows[2][K];
  Largest<N> last = {};
  if constexpr (kShared > 0) {
    load_row(rows[0], x, h);
    last = largest_of(rows[0], h < 0 ? K : 0);
  }
#pragma unroll 1
  for (int u = 0; u < kMaxPoolRows && begin + u < p.out_height; ++u, h += 2, x += 2 * line) {
    load_row(rows[0], x + kShared * line, h + kShared);
    load_row(rows[1], x + (kShared + 1) * line, h + kShared + 1);
    Largest<N> found = last;
    if constexpr (kShared > 0)
      found.take(largest_of(rows[0], K));
    else
      found = largest_of(rows[0], h < 0 ? K : 0);
    last = largest_of(rows[1], (K - 1) * K);
    found.take(last);
#pragma unroll
    for (int k = 0; k < N; ++k) last.at[k] -= (K - 1) * K;  // the next window begins with this row
    write<T>(p, found, to);
    to += p.out_width * places.vector_count;
  }
}

// Any windows: a thread makes one pixel of y.
template <class T, int N> __global__ void __launch_bounds__(kThreads, 2)
    forward_any(MaxPoolForwardParams p, Places places) {
  const Place at(places);
  if (!at.here) return;
  const int64_t stride = p.x_stride / N;
  const int h0 = at.row * p.stride[0] - p.padding[0], w0 = at.column * p.stride[1] - p.padding[1];
  const int first_row = h0 < 0 ? -h0 : 0, first_column = w0 < 0 ? -w0 : 0;
  Largest<N> found;
#pragma unroll
  for (int k = 0; k < N; ++k) found.value[k] = -INFINITY, found.at[k] = first_row * p.kernel[1] + first_column;
  for (int r = first_row; r < p.kernel[0] && h0 + r < p.height; ++r) {
    const auto* const x = vector_at<T, N>(p.x, ((at.sample * p.height + h0 + r) * p.width + w0) * stride + at.vector);
#pragma unroll 4
    for (int c = first_column; c < p.kernel[1] && w0 + c < p.width; ++c)
      found.template take<T>(device::load(x + c * stride), r * p.kernel[1] + c);
  }
  const int64_t pixel = (at.sample * p.out_height + at.row) * p.out_width + at.column;
  write<T>(p, found, pixel * places.vector_count + at.vector);
}

}  // namespace warpsmith::max_pool
