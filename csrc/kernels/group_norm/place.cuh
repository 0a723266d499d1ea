#pragma once
#include "device/cluster.h"
#include "kernels/group_norm/group_norm.h"
#include "tiles/activation_math.cuh"
#include "tiles/pixels.cuh"

// Where a thread works, and how the sums of groups are made of those of threads.
namespace warpsmith::group_norm {

using namespace tiles;

constexpr int kThreads = kGroupNormThreads, kLanes = kGroupNormLanes;

struct Ranges {
  int64_t samples, pixels, block_pixels, vectors, channels, groups,
      group;  // vectors: of a range; group: channels of one
  int lanes, cluster;
};

// A block's range of a sample and pixels of it; a thread's lane, and its pixel side by side with others. Neighbouring
// ranges run together: they share sectors of 32 bytes.
template <int N> struct Place {
  int64_t sample;
  int range, rank, lane, row, rows;  // rows: side by side
  bool here;

  __device__ __forceinline__ explicit Place(const Ranges& r)
      : sample(int64_t{blockIdx.z} * gridDim.y + blockIdx.y),
        range(static_cast<int>(blockIdx.x) / r.cluster),
        rank(static_cast<int>(blockIdx.x) % r.cluster),
        lane(static_cast<int>(threadIdx.x) % r.lanes),
        row(static_cast<int>(threadIdx.x) / r.lanes),
        rows(kThreads / r.lanes),
        here(row < rows) {}
  // The first pixel of this thread, counted over all samples.
  __device__ __forceinline__ int64_t first(const Ranges& r) const {
    return sample * r.pixels + rank * r.block_pixels + row;
  }
  // The rows of this thread of a tensor, of the vector `v` of the range.
  template <class T> __device__ __forceinline__ Rows<T, N> rows_of(const void* base, int64_t stride, const Ranges& r,
                                                                   int64_t v, int turn) const {
    const int64_t left = min(r.block_pixels, r.pixels - rank * r.block_pixels) - row;
    return {vector_at<T, N>(base, first(r) * stride + int64_t{range} * r.vectors + v), stride, left,
            int64_t{turn} * rows, rows};
  }
  __device__ __forceinline__ int64_t channel(const Ranges& r, int64_t v) const { return (range * r.vectors + v) * N; }
  // Groups of a range, 1 where a group is all of it; the first one of this range in its sample; that of a channel.
  __device__ __forceinline__ int groups(const Ranges& r) const {
    return r.vectors > kLanes ? 1 : static_cast<int>(r.vectors) * N / static_cast<int>(r.group);
  }
  __device__ __forceinline__ int64_t first_group(const Ranges& r) const {
    return sample * r.groups + int64_t{range} * groups(r);
  }
  __device__ __forceinline__ int group_of(const Ranges& r, int64_t v, int k) const {
    return r.vectors > kLanes ? 0 : (static_cast<int>(v) * N + k) / static_cast<int>(r.group);
  }
};

// Shared memory, by element of a vector first, so that the lanes of a warp do not meet in a bank: what a thread has of
// the channels of its vector, and a table of the channels of a tile.
constexpr int kApart = kThreads + 4;
template <int N> __device__ __forceinline__ int of_thread(int k, int thread) { return k * kApart + thread; }
template <int N> __device__ __forceinline__ int of_row(const Ranges& r, int row, int c) {
  return of_thread<N>(c % N, row * r.lanes + c / N);
}
template <int N> __device__ __forceinline__ int in_table(const Ranges& r, int c) { return c % N * r.lanes + c / N; }

// visit(c) for the channels of the tile that begins at vector `tile`, shared out to the threads of the block.
template <int N, class Visit>
__device__ __forceinline__ void each_channel(const Ranges& r, int64_t tile, const Visit& visit) {
  const int channels = static_cast<int>(min(int64_t{r.lanes}, r.vectors - tile)) * N;
  for (int c = static_cast<int>(threadIdx.x); c < channels; c += kThreads) visit(c);
}

// Totals of groups: add(group, i, first, second) adds item i of `items` of a group. Thread (part, group) adds every
// parts-th, then parts are added in pairs. `totals` then begins with the groups' first sums, and its second half with
// the second ones.
template <class Add>
__device__ __forceinline__ void totals_of_groups(double* totals, int groups, int items, const Add& add) {
  const int thread = static_cast<int>(threadIdx.x);
  const int group = thread % groups, part = thread / groups, parts = kThreads / groups;
  double first = 0, second = 0;
  for (int i = part < parts ? part : items; i < items; i += parts) add(group, i, first, second);
  totals[thread] = first;
  totals[kThreads + thread] = second;
  for (int left = parts, half; left > 1; left = half) {
    half = (left + 1) / 2;
    __syncthreads();
    if (part >= left - half) continue;
    totals[thread] += totals[thread + half * groups];
    totals[kThreads + thread] += totals[kThreads + thread + half * groups];
  }
}

// Adds the totals of the blocks of a cluster, two of each group of a range, in the order of ranks: in `totals` of every
// block lie its own. Each of the first `groups` threads gets those of one group. The caller ends with cluster_wait().
__device__ __forceinline__ void totals_of_cluster(double* totals, int groups, int cluster, double& first,
                                                  double& second) {
  constexpr int kMost = 8;
  first = second = 0;
  if (cluster > 1)
    device::cluster_barrier();
  else
    __syncthreads();
  const int group = static_cast<int>(threadIdx.x);
  if (group < groups) {
    double firsts[kMost] = {}, seconds[kMost] = {};
#pragma unroll
    for (int rank = 0; rank < kMost; ++rank) {
      if (rank < cluster) {
        const double* const of = cluster > 1 ? device::cluster_shared(totals, static_cast<unsigned>(rank)) : totals;
        firsts[rank] = of[group];
        seconds[rank] = of[kThreads + group];
      }
    }
#pragma unroll
    for (int rank = 0; rank < kMost; ++rank) first += firsts[rank], second += seconds[rank];
  }
  if (cluster > 1) device::cluster_arrive();
}

}  // namespace warpsmith::group_norm
