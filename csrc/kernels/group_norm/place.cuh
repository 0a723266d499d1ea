#pragma once
#include "device/cluster.h"
#include "kernels/group_norm/group_norm.h"
#include "tiles/activation_math.cuh"
#include "tiles/pixels.cuh"

// Where a thread works, and how the sums of groups are made of those of threads.
namespace warpsmith::group_norm {

using namespace tiles;

constexpr int kThreads = kGroupNormThreads;

struct Ranges {
  int64_t samples, pixels, vectors, channels, groups, group;  // vectors: of a range; group: channels of one
  int lanes, cluster;
};

// A block's range of a sample and pixels of it; a thread's lane, and its pixel side by side with others. Neighbouring
// ranges run together: they share sectors of 32 bytes.
template <int N> struct Place {
  int64_t sample, begin, end;        // pixels of this block
  int range, rank, lane, row, rows;  // rows: side by side
  bool here;

  __device__ __forceinline__ explicit Place(const Ranges& r)
      : sample(int64_t{blockIdx.z} * gridDim.y + blockIdx.y),
        begin(0),
        end(0),
        range(static_cast<int>(blockIdx.x) / r.cluster),
        rank(static_cast<int>(blockIdx.x) % r.cluster),
        lane(static_cast<int>(threadIdx.x) % r.lanes),
        row(static_cast<int>(threadIdx.x) / r.lanes),
        rows(kThreads / r.lanes),
        here(row < rows) {
    const int64_t each = (r.pixels + r.cluster - 1) / r.cluster;
    begin = min(rank * each, r.pixels);
    end = min(begin + each, r.pixels);
  }
  // The rows of this thread of a tensor, of the vector `v` of the range.
  template <class T> __device__ __forceinline__ Rows<T, N> rows_of(const void* base, int64_t stride, const Ranges& r,
                                                                   int64_t v, int turn) const {
    const int64_t first = begin + row;
    return {vector_at<T, N>(base, (sample * r.pixels + first) * stride + int64_t{range} * r.vectors + v), stride,
            end - first, int64_t{turn} * rows, rows};
  }
  __device__ __forceinline__ int64_t channel(const Ranges& r, int64_t v) const { return (range * r.vectors + v) * N; }
  // Groups of a range, 1 where a group is all of it; the first one of this range in its sample; that of a channel.
  __device__ __forceinline__ int groups(const Ranges& r) const {
    return r.vectors > kThreads ? 1 : static_cast<int>(r.vectors) * N / static_cast<int>(r.group);
  }
  __device__ __forceinline__ int64_t first_group(const Ranges& r) const {
    return sample * r.groups + int64_t{range} * groups(r);
  }
  __device__ __forceinline__ int group_of(const Ranges& r, int64_t v, int k) const {
    return r.vectors > kThreads ? 0 : (static_cast<int>(v) * N + k) / static_cast<int>(r.group);
  }
};

// Adds the totals of the blocks of a cluster, two of each group of a range, in the order of ranks: in `totals` of every
// block lie its own. Each of the first `groups` threads gets those of one group. The caller ends with cluster_wait().
__device__ __forceinline__ void totals_of_cluster(double* totals, int groups, int cluster, double& first,
                                                  double& second) {
  first = second = 0;
  if (cluster > 1)
    device::cluster_barrier();
  else
    __syncthreads();
  const int group = static_cast<int>(threadIdx.x);
  if (group < groups) {
    for (int rank = 0; rank < cluster; ++rank) {
      const double* const of = cluster > 1 ? device::cluster_shared(totals, static_cast<unsigned>(rank)) : totals;
      first += of[group];
      second += of[kThreads + group];
    }
  }
  if (cluster > 1) device::cluster_arrive();
}

}  // namespace warpsmith::group_norm
