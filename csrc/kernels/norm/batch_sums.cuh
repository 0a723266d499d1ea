#pragma once
#include "device/cluster.h"
#include "device/mbarrier.h"
#include "device/reduce.h"
#include "kernels/norm/row.cuh"

// Sums of several values at once over the threads of a batch of rows: a warp, a block, or the blocks of a cluster.
namespace warpsmith::norm {

// Sums kCount values (a power of two) over the warp. Lane i returns the sum of value i / (32 / kCount).
//
// In each of the first steps a lane sends half of its values to its partner and keeps the other half. That takes
// log2(32 / kCount) + kCount - 1 shuffles; one reduction per value would take 5 kCount.
template <int kCount> __device__ __forceinline__ float distributed_sums(float (&v)[kCount]) {
#pragma unroll
  for (int n = kCount, distance = 16; n > 1; n /= 2, distance /= 2) {
    const bool upper = threadIdx.x & static_cast<unsigned>(distance);
#pragma unroll
    for (int i = 0; i < n / 2; ++i) {
      const float handed = upper ? v[i] : v[i + n / 2], kept = upper ? v[i + n / 2] : v[i];
      v[i] = kept + __shfl_xor_sync(0xffffffffu, handed, distance, 32);
    }
  }
  return device::group_sum<32 / kCount>(v[0]);
}

// Sums kCount values over the block. Every thread gets the same bits. The scratch is double-buffered, so one barrier
// per sum is enough.
template <int kCount, int kMaxThreads> struct BatchSums {
  static constexpr int kLanes = 32 / kCount;  // lanes that add up the same value
  static constexpr int kWarps = (kMaxThreads / 32 + kLanes - 1) / kLanes * kLanes;
  static constexpr int kFloats = 2 * kCount * kWarps;
  float* scratch;  // kFloats of shared memory
  int turn = 0;

  // Writes zeros for the warps that the block does not have: the loop below runs over kWarps without a branch.
  __device__ __forceinline__ void begin() {
    for (int i = static_cast<int>(threadIdx.x); i < kFloats; i += static_cast<int>(blockDim.x)) scratch[i] = 0;
    __syncthreads();
  }

  __device__ __forceinline__ void operator()(float (&v)[kCount]) {
    const float of_warp = distributed_sums(v);
    const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
    float* values = scratch + turn * kCount * kWarps + lane / kLanes * kWarps;
    turn = 1 - turn;
    if (lane % kLanes == 0) values[warp] = of_warp;
    __syncthreads();
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; w += kLanes) {
      sum += values[lane % kLanes + w];
    }
    sum = device::group_sum<kLanes>(sum);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      v[i] = __shfl_sync(0xffffffffu, sum, i * kLanes, 32);
    }
  }
};

// Sums up to 4 floats over a cluster in which each block holds part of the row. Every thread gets the same bits.
//
// Each warp writes its partial sums to every block and arrives on that block's mbarrier. A cluster barrier would also
// wait for all earlier stores, which takes longer than the row.
//
// Slots are double-buffered: a warp starts exchange i + 2 only after it has read exchange i + 1, and by then every warp
// has finished reading exchange i. Each block waits for everything that is sent to it, so no block exits before.
template <int kCount, int kMaxThreads, int kBlocks> struct ClusterSums {
  static_assert(kCount <= 4);
  using Slot = Vector<float, 4>;
  static constexpr int kSlots = kBlocks * kMaxThreads / 32, kFloats = 2 * kSlots * 4;
  float* scratch;              // kFloats of shared memory, on 16 bytes
  device::Mbarrier* complete;  // two mbarriers, one per buffer
  int turn = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void begin() {
    if (threadIdx.x == 0) {
      device::mbarrier_init(complete, 1), device::mbarrier_init(complete + 1, 1);
      device::mbarrier_init_fence();
    }
    device::cluster_barrier();
  }

  __device__ __forceinline__ void operator()(float (&v)[kCount]) {
    const float of_warp = distributed_sums(v);
    const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
    const int warps = static_cast<int>(blockDim.x / 32), blocks = static_cast<int>(device::cluster_size());
    const int slots = blocks * warps;
    Slot sent = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      sent.at[i] = __shfl_sync(0xffffffffu, of_warp, i * (32 / kCount), 32);
    }
    Slot* values = reinterpret_cast<Slot*>(scratch) + turn * kSlots;
    device::Mbarrier* barrier = complete + turn;
    if (threadIdx.x == 0) device::mbarrier_arrive_expect(barrier, slots * static_cast<int>(sizeof(Slot)));
    __syncwarp(0xffffffffu);  // all lanes have read the slots of the previous exchange
    if (lane < blocks) {
      const unsigned to = static_cast<unsigned>(lane);
      device::store_async(device::cluster_shared(values + static_cast<int>(device::cluster_rank()) * warps + warp, to),
                          sent, device::cluster_shared(barrier, to));
    }
    device::mbarrier_wait(barrier, parity);
    float sums[kCount] = {};
    for (int w = lane; w < slots; w += 32) {
      const Slot slot = values[w];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        sums[i] += slot.at[i];
      }
    }
    const float sum = distributed_sums(sums);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      v[i] = __shfl_sync(0xffffffffu, sum, i * (32 / kCount), 32);
    }
    parity ^= static_cast<unsigned>(turn);
    turn = 1 - turn;
  }
};

}  // namespace warpsmith::norm
