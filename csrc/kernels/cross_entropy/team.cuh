#pragma once
#include <cstdint>

#include "device/fast_divide.h"
#include "kernels/cross_entropy/cross_entropy_config.h"
#include "kernels/cross_entropy/sums.cuh"
#include "tiles/row_team.cuh"

// The threads that share a row, and where they find one of its vectors.
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

template <bool kBlock> struct Team : tiles::Team<kBlock> {
  using tiles::Team<kBlock>::Team, tiles::Team<kBlock>::begin, tiles::Team<kBlock>::most;

  __device__ __forceinline__ bool owns(int vector, const device::FastDivide& by_lanes) const {
    const int i = vector - begin;
    return static_cast<unsigned>(i) < static_cast<unsigned>(most) &&
           i - static_cast<int>(by_lanes.quotient(i)) * this->size == this->lane;
  }
  // Index of a vector among its owner's vectors.
  __device__ __forceinline__ int slot_of(int vector, const device::FastDivide& by_lanes) const {
    return static_cast<int>(by_lanes.quotient(max(vector - begin, 0)));
  }
};

}  // namespace warpsmith::cross_entropy
