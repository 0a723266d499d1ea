#pragma once
#include <cstdint>

#include "device/async_copy.h"
#include "device/bulk_copy.h"
#include "device/cluster.h"
#include "tiles/row_vectors.cuh"

// The threads that share a row: which vectors each holds, and how they find the row's sums.
namespace warpsmith::tiles {

// The threads of a row: `lanes` threads of a warp, a block, or the blocks of a cluster. Vector begin + i of a row
// belongs to lane i % size of the block with that begin.
template <bool kBlock> struct Team {
  int lane, size;
  int cluster, rank;
  int begin, most;    // this block's vectors
  int64_t row, step;  // the first row, and the distance to the next
  int64_t unit;       // the first lane's row: the same in all lanes of a warp, which stay together

  // part: vectors of a row per block of the cluster
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
};

// Copies this block's part of the first `vectors` vectors of a row to shared memory: each thread's next vector lies
// blockDim.x behind the last, from its `stage` on. With `bulk` whole vectors come by one bulk copy, which `arrived`
// counts; else by asynchronous copies, one group of them. The others are written by ordinary stores, as Row::load gives
// them.
template <class T, bool kBlock>
__device__ __forceinline__ void request_row(const Row<T>& row, const Team<kBlock>& team, int vectors, Packed* stage,
                                            bool bulk, device::Mbarrier* arrived, float outside = kMinusInfinity) {
  const int count = team.count(vectors), slot_step = static_cast<int>(blockDim.x);
  const int first = max(row.first_whole() - team.begin, 0), end = min(row.end_whole() - team.begin, count);
  const Packed* from = reinterpret_cast<const Packed*>(row.base - row.phase) + team.begin;
  if (bulk && threadIdx.x == 0) {
    const int bytes = max(end - first, 0) * 16;
    device::mbarrier_arrive_expect(arrived, bytes);
    if (bytes > 0) device::bulk_load(stage + first, from + first, bytes, arrived);
  }
  if (bulk && first == 0 && end == count) return;
  for (int i = team.lane; i < count; i += team.size, stage += slot_step) {
    if (i < first || i >= end)
      *stage = row.load(team.begin + i, outside);
    else if (!bulk)
      device::copy_async<16>(stage, from + i);
  }
  if (!bulk) device::copy_async_commit();
}

// The exchange of sums between the warps of a row. Double-buffered, so that no warp overwrites what another still
// reads. In a cluster each warp sends its sums to every block, and every block waits for the sums of all warps. No
// shuffle needs to order memory: between a cluster's rows, which arrive by bulk copies, all threads meet at a barrier.
//
// `How` says what the sums are:
//   Sums, none()                        their type; those of no elements
//   kPieces, piece(x, i), take(x, i, y) their pieces of 16 bytes
//   combine<kShared>(x, lanes)          adds those of groups of lanes; kShared: as over_row is given them
struct Exchange {
  static constexpr int kMaxWarps = 32;  // per cluster
  using Slot = Packed[2];
  Slot* warps;               // [2][kMaxWarps]
  device::Mbarrier* filled;  // [2]
  int turn;
  unsigned parity;
  bool met;  // all blocks of the cluster have started

  template <bool kShared, bool kBlock, class How>
  __device__ __forceinline__ typename How::Sums over_row(typename How::Sums x, const Team<kBlock>& team,
                                                         const How& how) {
    x = how.template combine<kShared>(x, kBlock ? 32 : team.size);
    if constexpr (!kBlock) return x.whole();
    constexpr int kPieces = How::kPieces;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps_of_block = blockDim.x / 32;
    const int all = warps_of_block * team.cluster;
    Slot* set = warps + turn * kMaxWarps;
    if (team.cluster == 1) {
      if (lane == 0)
#pragma unroll
        for (int i = 0; i < kPieces; ++i) device::store(set[warp] + i, How::piece(x, i));
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
          device::store_async(device::cluster_shared(set[team.rank * warps_of_block + warp] + i, to), How::piece(x, i),
                              barrier);
      }
      device::mbarrier_wait(filled + turn, parity);
      if (turn) parity ^= 1;
    }
    turn ^= 1;
    x = How::none();
    if (lane < all)
#pragma unroll
      for (int i = 0; i < kPieces; ++i) How::take(x, i, device::load(set[lane] + i));
    return how.template combine<false>(x, 32).whole();
  }
};

}  // namespace warpsmith::tiles
