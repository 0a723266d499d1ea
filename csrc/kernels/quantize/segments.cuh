#pragma once
#include "device/fast_divide.h"
#include "device/reduce.h"
#include "kernels/quantize/cast.cuh"
#include "kernels/quantize/quantize.h"

// Casts segments of rows (quantize_config.h), each by a team of threads that keep it in registers. Reads x once; twice
// where a segment is longer than registers and its scale is computed. Writes a byte a value and 4 bytes a computed
// scale; every thread of a team reads a given one.
namespace warpsmith::quantize {

struct Segments {
  const void* x;
  uint8_t* data;
  float* scale;
  float* amax;        // the largest magnitude, beside given scales; null: not wanted
  const float* most;  // of the tensor, of which the scale is made; null: it is given, or that of a segment
  int64_t* counts;
  int64_t columns, x_stride, length, count;  // count: of all segments
  device::FastDivide per_row;
  int64_t segments_a_row;
  int64_t scale_of_row;             // stride of given scales
  bool given, power_of_two, whole;  // whole: segments begin on 16 bytes of x, and of data likewise
};

template <class T, class F, class I> __global__ void __launch_bounds__(I::value.threads, I::value.threads > 256 ? 1 : 3)
    segments(Segments p) {
  constexpr int kLanes = I::value.lanes, V = I::value.vectors, N = 16 / sizeof(T);
  constexpr int kTeams = I::value.threads / kLanes, kHeld = kLanes * V * N;
  WARPSMITH_SHARED(float, scratch, I::value.threads / 32);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t segment = int64_t{blockIdx.x} * kTeams + threadIdx.x / kLanes;
  const int64_t row = p.per_row.quotient(segment), part = segment - row * p.segments_a_row;
  const int64_t first = part * p.length, behind = p.columns - first;
  const int64_t here = segment >= p.count ? 0 : behind < p.length ? behind : p.length;

  Piece<T> held[V];
  float amax = 0.0f;
  Divisor by{1.0f, 1.0f};
  bool odd = false;
  if (p.most) {
    by = divisor(scale_of_amax(device::load(p.most), kLimits<F>, p.power_of_two));
    if (blockIdx.x == 0 && threadIdx.x == 0) device::store(p.scale, by.scale);
  } else if (p.given && here > 0) {
    by = divisor(device::load(p.scale + row * p.scale_of_row));
  }
  // First the maximum, then the bytes. One place loads: three would keep three sets of addresses in registers.
#pragma unroll 1
  for (int pass = p.given ? 1 : 0; pass < 2; ++pass) {
#pragma unroll 1
    for (int64_t chunk = 0; chunk < p.length; chunk += kHeld) {
      const int left = here - chunk < kHeld ? static_cast<int>(here - chunk) : kHeld;
      const int64_t start = first + chunk + lane * N;
      if (pass == 0 || p.given || p.length > kHeld) {
        const T* x = static_cast<const T*>(p.x) + row * p.x_stride + start;
#pragma unroll
        for (int v = 0; v < V; ++v) held[v] = load_piece(x + v * kLanes * N, left - (v * kLanes + lane) * N, p.whole);
      }
#pragma unroll
      for (int v = 0; v < V; ++v) {
        float value[N];
        device::unpack<T>(value, held[v]);
        device::forget(held[v]);
        if (pass == 0 || p.amax) {
#pragma unroll
          for (int k = 0; k < N; ++k) amax = fmaxf(amax, finite_magnitude(value[k]));
        }
        if (pass == 0) continue;
        if (const int rest = left - (v * kLanes + lane) * N; rest > 0) {
          Vector<uint32_t, N / 4> bytes;
          odd |= cast<F>(value, by, bytes);
          store_bytes(p.data + row * p.columns + start + v * kLanes * N, bytes, rest, p.whole);
        }
      }
    }
    if (pass == 0) {
      if constexpr (kLanes <= 32) {
        amax = device::group_max<kLanes>(amax);
      } else {
        amax = device::block_max<kLanes>(amax, scratch);
      }
      by = divisor(scale_of_amax(amax, kLimits<F>, p.power_of_two));
      if (lane == 0 && here > 0) device::store(p.scale + segment, by.scale);
    }
  }
  Counts counts;
  if (odd) {  // once more, each value alone
    const T* x = static_cast<const T*>(p.x) + row * p.x_stride + first;
    uint8_t* data = p.data + row * p.columns + first;
#pragma unroll 1
    for (int64_t piece = lane * N; piece < here; piece += kLanes * N) {
#pragma unroll 1
      for (int64_t c = piece; c < here && c < piece + N; ++c)
        device::store(data + c, repair<F>(device::to_float(device::load(x + c)), by.scale, counts));
    }
  }
  add_counts(counts, p.counts);
  if (p.amax) {
    amax = device::block_max<I::value.threads>(amax, scratch);
    if (threadIdx.x == 0) raise(p.amax, amax);
  }
}

}  // namespace warpsmith::quantize
