#pragma once
#include "device/programmatic_launch.h"
#include "kernels/group_norm/group_norm.h"
#include "tiles/row_ring.cuh"

// Where a thread works, and how the sums of groups are made of those of threads and of blocks.
namespace warpsmith::group_norm {

using namespace tiles;

constexpr int kThreads = kGroupNormThreads;
static_assert(kThreads == kRingThreads);

// Two sums of a group over the rows of a block.
struct alignas(16) Sums {
  double first, second;
};

// GroupNormConfig for kernels.
struct Ranges {
  int64_t pixels, block_pixels, channels, groups;  // groups: of a sample
  int64_t vectors, group;                          // vectors: of a range; group: channels of one
  Sums* sums;                                      // [samples, set, tiles, groups]
  unsigned count, set, tiles;                      // count: of a sample
  int lanes, rows_together, range_groups, parts;   // parts: threads of a group
};

// A thread's vector of channels, and its rows: `first`, and each rows_together-th before `end`, of all samples' pixels.
template <int N> struct Place {
  int64_t sample, vector, first, end;
  int range, rank, tile, lane, row, rows_together, lanes;  // lanes: with a vector
  bool here;

  __device__ __forceinline__ explicit Place(const Ranges& r)
      : lane(static_cast<int>(threadIdx.x % static_cast<unsigned>(r.lanes))),
        row(static_cast<int>(threadIdx.x / static_cast<unsigned>(r.lanes))),
        rows_together(r.rows_together) {
    unsigned left = blockIdx.x / r.tiles;
    tile = static_cast<int>(blockIdx.x % r.tiles);
    range = static_cast<int>(left % r.count);
    left /= r.count;
    rank = static_cast<int>(left % r.set);
    sample = left / r.set;
    lanes = static_cast<int>(min(int64_t{r.lanes}, r.vectors - int64_t{tile} * r.lanes));
    vector = range * r.vectors + int64_t{tile} * r.lanes + lane;
    first = sample * r.pixels + rank * r.block_pixels + row;
    end = min(sample * r.pixels + (rank + 1) * r.block_pixels, (sample + 1) * r.pixels);
    here = row < rows_together && lane < lanes;
  }
  __device__ __forceinline__ int64_t first_channel(const Ranges& r) const {
    return (range * r.vectors + int64_t{tile} * r.lanes) * N;
  }
  // Of this thread's vector, or of one that exists.
  __device__ __forceinline__ int64_t own_channel() const { return here ? vector * N : 0; }
  __device__ __forceinline__ int64_t first_group(const Ranges& r) const { return int64_t{range} * r.range_groups; }
  __device__ __forceinline__ int rows() const {
    return here && first < end
               ? static_cast<int>(static_cast<unsigned>(end - first - 1) / static_cast<unsigned>(rows_together)) + 1
               : 0;
  }
  // visit(k, group): the group of the range in which channel k of this thread's vector lies.
  template <class Visit> __device__ __forceinline__ void each_group(const Ranges& r, const Visit& visit) const {
    int group = 0, before = 0;  // channels of the group before k
    if (r.tiles == 1) group = lane * N / static_cast<int>(r.group), before = lane * N % static_cast<int>(r.group);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      visit(k, group);
      if (++before == r.group && r.tiles == 1) before = 0, ++group;
    }
  }
};

// A thread's rows of some tensors on their way through a ring, U in a turn. kStep: 1, or -1: from the last turn to the
// first, where the L2 cache still holds what a pass before has read last.
template <class T, int N, int kTensors, int U, int kStep, device::Cache cache> struct Rows {
  using V = Packed<T, N>;
  RowRing<T, N, kTensors, U, cache> ring;
  int rows, turns, ahead;  // ahead: the turn to copy next
  const V* from[kTensors];
  int64_t apart[kTensors];  // in vectors

  // Begins the first copies.
  __device__ __forceinline__ Rows(unsigned char* memory, const Place<N>& at, const void* const (&bases)[kTensors],
                                  const int64_t (&strides)[kTensors])
      : ring(memory), rows(at.rows()), turns((rows + U - 1) / U), ahead(kStep > 0 ? 0 : turns - 1) {
#pragma unroll
    for (int i = 0; i < kTensors; ++i) {
      apart[i] = at.rows_together * strides[i];
      from[i] = vector_at<T, N>(bases[i], at.first * strides[i] + at.vector) + ahead * U * apart[i];
    }
#pragma unroll 1
    for (int stage = 0; stage < ring.kStages; ++stage) copy();
  }
  __device__ __forceinline__ void copy() {
    if (ahead >= 0 && ahead < turns) {
      const int left = rows - ahead * U;
#pragma unroll
      for (int i = 0; i < kTensors; ++i) {
#pragma unroll
        for (int u = 0; u < U; ++u) ring.copy_row(i, u, from[i] + u * apart[i], u < left);
        from[i] += kStep * U * apart[i];
      }
    }
    ring.copied();
    ahead += kStep;
  }
  // visit(left) for each turn, of which `left` rows are there; behind the last row lie zeros.
  template <class Visit> __device__ __forceinline__ void each_turn(const Visit& visit) {
#pragma unroll 1
    for (int n = 0, turn = ahead + kStep * -ring.kStages; n < turns; ++n, turn += kStep) {
      ring.wait();
      visit(rows - turn * U);
      copy();
    }
  }
};

// A thread's rows of a tensor that is written from the last turn to the first.
template <class T, int N, int U> struct RowsToWrite {
  Packed<T, N>* to;
  int64_t apart;
  __device__ __forceinline__ RowsToWrite(void* base, const Ranges& r, const Place<N>& at, int turns) {
    const int64_t vectors = r.channels / N;
    apart = at.rows_together * vectors;
    to = vector_at<T, N>(base, at.first * vectors + at.vector) + (turns - 1) * U * apart;
  }
  // The store does not push out of the L2 cache what is still to be read.
  __device__ __forceinline__ void store(int u, const float* values) const {
    float row[N];
#pragma unroll
    for (int k = 0; k < N; ++k) row[k] = values[k];
    device::store<device::Cache::streaming>(to + u * apart, device::rounded<T>(row));
  }
  __device__ __forceinline__ void next_turn() { to -= U * apart; }
};

// Parameters of a thread's channels, which a dtype known at run time tells apart once.
template <int N> __device__ __forceinline__ void load_channels(float (&to)[N], const void* base, Dtype dtype,
                                                               int64_t channel, float otherwise) {
  const auto load = [&]<class W>(const W* from) {
#pragma unroll
    for (int k = 0; k < N; ++k) to[k] = device::to_float(device::load(from + channel + k));
  };
  if (!base) {
#pragma unroll
    for (int k = 0; k < N; ++k) to[k] = otherwise;
  } else if (dtype == Dtype::float32) {
    load(static_cast<const float*>(base));
  } else if (dtype == Dtype::float16) {
    load(static_cast<const float16*>(base));
  } else {
    load(static_cast<const bfloat16*>(base));
  }
}

// Shared memory, by element of a vector first, so that the lanes of a warp do not meet in a bank.
constexpr int kApart = kThreads + 4;
__device__ __forceinline__ int of_thread(int k, int thread) { return k * kApart + thread; }

// How the threads share the groups of a range: thread (part, group) takes every parts-th item of its group.
struct Parts {
  int groups, group, part, parts;
  __device__ __forceinline__ explicit Parts(const Ranges& r)
      : groups(r.range_groups),
        group(static_cast<int>(threadIdx.x % static_cast<unsigned>(groups))),
        part(static_cast<int>(threadIdx.x / static_cast<unsigned>(groups))),
        parts(r.parts) {}

  // visit(row, i) for items of this thread's group: the i-th of its `wide` ones, in each of `rows` rows.
  template <class Visit> __device__ __forceinline__ void each_item(int rows, int wide, const Visit& visit) const {
    const int rows_on = parts / wide, items_on = parts % wide;
    for (int row = part < parts ? part / wide : rows, i = part % wide; row < rows;) {
      visit(row, i);
      row += rows_on, i += items_on;
      if (i >= wide) i -= wide, ++row;
    }
  }

  // The sums over the parts of each group, in the first `groups` threads.
  __device__ __forceinline__ Sums add(Sums* totals, const Sums& own) const {
    const int thread = static_cast<int>(threadIdx.x);
    Sums sums = own;
    totals[thread] = own;
    for (int left = parts, quarter; left > 1; left = quarter) {
      quarter = (left + 3) / 4;
      __syncthreads();
      if (part >= quarter) continue;
      for (int other = part + quarter, from = thread; other < left; other += quarter) {
        from += quarter * groups;
        sums.first += totals[from].first;
        sums.second += totals[from].second;
      }
      totals[thread] = sums;
    }
    return sums;
  }

  // The sums of the range's groups over all of its blocks, in the order of blocks: the same bits in each of them. Each
  // of the first threads gets those of one group.
  template <int N> __device__ __forceinline__ Sums merged(const Ranges& r, const Place<N>& at, Sums* totals) const {
    const int blocks = static_cast<int>(r.set * r.tiles);
    const Sums* const from = r.sums + at.sample * blocks * r.groups + at.first_group(r) + group;
    Sums sums{};
#pragma unroll 4
    for (int block = part < parts ? part : blocks; block < blocks; block += parts) {
      const Sums of_block = device::load(from + block * r.groups);
      sums.first += of_block.first;
      sums.second += of_block.second;
    }
    return add(totals, sums);
  }
};

// Stores the block's sums of its groups.
template <int N> __device__ __forceinline__ void store_sums(const Ranges& r, const Place<N>& at, const Sums& of_group) {
  if (static_cast<int>(threadIdx.x) >= r.range_groups) return;
  const int64_t block = (at.sample * r.set + at.rank) * r.tiles + at.tile;
  device::store(r.sums + block * r.groups + at.first_group(r) + threadIdx.x, of_group);
}

}  // namespace warpsmith::group_norm
