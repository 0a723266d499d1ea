#pragma once
#include "kernels/max_pool/place.cuh"

// y = the largest of each window, index = its number in the window, one byte. Reads every row of x that windows share
// once a thread, writes y and index once.
namespace warpsmith::max_pool {

// The largest element so far of each channel, and its number.
template <int N> struct Largest {
  float value[N];
  int at[N];

  // first: the number of the first pixel of x, which is the largest where all are -inf.
  __device__ __forceinline__ explicit Largest(int first) {
#pragma unroll
    for (int k = 0; k < N; ++k) value[k] = -INFINITY, at[k] = first;
  }
  // NaN is larger than anything before it.
  __device__ __forceinline__ void take(int k, float x, int number) {
    if (x > value[k] || isnan(x)) value[k] = x, at[k] = number;
  }
  template <class T> __device__ __forceinline__ void take(const Packed<T, N>& x, int number) {
#pragma unroll
    for (int k = 0; k < N; ++k) take(k, element<T, N>(x, k), number);
  }
  // Those of a row that begins with this number.
  __device__ __forceinline__ void take(const Largest& row, int number) {
#pragma unroll
    for (int k = 0; k < N; ++k) take(k, row.value[k], number + row.at[k]);
  }
};

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
  constexpr int kShared = K - 2, kNew = K - kShared;
  static_assert(kShared == 0 || kShared == 1);
  const Place at(places);
  if (!at.here) return;
  const int64_t vectors = places.vector_count, stride = p.x_stride / N, line = p.width * stride;
  const int w0 = at.column * 2 - p.padding[1], first_column = w0 < 0 ? -w0 : 0;
  const auto* const x = vector_at<T, N>(p.x, at.sample * p.height * line + at.vector);
  const auto load_row = [&](Packed<T, N>(&to)[K], int h) {
#pragma unroll
    for (int c = 0; c < K; ++c) {
      to[c] = {};
      if (within(h, p.height) && within(w0 + c, p.width)) to[c] = device::load(x + h * line + (w0 + c) * stride);
    }
  };
  const auto largest_of = [&](const Packed<T, N>(&row)[K]) {
    Largest<N> found(first_column);
#pragma unroll
    for (int c = 0; c < K; ++c)
      if (within(w0 + c, p.width)) found.template take<T>(row[c], c);
    return found;
  };
  const int begin = at.row * kMaxPoolRows;
  Largest<N> last(0);
  if constexpr (kShared > 0) {
    Packed<T, N> row[K];
    load_row(row, begin * 2 - p.padding[0]);
    last = largest_of(row);
  }
#pragma unroll 1
  for (int u = 0; u < kMaxPoolRows && begin + u < p.out_height; ++u) {
    const int h0 = (begin + u) * 2 - p.padding[0];
    Packed<T, N> rows[kNew][K];
#pragma unroll
    for (int r = 0; r < kNew; ++r) load_row(rows[r], h0 + kShared + r);
    Largest<N> found((h0 < 0 ? -h0 : 0) * K + first_column);
    if constexpr (kShared > 0)
      if (h0 >= 0) found.take(last, 0);
#pragma unroll
    for (int r = 0; r < kNew; ++r) {
      if (!within(h0 + kShared + r, p.height)) continue;
      last = largest_of(rows[r]);
      found.take(last, (kShared + r) * K);
    }
    write<T>(p, found, ((at.sample * p.out_height + begin + u) * p.out_width + at.column) * vectors + at.vector);
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
  Largest<N> found(first_row * p.kernel[1] + first_column);
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
