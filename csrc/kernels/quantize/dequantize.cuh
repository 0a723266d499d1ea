#pragma once
#include "device/fast_divide.h"
#include "device/float8.h"
#include "device/packed.h"
#include "kernels/quantize/quantize.h"

// y = byte * scale. Each warp takes a part of a row, each thread 16 bytes of y. Reads a byte a value, and every thread
// its scale; writes y.
namespace warpsmith::quantize {

constexpr int kDequantizeThreads = 256;

template <class T, class F> __global__ void __launch_bounds__(kDequantizeThreads)
    dequantize(DequantizeParams p, int64_t parts, device::FastDivide parts_a_row, int64_t parts_each, bool whole) {
  constexpr int N = 16 / sizeof(T);
  const int64_t part = int64_t{blockIdx.x} * (kDequantizeThreads / 32) + threadIdx.x / 32;
  if (part >= parts) return;
  const int64_t row = parts_a_row.quotient(part);
  const int64_t column = ((part - row * parts_each) * 32 + threadIdx.x % 32) * N, here = p.columns - column;
  if (here <= 0) return;
  const F* data = static_cast<const F*>(p.data) + row * p.data_stride + column;
  T* y = static_cast<T*>(p.y) + row * p.columns + column;
  const float* scales = p.scale + (row >> p.row_shift) * p.scale_columns;
  if (whole && here >= N) {  // N divides 128: one scale
    const device::Vector<F, N> bytes = device::load_vector<N, device::Cache::streaming>(data);
    const float scale = device::load(scales + (column >> p.column_shift));
    float value[N];
#pragma unroll
    for (int k = 0; k < N; ++k) value[k] = device::to_float(bytes.at[k]) * scale;
    device::store(device::packed_at<T, N>(y, 0), device::rounded<T>(value));
    return;
  }
#pragma unroll
  for (int k = 0; k < N; ++k)
    if (k < here)
      device::store(y + k, device::from_float<T>(device::to_float(device::load(data + k)) *
                                                 device::load(scales + ((column + k) >> p.column_shift))));
}

}  // namespace warpsmith::quantize
