#pragma once
#include <cstdint>

#include "device/vector.h"
#include "kernels/optim/average.h"
#include "kernels/optim/contraction.h"

// Moving averages of any number of tensors of any mix of dtypes: one block a chunk. Reads average and value and writes
// the average once: 12 bytes an element of float32 values, 10 of 16-bit ones. Elementwise: the result does not depend
// on the chunks.
namespace warpsmith::average {

constexpr int kThreads = 256;
constexpr int kVectors = 2;  // of each array that a thread has in flight
constexpr int kLanes = 4;    // elements of a vector: 16 bytes of the average

template <class P> __device__ __forceinline__ bool aligned(const float* average, const P* value) {
  return reinterpret_cast<uintptr_t>(average) % 16 == 0 &&
         reinterpret_cast<uintptr_t>(value) % (kLanes * sizeof(P)) == 0;
}

template <int N, class P>
__device__ __forceinline__ void average_chunk(float* average, const P* value, int elems, float weight) {
  constexpr int kWidth = kThreads * N;
  const int whole = elems / N * N;
  const auto one = [&](float a, P v) { return lerp(a, device::to_float(v), weight); };
  for (int begin = static_cast<int>(threadIdx.x) * N; begin < whole; begin += kVectors * kWidth) {
    device::Vector<float, N> a[kVectors];
    device::Vector<P, N> v[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k)
      if (begin + k * kWidth < whole) {
        a[k] = device::load_vector<N>(average + begin + k * kWidth);
        v[k] = device::load_vector<N>(value + begin + k * kWidth);
      }
#pragma unroll
    for (int k = 0; k < kVectors; ++k)
      if (begin + k * kWidth < whole) {
#pragma unroll
        for (int i = 0; i < N; ++i) a[k].at[i] = one(a[k].at[i], v[k].at[i]);
        device::store_vector(average + begin + k * kWidth, a[k]);
      }
  }
  if (const int rest = whole + static_cast<int>(threadIdx.x); rest < elems)  // fewer than N
    device::store(average + rest, one(device::load(average + rest), device::load(value + rest)));
}

__global__ void __launch_bounds__(kThreads) moving_average(const __grid_constant__ AverageParams p) {
  if (p.found_inf && device::load(p.found_inf) != 0.0f) return;
  const ListChunk at = p.chunks[blockIdx.x];
  const AverageTensor& t = p.tensors[at.tensor];
  const int64_t begin = int64_t{at.chunk} * t.chunk_elems;
  const int elems = static_cast<int>(t.numel - begin < t.chunk_elems ? t.numel - begin : t.chunk_elems);
  float* average = static_cast<float*>(t.average) + begin;
  const float weight = static_cast<float>(p.weight);
  const auto chunk = [&]<class P>(const P* value) {
    if (aligned(average, value))
      average_chunk<kLanes>(average, value, elems, weight);
    else
      average_chunk<1>(average, value, elems, weight);
  };
  switch (t.value_dtype) {
    case Dtype::float32: chunk(static_cast<const float*>(t.value) + begin); break;
    case Dtype::float16: chunk(static_cast<const float16*>(t.value) + begin); break;
    default: chunk(static_cast<const bfloat16*>(t.value) + begin);
  }
}

}  // namespace warpsmith::average
