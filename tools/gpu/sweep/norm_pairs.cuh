#pragma once
#include "device/cluster.h"
#include "kernels/norm/norm_batches.cuh"

// A candidate for the backward of the norm family: blocks of a cluster take rows of their own, and add up their sums in
// shared memory before these leave the chip, for half (or a quarter) of the partial rows.
namespace warpsmith::norm {

// One partial row of a cluster: through the blocks' shared memory [gradients, columns], which must be free in each.
// Every block adds up a part of the columns, in the order of the blocks.
template <bool kLayer, int N, int V>
__device__ __forceinline__ void store_cluster_sums(const NormBackwardParams& p, const float (&dweight)[V][N],
                                                   const float (&dbias)[V][N], float* shared) {
  using Part = Vector<float, 4>;
  const int columns = static_cast<int>(p.columns), blocks = static_cast<int>(device::cluster_size());
  const int threads = static_cast<int>(blockDim.x);
  __syncthreads();
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int column = (v * threads + static_cast<int>(threadIdx.x)) * N;
    if (column < columns) {
      store_sums(shared + column, dweight[v]);
      if constexpr (kLayer) {
        store_sums(shared + columns + column, dbias[v]);
      }
    }
  }
  device::cluster_barrier();
  const auto add_up = [&](void* partials, float* sums) {
    if (!partials) return;
    float* partial = static_cast<float*>(partials) + static_cast<int64_t>(blockIdx.x) / blocks * p.columns;
    const int first = (static_cast<int>(device::cluster_rank()) * threads + static_cast<int>(threadIdx.x)) * 4;
    for (int c = first; c < columns; c += blocks * threads * 4) {
      Part sum = {};
      for (int b = 0; b < blocks; ++b) {
        const Part part = *reinterpret_cast<const Part*>(device::cluster_shared(sums, static_cast<unsigned>(b)) + c);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          sum.at[k] += part.at[k];
        }
      }
      device::store(reinterpret_cast<Part*>(partial + c), sum);
    }
  };
  add_up(p.dweight_partials, shared);
  if constexpr (kLayer) {
    add_up(p.dbias_partials, shared + columns);
  }
  device::cluster_barrier();  // nobody leaves while others read
}

template <class Op, class T, int V, int U, Keep kKeep, bool kSharedWeight, int kMaxThreads, int kMinBlocks>
__global__ void __launch_bounds__(kMaxThreads, kMinBlocks) backward_pairs(NormBackwardParams p, int stages) {
  constexpr int N = kVector<T>, kScratch = BatchSums<U * Op::kSums, kMaxThreads>::kFloats;
  WARPSMITH_SHARED(float, scratch, kScratch);
  WARPSMITH_DYNAMIC_SHARED(shared);
  float dweight[V][N], dbias[V][N];
  backward_of_batches<Op, T, V, U, kKeep, kSharedWeight, kMaxThreads>(p, stages, scratch, shared, dweight, dbias);
  store_cluster_sums<Op::kLayer, N, V>(p, dweight, dbias, reinterpret_cast<float*>(shared));
}

}  // namespace warpsmith::norm
