#pragma once
#include "device/async_copy.h"
#include "device/fence.h"
#include "device/programmatic_launch.h"
#include "kernels/group_norm/group_norm.h"
#include "tiles/pixels.cuh"

// Where a thread works, and how the sums of groups are made of those of threads.
namespace warpsmith::group_norm {

using namespace tiles;

constexpr int kThreads = kGroupNormThreads, kLanes = kGroupNormLanes;

// `set` blocks take a range together. `sets` of them run at once, and each takes every sets-th range of the batch.
struct Ranges {
  int64_t count, of_sample;                                        // ranges of the batch; of a sample
  int64_t pixels, block_pixels, vectors, channels, groups, group;  // vectors: of a range; group: channels of one
  int lanes, set, sets, slots;
  double* sums;  // [sets, kept, set, 2, groups of a range]: what the blocks of a set tell each other
  int* flags;    // 0 when the kernel starts: blocks that have begun; [sets, set]: ranges whose sums a block has written
  int kept;      // of two ranges: a block may be one ahead of those that still read its sums of the one before
};

// The number of this block. Blocks that wait for each other are numbered in the order in which they begin. So all sets
// but the last are complete, and end: the last one then finds places, wherever as many blocks as it has fit at once.
__device__ __forceinline__ unsigned block_number(const Ranges& r, unsigned* shared) {
  if (r.set == 1) return blockIdx.x;
  device::wait_for_previous_kernel();  // which has cleared the flags
  if (threadIdx.x == 0) device::store(shared, static_cast<unsigned>(atomicAdd(r.flags, 1)));
  __syncthreads();
  return device::load(shared);
}

// A block's set, and its rank there; a thread's lane, and its pixel side by side with others; the range at hand.
// Neighbouring ranges run together: they share sectors of 32 bytes.
template <int N> struct Place {
  int set, rank, lane, row, rows;  // rows: side by side
  bool here;
  int64_t number, sample = 0;  // number: of the range, of all
  int range = 0, round = 1;    // range: of the sample; round: how many ranges this block has had with it

  __device__ __forceinline__ Place(const Ranges& r, unsigned block)
      : set(static_cast<int>(block / static_cast<unsigned>(r.set))),
        rank(static_cast<int>(block % static_cast<unsigned>(r.set))),
        lane(static_cast<int>(threadIdx.x) % r.lanes),
        row(static_cast<int>(threadIdx.x) / r.lanes),
        rows(kThreads / r.lanes),
        here(row < rows) {
    go_to(r, set);
  }
  __device__ __forceinline__ void go_to(const Ranges& r, int64_t to) {
    number = to;
    sample = to / r.of_sample;
    range = static_cast<int>(to % r.of_sample);
  }
  __device__ __forceinline__ bool exists(const Ranges& r) const { return number < r.count; }
  __device__ __forceinline__ Place next(const Ranges& r) const {
    Place place = *this;
    place.go_to(r, number + r.sets);
    ++place.round;
    return place;
  }
  // The first pixel of this thread, counted over all samples.
  __device__ __forceinline__ int64_t first(const Ranges& r) const {
    return sample * r.pixels + rank * r.block_pixels + row;
  }
  // Rows of this thread, the same in every range, and where its first one lies in a tensor, of the vector `v` of the
  // range.
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
// more. Slots that become free take the first turns of what the block reads next, from the other end: so each range
// goes through the slots in the direction opposite to that of the one before. No thread reads another's slots: nothing
// waits for a block.
template <class T, int N, int U, int kTensors> struct Turns {
  using V = Packed<T, N>;
  static constexpr int kTurn = kTensors * U * kThreads;
  V* own;                   // this thread's first vector of slot 0
  int slots, rows, turns;   // rows: of this thread
  const V* from[kTensors];  // the next row to copy
  int64_t apart[kTensors];  // rows of this thread, in vectors
  int slot = 0, step = -1;  // step: to the slot of the next turn

  // strides: of the tensors, in vectors.
  __device__ __forceinline__ Turns(const Place<N>& at, const Ranges& r, unsigned char* shared,
                                   const int64_t (&strides)[kTensors])
      : own(reinterpret_cast<V*>(shared) + threadIdx.x),
        slots(r.slots),
        rows(at.here ? at.own_rows(r) : 0),
        turns((rows + U - 1) / U) {
#pragma unroll
    for (int i = 0; i < kTensors; ++i) apart[i] = at.rows * strides[i];
  }
  // From the row `row` of this thread on, in the vector `v` of the range.
  __device__ __forceinline__ void follow(int tensor, const Place<N>& at, const Ranges& r, const void* base,
                                         int64_t stride, int64_t v, int row = 0) {
    from[tensor] = vector_at<T, N>(base, at.vector(r, stride, v)) + row * apart[tensor];
  }
  // The row from which the second pass begins to copy: the last before what the slots have, or the last of all.
  __device__ __forceinline__ int last_row(bool kept) const { return (turns - (kept ? slots : 0)) * U - 1; }
  // Behind all slots.
  __device__ __forceinline__ void* end(unsigned char* shared) const {
    return reinterpret_cast<V*>(shared) + slots * kTurn;
  }

  // Begins the copies of a turn, if it is one of `turns`; behind the last row lie zeros. kStep: 1, or -1 backwards.
  template <int kStep> __device__ __forceinline__ void fetch(int turn, int turns, int to) {
    if (turn >= 0 && turn < turns) {
      const int left = rows - turn * U;
#pragma unroll
      for (int i = 0; i < kTensors; ++i) {
#pragma unroll
        for (int n = 0; n < U; ++n, from[i] += kStep * apart[i]) {
          const int u = kStep > 0 ? n : U - 1 - n;
          V* const place = own + to * kTurn + (i * U + u) * kThreads;
          if constexpr (sizeof(V) >= 4)
            device::copy_async<sizeof(V)>(place, from[i], u < left);
          else
            device::store(place, u < left ? device::load(from[i]) : V{});
        }
      }
    }
    device::copy_async_commit();
  }
  // For the oldest of `slots` turns, or for more of them.
  __device__ __forceinline__ void wait() const {
    if (slots > 4)
      device::copy_async_wait<4>();
    else if (slots > 1)
      device::copy_async_wait<1>();
    else
      device::copy_async_wait<0>();
  }
  __device__ __forceinline__ int beside(int s, int step) const {
    return s + step == slots ? 0 : s + step < 0 ? slots - 1 : s + step;
  }
  __device__ __forceinline__ void load(V (&to)[U], int tensor) const {
#pragma unroll
    for (int u = 0; u < U; ++u) to[u] = device::load(own + slot * kTurn + (tensor * U + u) * kThreads);
  }

  // Begins the first copies of what comes next, `turns` turns, into the slots that have none of the last `kept` turns.
  __device__ __forceinline__ void begin(int kept, int turns) {
#pragma unroll 1
    for (int turn = 0; turn < slots - kept; ++turn) fetch<1>(turn, turns, step > 0 ? slots - 1 - turn : turn);
  }
  // What was begun is at hand now.
  __device__ __forceinline__ void turn_round() { step = -step; }
  // visit(turn); `load` then gives what the turn has of a tensor.
  template <class Visit> __device__ __forceinline__ void forwards(const Visit& visit) {
    slot = step > 0 ? 0 : slots - 1;
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
      wait();
      visit(turn);
      fetch<1>(turn + slots, turns, slot);
      slot = beside(slot, step);
    }
    slot = beside(slot, -step);
  }
  // The last turns once more into slots, where no slot has any.
  __device__ __forceinline__ void begin_backwards() {
#pragma unroll 1
    for (int turn = turns - 1; turn >= turns - slots; --turn, slot = beside(slot, -step)) fetch<-1>(turn, turns, slot);
  }
  // `ahead`: turns of what comes next; next() follows it.
  template <class Visit, class Next>
  __device__ __forceinline__ void backwards(int ahead, const Visit& visit, const Next& next) {
#pragma unroll 1
    for (int turn = turns - 1; turn >= 0; --turn) {
      wait();
      visit(turn);
      if (turn >= slots) {
        fetch<-1>(turn - slots, turns, slot);
      } else {
        if (turn == slots - 1) next();
        fetch<1>(slots - 1 - turn, ahead, slot);
      }
      slot = beside(slot, -step);
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

// Adds the totals of the blocks of a set, two of each group of a range, in the order of ranks: in `totals` of every
// block lie its own. Each of the first `groups` threads gets those of one group. While those of the others are on their
// way, meanwhile() is called; the block then meets, so that all of it sees what that has written to shared memory.
template <int N, class Meanwhile>
__device__ __forceinline__ void totals_of_set(const Ranges& r, const Place<N>& at, const double* totals, int groups,
                                              double& first, double& second, const Meanwhile& meanwhile) {
  constexpr int kTogether = 8;  // ranks whose loads are in flight
  const int thread = static_cast<int>(threadIdx.x);
  __syncthreads();
  first = second = 0;
  if (r.set == 1) {
    if (thread < groups) first = totals[thread], second = totals[kThreads + thread];
    meanwhile();
    __syncthreads();
    return;
  }
  int* const flags = r.flags + 1 + at.set * r.set;
  double* const sums = r.sums + (int64_t{at.set} * r.kept + at.round % r.kept) * r.set * 2 * groups;
  if (thread < groups) {
    double* const own = sums + at.rank * 2 * groups + thread;
    device::store(own, totals[thread]);
    device::store(own + groups, totals[kThreads + thread]);
  }
  __syncthreads();
  if (thread == 0) device::store_release(flags + at.rank, at.round);
  meanwhile();
  if (thread < r.set)
    while (device::load_acquire(flags + thread) < at.round) {}
  __syncthreads();
  if (thread >= groups) return;
#pragma unroll 1
  for (int before = 0; before < r.set; before += kTogether) {
    double firsts[kTogether] = {}, seconds[kTogether] = {};
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (const int rank = before + i; rank < r.set) {
        const double* const of = sums + rank * 2 * groups + thread;
        firsts[i] = device::load(of);
        seconds[i] = device::load(of + groups);
      }
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) first += firsts[i], second += seconds[i];
  }
}

}  // namespace warpsmith::group_norm
