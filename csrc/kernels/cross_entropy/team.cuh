#pragma once
#include <cstdint>

#include "device/cluster.h"
#include "device/fast_divide.h"
#include "kernels/cross_entropy/cross_entropy_config.h"
#include "kernels/cross_entropy/sums.cuh"

// The threads that share a row: which vectors each holds, and how they find the row's maximum and sums.
namespace warpsmith::cross_entropy {

// How forward_resident distributes rows; the same for every row.
struct Schedule {
  int lanes;
  int part;   // vectors of a row per block of the cluster
  bool bulk;  // a row, or a block's part of it, arrives by one bulk copy
  device::FastDivide by_lanes;

  explicit Schedule(const CrossEntropyConfig& c)
      : lanes(c.lanes), part(static_cast<int>(c.part)), bulk(c.bulk), by_lanes(c.lanes) {}
};

// The threads of a row: `lanes` threads of a warp, a block, or the blocks of a cluster. Vector begin + i of a row
// belongs to lane i % size of the block with that begin.
template <bool kBlock> struct Team {
  int lane, size;
  int cluster, rank;
  int begin, most;    // this block's vectors
  int64_t row, step;  // the first row, and the distance to the next
  int64_t unit;       // the first lane's row: the same in all lanes of a warp, which stay together

  __device__ __forceinline__ Team(int lanes, int part) : begin(0), most(part) {
    cluster = kBlock ? static_cast<int>(device::cluster_size()) : 1;
    rank = kBlock ? static_cast<int>(device::cluster_rank()) : 0;
    begin = rank * part;
    const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
    lane = kBlock ? thread : thread % lanes;
    size = kBlock ? threads : lanes;
    const int side_by_side = kBlock ? 1 : 32 / lanes, units = kBlock ? 1 : threads / 32;
    unit = (int64_t{blockIdx.x} / cluster * units + (kBlock ? 0 : thread / 32)) * side_by_side;
    row = unit + (kBlock ? 0 : thread % 32 / lanes);
    step = int64_t{gridDim.x} / cluster * units * side_by_side;
  }
  __device__ __forceinline__ void next() { row += step, unit += step; }
  // How many of a row's vectors belong to this block.
  __device__ __forceinline__ int count(int vectors) const { return min(max(vectors - begin, 0), most); }
  __device__ __forceinline__ bool owns(int vector, const device::FastDivide& by_lanes) const {
    const int i = vector - begin;
    return static_cast<unsigned>(i) < static_cast<unsigned>(most) &&
           i - static_cast<int>(by_lanes.quotient(i)) * size == lane;
  }
  // Index of a vector among its owner's vectors.
  __device__ __forceinline__ int slot_of(int vector, const device::FastDivide& by_lanes) const {
    return static_cast<int>(by_lanes.quotient(max(vector - begin, 0)));
  }
};

// The exchange of sums between the warps of a row. Double-buffered, so that no warp overwrites what another still
// reads. In a cluster each warp sends its sums to every block, and every block waits for the sums of all warps. No
// shuffle needs to order memory: between a cluster's rows, which arrive by bulk copies, all threads meet at a barrier.
struct Exchange {
  static constexpr int kMaxWarps = 32;  // per cluster
  using Slot = Packed[2];
  Slot* warps;               // [2][kMaxWarps]
  device::Mbarrier* filled;  // [2]
  int turn;
  unsigned parity;
  bool met;  // all blocks of the cluster have started

  // kShared: x.m is already the same in the whole warp, and x.at is set only in the lane that holds it.
  template <class T, bool kBlock, Terms kTerms, bool kShared>
  __device__ __forceinline__ Sums over_row(Sums x, const Team<kBlock>& team, bool places) {
    x = combine<T, kTerms, kShared>(x, kBlock ? 32 : team.size, places);
    if constexpr (!kBlock) return x.whole();
    constexpr int kPieces = Sums::kPieces<T, kTerms>;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps_of_block = blockDim.x / 32;
    const int all = warps_of_block * team.cluster;
    Slot* set = warps + turn * kMaxWarps;
    if (team.cluster == 1) {
      if (lane == 0)
#pragma unroll
        for (int i = 0; i < kPieces; ++i) device::store(set[warp] + i, x.piece<T, kTerms>(i));
      __syncthreads();
    } else {
      if (!met) device::cluster_wait();
      met = true;
      if (threadIdx.x == 0) device::mbarrier_arrive_expect(filled + turn, all * kPieces * 16);
      if (lane < team.cluster) {
        const unsigned to = static_cast<unsigned>(lane);
        device::Mbarrier* barrier = device::cluster_shared(filled + turn, to);
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
          device::store_async(device::cluster_shared(set[team.rank * warps_of_block + warp] + i, to),
                              x.piece<T, kTerms>(i), barrier);
      }
      device::mbarrier_wait(filled + turn, parity);
      if (turn) parity ^= 1;
    }
    turn ^= 1;
    x = no_elements();
    if (lane < all)
#pragma unroll
      for (int i = 0; i < kPieces; ++i) x.take<T, kTerms>(i, device::load(set[lane] + i));
    return combine<T, kTerms, false>(x, 32, places).whole();
  }
};

}  // namespace warpsmith::cross_entropy
