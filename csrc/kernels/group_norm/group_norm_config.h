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
  int tensors = 1;  // that are read: x, backward dy too
};

constexpr int kGroupNormThreads = 256, kGroupNormResident = 2;  // blocks that a multiprocessor holds at once
constexpr int kGroupNormLanes = 128;
constexpr int kGroupNormLeastRows = 4;  // of a thread, where several blocks share a range

// A range is some whole groups of the channels of one sample. A block has `lanes` threads along a pixel, each with one
// vector of channels, and threads / lanes pixels side by side. `set` blocks share a range by its pixels. A range of
// more vectors than kGroupNormLanes is one group, and has `tiles` times as many blocks, each with some of its vectors.
struct GroupNormConfig {
  int vector_elems = 1;
  int lanes = 1;
  int tiles = 1;
  int set = 1;
  int64_t ranges = 1;   // of a sample
  int64_t vectors = 1;  // of a range
  constexpr int rows_together() const { return kGroupNormThreads / lanes; }
  constexpr int64_t blocks(int64_t samples) const { return samples * ranges * tiles * set; }
};

// The cheapest of all widths of ranges and sizes of sets, by the bytes that a block moves: of its rows, 32 more where a
// row is not a whole pixel; of the sums of its range, of which each block of the second pass reads all, twice; and what
// it could move while it starts. No block has fewer rows a thread than kGroupNormLeastRows but where a range has one.
constexpr GroupNormConfig choose_group_norm(const GroupNormProblem& p) {
  constexpr int64_t kStart = 32 << 10;
  const int64_t group = p.channels / p.groups;
  const int whole = 16 / p.element_bytes;
  GroupNormConfig best;
  if (p.channels % whole == 0 && (group % whole == 0 || std::lcm(group, int64_t{whole}) <= kGroupNormThreads))
    best.vector_elems = whole;
  const int64_t vector_bytes = int64_t{best.vector_elems} * p.element_bytes;
  const int64_t unit = std::lcm(group, int64_t{best.vector_elems}) / best.vector_elems;
  const int64_t units = p.channels / best.vector_elems / unit;
  const int64_t most_units = std::min(kGroupNormLanes / unit, kGroupNormThreads * group / best.vector_elems / unit);
  const int64_t resident = int64_t{kGroupNormResident} * p.multiprocessors;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int64_t times = std::clamp<int64_t>(most_units, 1, units); times > 0; --times) {
    if (units % times != 0) continue;
    GroupNormConfig c = best;
    c.vectors = unit * times, c.ranges = units / times;
    c.tiles = static_cast<int>(ceil_div(c.vectors, int64_t{kGroupNormLanes}));
    c.lanes = static_cast<int>(ceil_div(c.vectors, int64_t{c.tiles}));
    const int64_t side = c.rows_together(), of_all = p.samples * c.ranges * c.tiles;  // blocks of a set
    const int64_t row_bytes = c.lanes * vector_bytes + (c.lanes * c.vector_elems < p.channels ? 32 : 0);
    const int64_t groups = c.tiles > 1 ? 1 : c.vectors * c.vector_elems / group;
    for (int waves = 1; waves <= 4; ++waves) {
      const int64_t most = std::max<int64_t>(1, p.pixels / (side * kGroupNormLeastRows));
      const int64_t pixels = ceil_div(p.pixels, std::clamp<int64_t>(waves * resident / of_all, 1, most));
      c.set = static_cast<int>(ceil_div(p.pixels, pixels));
      const int64_t rounds = ceil_div(of_all * c.set, resident);
      const int64_t rows = ceil_div(pixels, side) * kGroupNormThreads / c.lanes;  // idle threads take their time too
      const int64_t sums = 32 * groups * c.set * c.tiles;
      const int64_t cost = rounds * (kStart + sums + p.tensors * rows * row_bytes);
      if (cost < least) least = cost, best = c;
    }
  }
  return best;
}

}  // namespace warpsmith
