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
  bool clusters = true;           // the code that runs has them
  int tensors = 1;                // that are read: x, backward dy too
  int shared_bytes = 227 * 1024;  // a block's limit
};

constexpr int kGroupNormThreads = 256, kGroupNormResident = 2;  // blocks that a multiprocessor holds at once
constexpr int kGroupNormLanes = 128;
constexpr int kGroupNormRows = 4;                 // vectors of a thread that it takes together, of all tensors: a turn
constexpr int kGroupNormAhead = 3;                // turns whose copies to shared memory are in flight
constexpr int kGroupNormStaticBytes = 25 * 1024;  // of shared memory, at most

// A cluster of `cluster` blocks takes a range of whole groups of one sample, and each block as many of its pixels. A
// block has `lanes` threads along a pixel, each with one vector of channels, and threads / lanes pixels side by side. A
// range of one group with more vectors than kGroupNormLanes goes through them in several tiles. A range of several
// groups has at most as many channels as a block has threads.
struct GroupNormConfig {
  int vector_elems = 1;
  int lanes = 1;
  int cluster = 1;
  int slots = 1;  // turns that a block keeps in shared memory
  int shared_bytes = 0;
  int64_t ranges = 1;   // of a sample
  int64_t vectors = 1;  // of a range
};

// The cheapest of all widths of ranges and sizes of clusters, by the bytes that a block moves one after the other: what
// it reads and writes, in sectors of 32 bytes; what it reads once more, from the L2 cache at a third of the price if
// all that resident blocks reread has a place there; and what it could move while it starts, waits for its cluster and
// ends.
constexpr GroupNormConfig choose_group_norm(const GroupNormProblem& p) {
  constexpr int64_t kStart = 48 << 10, kKept = 24 << 20;
  const int64_t group = p.channels / p.groups;
  const int whole = 16 / p.element_bytes;
  GroupNormConfig best;
  if (p.channels % whole == 0 && (group % whole == 0 || std::lcm(group, int64_t{whole}) <= kGroupNormThreads))
    best.vector_elems = whole;
  const int64_t vector_bytes = int64_t{best.vector_elems} * p.element_bytes;
  const int64_t unit = std::lcm(group, int64_t{best.vector_elems}) / best.vector_elems;
  const int64_t units = p.channels / best.vector_elems / unit, turn_rows = kGroupNormRows / p.tensors;
  const int64_t turn_bytes = kGroupNormThreads * kGroupNormRows * vector_bytes;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int cluster = 1; cluster <= (p.clusters ? 8 : 1); cluster *= 2) {
    const int64_t pixels = ceil_div(p.pixels, int64_t{cluster});
    // A GPC has no place for some blocks: an H200 holds 30 clusters of 8 (ncu, 2026-11-29). It holds 62 of 4, but where
    // 64 run the two waves still took less than one of clusters of 2.
    const int64_t part = cluster == 8 ? 30 : 33;
    const int64_t resident = int64_t{kGroupNormResident} * p.multiprocessors * part / 33;
    for (int64_t times = std::max<int64_t>(1, std::min(units, 32 / unit)); times > 0; --times) {
      if (units % times != 0) continue;
      GroupNormConfig c = best;
      c.cluster = cluster, c.vectors = unit * times, c.ranges = units / times;
      c.lanes = static_cast<int>(std::min<int64_t>(c.vectors, kGroupNormLanes));
      const int64_t turns = ceil_div(pixels, kGroupNormThreads / c.lanes * turn_rows);
      const int64_t tables = int64_t{c.lanes} * c.vector_elems * 24;
      const int64_t share = (p.shared_bytes + 1024) / kGroupNormResident - 1024 - kGroupNormStaticBytes - tables;
      c.slots = static_cast<int>(std::min(turns, std::max<int64_t>(share / turn_bytes, kGroupNormAhead)));
      c.shared_bytes = static_cast<int>(c.slots * turn_bytes + tables);
      const int64_t blocks = p.samples * c.ranges * cluster, waves = std::max<int64_t>(1, ceil_div(blocks, resident));
      const int64_t bytes = pixels * c.vectors * vector_bytes, row_bytes = c.vectors * vector_bytes;
      const int64_t sectors = c.ranges == 1 ? row_bytes : ceil_div(row_bytes, int64_t{32}) * 32;
      const int64_t again = std::max<int64_t>(0, p.tensors * bytes - c.slots * turn_bytes);
      const int64_t price = std::min(blocks, resident) * again <= kKept ? again / 3 : again;
      const int64_t cost = waves * ((p.tensors + 1) * pixels * sectors + price + kStart);
      if (cost < least) least = cost, best = c;
    }
  }
  return best;
}

}  // namespace warpsmith
