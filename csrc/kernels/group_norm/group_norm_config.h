#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>

#include "common/alignment.h"

// How the kernels share out a batch: a pure function of the problem, printable through warpsmith.plan.
namespace warpsmith {

struct GroupNormProblem {
  int64_t samples = 1, pixels = 1, channels = 1, groups = 1;
  int element_bytes = 2, multiprocessors = 132;
  bool clusters = true;  // the code that runs has them
  int tensors = 1;       // that are read twice: x, backward dy too
};

constexpr int kGroupNormThreads = 256, kGroupNormResident = 2;  // blocks that a multiprocessor holds at once
constexpr int kGroupNormLanes = 128;

// A cluster of `cluster` blocks takes a range of whole groups of one sample, and each block as many of its pixels. A
// block has `lanes` threads along a pixel, each with one vector of channels, and threads / lanes pixels side by side. A
// range of one group with more vectors than kGroupNormLanes goes through them in several tiles. A range of several
// groups has at most as many channels as a block has threads.
struct GroupNormConfig {
  int vector_elems = 1;
  int lanes = 1;
  int cluster = 1;
  int64_t ranges = 1;   // of a sample
  int64_t vectors = 1;  // of a range
};

constexpr int64_t kGroupNormKeptBytes = 24 << 20;  // what all resident blocks may read twice, so that the L2 cache (50
                                                   // MB) has it the second time

// The widest range, and the fewest blocks a cluster, by which the blocks fill the machine and what they read stays in
// the L2 cache; or the most blocks.
constexpr GroupNormConfig choose_group_norm(const GroupNormProblem& p) {
  const int64_t group = p.channels / p.groups;
  GroupNormConfig c;
  const int whole = 16 / p.element_bytes;
  if (p.channels % whole == 0 && (group % whole == 0 || std::lcm(group, int64_t{whole}) <= kGroupNormThreads))
    c.vector_elems = whole;
  const int64_t unit = std::lcm(group, int64_t{c.vector_elems}) / c.vector_elems;
  const int64_t units = p.channels / c.vector_elems / unit, resident = int64_t{kGroupNormResident} * p.multiprocessors;
  int64_t most = 0;
  for (int64_t times = std::max<int64_t>(1, std::min(units, 32 / unit)); times > 0; --times) {
    if (units % times != 0) continue;
    for (int cluster = 1; cluster <= (p.clusters ? 8 : 1); cluster *= 2) {
      const int64_t vectors = unit * times, ranges = units / times, blocks = p.samples * ranges * cluster;
      const int64_t bytes = ceil_div(p.pixels, int64_t{cluster}) * vectors * 16 * p.tensors;
      const bool full = 10 * blocks >= 9 * resident, kept = std::min(blocks, resident) * bytes <= kGroupNormKeptBytes;
      if (std::min(blocks, resident) > most || (full && kept)) {
        most = std::min(blocks, resident);
        c.vectors = vectors, c.ranges = ranges, c.cluster = cluster;
        c.lanes = static_cast<int>(std::min<int64_t>(vectors, kGroupNormLanes));
      }
      if (full && kept) return c;
    }
  }
  return c;
}

}  // namespace warpsmith
