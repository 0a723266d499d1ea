#pragma once
#include "device/async_copy.h"
#include "tiles/pixels.cuh"

// Rows of pixels on their way to shared memory, for passes that write.
namespace warpsmith::tiles {

constexpr int kRingThreads = 256, kRingSlots = 16;  // slots: of vectors, a thread
template <class T, int N> constexpr int kRingBytes = kRingSlots * kRingThreads * static_cast<int>(sizeof(Packed<T, N>));

// A ring of stages, each with kRows rows of a thread's vector of kTensors tensors side by side. A thread reads back
// what it copied itself: no barriers, and loads stay in flight while a turn is computed, without registers for them.
// cache: of the copies.
template <class T, int N, int kTensors, int kRows, device::Cache cache = device::Cache::keep> struct RowRing {
  static constexpr int U = kRows, kStages = kRingSlots / (U * kTensors);
  Packed<T, N>* own;
  int stage = 0;

  __device__ __forceinline__ explicit RowRing(unsigned char* memory)
      : own(reinterpret_cast<Packed<T, N>*>(memory) + threadIdx.x) {}
  __device__ __forceinline__ Packed<T, N>* slot(int tensor, int u) const {
    return own + ((stage * kTensors + tensor) * U + u) * kRingThreads;
  }
  __device__ __forceinline__ void copy_row(int tensor, int u, const Packed<T, N>* from, bool valid) const {
    if constexpr (sizeof(Packed<T, N>) == 16)
      device::copy_async<16, cache>(slot(tensor, u), from, valid);
    else
      *slot(tensor, u) = valid ? device::load(from) : Packed<T, N>{};
  }
  // Begins to copy the rows of a tensor, as load_rows loads them, to the present stage.
  __device__ __forceinline__ void copy(int tensor, const void* base, int64_t stride_vectors, int64_t vector,
                                       int64_t first, int step, int64_t rows) const {
    const auto* from = vector_at<T, N>(base, first * stride_vectors + vector);
    int64_t left = rows - first;
#pragma unroll
    for (int u = 0; u < U; ++u, from += step * stride_vectors, left -= step) copy_row(tensor, u, from, left > 0);
  }
  // The copies to a stage are begun; the oldest stage is the next one.
  __device__ __forceinline__ void copied() {
    device::copy_async_commit();
    stage = stage + 1 < kStages ? stage + 1 : 0;
  }
  // Waits for the oldest stage.
  __device__ __forceinline__ void wait() const { device::copy_async_wait<kStages - 1>(); }
  __device__ __forceinline__ void take(Packed<T, N> (&to)[U], int tensor) const {
#pragma unroll
    for (int u = 0; u < U; ++u) to[u] = *slot(tensor, u);
  }
};

}  // namespace warpsmith::tiles
