#pragma once
#include <cstdint>

#include "device/cluster.h"
#include "device/fast_divide.h"
#include "kernels/cross_entropy/cross_entropy_config.h"
#include "kernels/cross_entropy/sums.cuh"

// The threads that share a row: who has which vectors, and how they find its maximum and sums.
namespace warpsmith::cross_entropy {

// How forward_resident spreads rows, with what does not change from row to row.
struct Schedule {
  int lanes;
  int part;   // vectors of a row that a block of a cluster has
  bool bulk;  // a row, or its part, comes by one bulk copy
  device::FastDivide by_lanes;

  explicit Schedule(const CrossEntropyConfig& c)
      : lanes(c.lanes), part(static_cast<int>(c.part)), bulk(c.bulk), by_lanes(c.lanes) {}
};

// The threads of a row: `lanes` of a warp, or the blocks of a cluster. Vector begin + i of a row belongs to the thread
// whose lane is i % size of the block that has begin.
template <bool kBlock> struct Team {
  int lane, size;
  int cluster, rank;
  int begin, most;    // the vectors of this block
  int64_t row, step;  // the first row, and how far to the next
  int64_t unit;       // row without the place inside a warp: the same for all lanes, which stay together

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
  // Of a row's vectors, those of this block.
  __device__ __forceinline__ int count(int vectors) const { return min(max(vectors - begin, 0), most); }
  __device__ __forceinline__ bool owns(int vector, const device::FastDivide& by_lanes) const {
    const int i = vector - begin;
    return static_cast<unsigned>(i) < static_cast<unsigned>(most) &&
           i - static_cast<int>(by_lanes.quotient(i)) * size == lane;
  }
  // The place of a vector among those of the thread that owns it.
  __device__ __forceinline__ int slot_of(int vector, const device::FastDivide& by_lanes) const {
    return static_cast<int>(by_lanes.quotient(max(vector - begin, 0)));
  }
};

// What the warps of a row exchange. Two sets, in turn, so that nobody overwrites what another still reads. In a cluster
// each warp sends its sums to every block, which waits until it has those of all.
// No shuffle has to order memory: between rows of a cluster, which come by bulk copies, all threads meet at a barrier.
struct Exchange {
  static constexpr int kMaxWarps = 32;  // of a cluster
  using Slot = Packed[2];
  Slot* warps;               // [2][kMaxWarps]
  device::Mbarrier* filled;  // [2]
  int turn;
  unsigned parity;
  bool met;  // all blocks of the cluster have started

  // kShared: the warp has one x.m already, and x.at only where that is.
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
