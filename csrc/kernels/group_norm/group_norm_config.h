#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>

#include "common/alignment.h"

// How the kernels share out a batch: a pure function of the problem, printable through warpsmith.plan.
namespace warpsmith {

struct GroupNormProblem {
  int64_t samples = 1, pixels = 1, channels = 1, groups = 1;
  int element_bytes = 2, multiprocessors = 132;
  int tensors = 1;                // that are read: x, backward dy too
  int shared_bytes = 227 * 1024;  // a block's limit
};

constexpr int kGroupNormThreads = 256, kGroupNormResident = 2;  // blocks that a multiprocessor holds at once
constexpr int kGroupNormLanes = 128;
constexpr int kGroupNormRows = 4;                 // vectors of a thread that it takes together, of all tensors: a turn
constexpr int kGroupNormAhead = 3;                // turns whose copies to shared memory are in flight, at least
constexpr int kGroupNormSet = 32;                 // blocks that take a range together, at most
constexpr int kGroupNormStaticBytes = 25 * 1024;  // of shared memory, at most

// A set of `set` blocks takes a range of whole groups of one sample, and each block as many of its pixels. `sets` of
// them run at once, and each takes every sets-th range. A block has `lanes` threads along a pixel, each with one vector
// of channels, and threads / lanes pixels side by side. A range of one group with more vectors than kGroupNormLanes
// goes through them in several tiles. A range of several groups has at most as many channels as a block has threads.
struct GroupNormConfig {
  int vector_elems = 1;
  int lanes = 1;
  int set = 1;
  int64_t sets = 1;
  int slots = 1;  // turns that a block keeps in shared memory
  int shared_bytes = 0;
  int64_t ranges = 1;   // of a sample
  int64_t vectors = 1;  // of a range
};

// The cheapest of all widths of ranges and sizes of sets, by the bytes that a block moves one after the other: what it
// reads and writes, in sectors of 32 bytes, twice those that two ranges share; what it reads once more, from the L2
// cache at a third of the price if all that resident blocks reread has a place there; and what it could move while it
// starts and ends, after another kernel that clears the flags of sets, and of each range while it adds up sums and
// waits for its set, less what the slots take of the next range meanwhile. No range takes less than the wait and its
// instructions: 1.5 bytes for one of x forward and 3.5 backward, at 0.7 of the slots of issue. A set has at most
// a block for every fourth multiprocessor: one that is incomplete then leaves places to others, of several streams too.
constexpr GroupNormConfig choose_group_norm(const GroupNormProblem& p) {
  constexpr int64_t kStart = 24 << 10, kSums = 20 << 10, kMeeting = 28 << 10, kKept = 24 << 20;
  const int64_t group = p.channels / p.groups;
  const int whole = 16 / p.element_bytes;
  GroupNormConfig best;
  if (p.channels % whole == 0 && (group % whole == 0 || std::lcm(group, int64_t{whole}) <= kGroupNormThreads))
    best.vector_elems = whole;
  const int64_t vector_bytes = int64_t{best.vector_elems} * p.element_bytes;
  const int64_t unit = std::lcm(group, int64_t{best.vector_elems}) / best.vector_elems;
  const int64_t units = p.channels / best.vector_elems / unit, turn_rows = kGroupNormRows / p.tensors;
  const int64_t turn_bytes = kGroupNormThreads * kGroupNormRows * vector_bytes;
  const int64_t resident = int64_t{kGroupNormResident} * p.multiprocessors;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int set = 1; set <= std::clamp(p.multiprocessors / 4, 1, kGroupNormSet); set *= 2) {
    const int64_t pixels = ceil_div(p.pixels, int64_t{set});
    for (int64_t times = std::max<int64_t>(1, std::min(units, 32 / unit)); times > 0; --times) {
      if (units % times != 0) continue;
      GroupNormConfig c = best;
      c.set = set, c.vectors = unit * times, c.ranges = units / times;
      c.sets = std::min(resident / set, p.samples * c.ranges);
      c.lanes = static_cast<int>(std::min<int64_t>(c.vectors, kGroupNormLanes));
      const int64_t rounds = ceil_div(p.samples * c.ranges, c.sets);
      const int64_t turns = ceil_div(pixels, kGroupNormThreads / c.lanes * turn_rows);
      const int64_t tables = int64_t{c.lanes} * c.vector_elems * 48;
      const int64_t share = (p.shared_bytes + 1024) / kGroupNormResident - 1024 - kGroupNormStaticBytes - tables;
      const int64_t most = rounds > 1 ? 2 * turns : turns;
      c.slots = static_cast<int>(std::min(most, std::max<int64_t>(share / turn_bytes, kGroupNormAhead)));
      c.shared_bytes = static_cast<int>(c.slots * turn_bytes + tables);
      const int64_t bytes = pixels * c.vectors * vector_bytes, row_bytes = c.vectors * vector_bytes;
      const int64_t sectors = c.ranges == 1 ? row_bytes : row_bytes / 32 * 32 + (row_bytes % 32 ? 64 : 0);
      const int64_t kept = c.slots * turn_bytes - p.tensors * bytes;  // less than 0: is read again
      const int64_t again = std::max<int64_t>(0, -kept), wait = kSums + (set > 1 ? kMeeting : 0);
      const int64_t price = c.sets * set * again <= kKept ? again / 3 : again;
      const int64_t memory = (p.tensors + 1) * pixels * sectors + price + wait - std::clamp<int64_t>(kept, 0, wait);
      const int64_t instructions = wait + bytes * (p.tensors == 1 ? 3 : 7) / 2;
      const int64_t cost = kStart * (set > 1 ? 2 : 1) + rounds * std::max(memory, instructions);
      if (cost < least) least = cost, best = c;
    }
  }
  return best;
}

}  // namespace warpsmith
