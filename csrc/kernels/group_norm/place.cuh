#pragma once
#include "device/async_copy.h"
#include "device/cluster.h"
#include "kernels/group_norm/group_norm.h"
#include "tiles/activation_math.cuh"
#include "tiles/pixels.cuh"

// Where a thread works, and how the sums of groups are made of those of threads.
namespace warpsmith::group_norm {

using namespace tiles;

constexpr int kThreads = kGroupNormThreads, kLanes = kGroupNormLanes, kAhead = kGroupNormAhead;

struct Ranges {
  int64_t samples, pixels, block_pixels, vectors, channels, groups,
      group;  // vectors: of a range; group: channels of one
  int lanes, cluster, slots;
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
  // Rows of this thread, and where its first one lies in a tensor, of the vector `v` of the range.
  __device__ __forceinline__ int own_rows(const Ranges& r) const {
    const int64_t left = min(r.block_pixels, r.pixels - rank * r.block_pixels) - row;
    return left > 0 ? static_cast<int>((left - 1) / rows) + 1 : 0;
  }
  __device__ __forceinline__ int64_t vector(const Ranges& r, int64_t stride, int64_t v) const {
    return first(r) * stride + int64_t{range} * r.vectors + v;
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

// The rows of a thread of `kTensors` tensors on their way through slots of its own in shared memory, U rows a turn. The
// first pass leaves the last turns there, and the second, which goes backwards, reads only what was before them once
// more. No thread reads another's slots: nothing waits for a block.
template <class T, int N, int U, int kTensors> struct Turns {
  using V = Packed<T, N>;
  static constexpr int kTurn = kTensors * U * kThreads;
  V* own;                   // this thread's first vector of slot 0
  int slots, rows, turns;   // rows: of this thread
  const V* from[kTensors];  // the next row to copy
  int64_t apart[kTensors];  // rows of this thread, in vectors
  int slot = 0;

  __device__ __forceinline__ Turns(const Place<N>& at, const Ranges& r, unsigned char* shared)
      : own(reinterpret_cast<V*>(shared) + threadIdx.x),
        slots(r.slots),
        rows(at.here ? at.own_rows(r) : 0),
        turns((rows + U - 1) / U) {}
  // From the row `row` of this thread on, in the vector `v` of the range.
  __device__ __forceinline__ void follow(int tensor, const Place<N>& at, const Ranges& r, const void* base,
                                         int64_t stride, int64_t v, int row = 0) {
    apart[tensor] = at.rows * stride;
    from[tensor] = vector_at<T, N>(base, at.vector(r, stride, v)) + row * apart[tensor];
  }
  // The row from which the second pass begins to copy: the last before what the slots have, or the last of all.
  __device__ __forceinline__ int last_row(bool kept) const { return (turns - (kept ? slots : 0)) * U - 1; }
  // Behind all slots.
  __device__ __forceinline__ void* end(unsigned char* shared) const {
    return reinterpret_cast<V*>(shared) + slots * kTurn;
  }

  // Begins the copies of a turn, if there is such a turn; behind the last row lie zeros. kStep: 1, or -1 backwards.
  template <int kStep> __device__ __forceinline__ void fetch(int turn, int to) {
    if (turn >= 0 && turn < turns) {
#pragma unroll
      for (int i = 0; i < kTensors; ++i) {
#pragma unroll
        for (int n = 0; n < U; ++n, from[i] += kStep * apart[i]) {
          const int u = kStep > 0 ? n : U - 1 - n;
          const bool there = turn * U + u < rows;
          V* const place = own + to * kTurn + (i * U + u) * kThreads;
          if constexpr (sizeof(V) >= 4)
            device::copy_async<sizeof(V)>(place, from[i], there);
          else
            device::store(place, there ? device::load(from[i]) : V{});
        }
      }
    }
    device::copy_async_commit();
  }
  __device__ __forceinline__ int after(int s) const { return s + 1 == slots ? 0 : s + 1; }
  __device__ __forceinline__ int before(int s) const { return s == 0 ? slots - 1 : s - 1; }
  __device__ __forceinline__ void load(V (&to)[U], int tensor) const {
#pragma unroll
    for (int u = 0; u < U; ++u) to[u] = device::load(own + slot * kTurn + (tensor * U + u) * kThreads);
  }

  __device__ __forceinline__ void begin() {
#pragma unroll 1
    for (int turn = 0; turn < kAhead; ++turn) fetch<1>(turn, turn);
  }
  // visit(turn) after begin(); `load` then gives what the turn has of a tensor.
  template <class Visit> __device__ __forceinline__ void forwards(const Visit& visit) {
    int to = kAhead == slots ? 0 : kAhead;
    slot = -1;
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn, to = after(to)) {
      device::copy_async_wait<kAhead - 1>();
      slot = after(slot);
      visit(turn);
      fetch<1>(turn + kAhead, to);
    }
    device::copy_async_wait<0>();
  }
  // The last turns once more into their slots.
  __device__ __forceinline__ void begin_backwards() {
    slot = slots - 1;
#pragma unroll 1
    for (int i = 0; i < max(slots, kAhead); ++i) fetch<-1>(i < slots ? turns - 1 - i : -1, slot - i);
  }
  template <class Visit> __device__ __forceinline__ void backwards(const Visit& visit) {
#pragma unroll 1
    for (int turn = turns - 1; turn >= 0; --turn) {
      device::copy_async_wait<kAhead - 1>();
      visit(turn);
      fetch<-1>(turn - slots, slot);
      slot = before(slot);
    }
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

// visit(group, row, c) for items of a group: channel c of its `wide` ones, in each of `rows` rows. Thread (part, group)
// takes every parts-th.
template <class Visit> __device__ __forceinline__ void each_item(int groups, int rows, int wide, const Visit& visit) {
  const int thread = static_cast<int>(threadIdx.x), group = thread % groups, part = thread / groups;
  const int parts = kThreads / groups, rows_on = parts / wide, channels_on = parts % wide;
  for (int row = part < parts ? part / wide : rows, c = part % wide; row < rows;) {
    visit(group, row, c);
    row += rows_on, c += channels_on;
    if (c >= wide) c -= wide, ++row;
  }
}

// Adds what the threads of each_item have put into `totals`, by fours: it then begins with the groups' first sums, and
// its second half with the second ones.
__device__ __forceinline__ void add_parts(double* totals, int groups) {
  const int thread = static_cast<int>(threadIdx.x), part = thread / groups;
  for (int left = kThreads / groups, quarter; left > 1; left = quarter) {
    quarter = (left + 3) / 4;
    __syncthreads();
    if (part >= quarter) continue;
    for (int other = part + quarter, from = thread; other < left; other += quarter) {
      from += quarter * groups;
      totals[thread] += totals[from];
      totals[kThreads + thread] += totals[kThreads + from];
    }
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
