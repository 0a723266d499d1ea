#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/half_host.h"
#include "common/parallel.h"
#include "common/vectorize.h"

// The two stages of a parameter gradient on the CPU: sums over the rows of each chunk, then over the chunks.
namespace warpsmith::cpu {

#define WARPSMITH_ADD_TO(Math)                                                                                \
  WARPSMITH_VECTORIZE static void add_to(const Math* __restrict__ x, Math* __restrict__ sum, int64_t count) { \
    for (int64_t i = 0; i < count; ++i) sum[i] += x[i];                                                       \
  }
WARPSMITH_ADD_TO(float)
WARPSMITH_ADD_TO(double)
#undef WARPSMITH_ADD_TO

// The sum over the rows of a chunk, in groups, and groups of groups: rounding errors grow with the number of terms. In
// one go, the error over some hundred rows was five times torch's.
template <class Math> class RowSums {
 public:
  explicit RowSums(int64_t columns) : columns_(columns) {}

  // total: receives the sum of at most `terms` rows; null: not wanted.
  void begin(Math* total, int64_t terms) {
    total_ = total, levels_ = 0;
    if (!total) return;
    std::fill_n(total, columns_, Math(0));
    for (int64_t most = kGroup; levels_ < kLevels && terms > most; most *= kGroup, ++levels_) {
      held_[levels_] = 0;
      sums_[levels_].assign(static_cast<size_t>(columns_), Math(0));
    }
  }

  // Where to add the next rows; null: no sum is wanted.
  Math* next(int64_t rows = 1) {
    if (!total_ || levels_ == 0) return total_;
    for (int level = 0; level < levels_ && held_[level] >= kGroup; ++level) hand_over(level);
    held_[0] += rows;
    return sums_[0].data();
  }

  void end() {
    for (int level = 0; level < levels_; ++level) hand_over(level);
  }

 private:
  // Adds a level's sum to the level above, as one term.
  void hand_over(int level) {
    if (held_[level] == 0) return;
    const bool last = level + 1 == levels_;
    add_to(sums_[level].data(), last ? total_ : sums_[level + 1].data(), columns_);
    std::fill(sums_[level].begin(), sums_[level].end(), Math(0));
    held_[level] = 0;
    if (!last) ++held_[level + 1];
  }

  static constexpr int64_t kGroup = 32;
  static constexpr int kLevels = 3;
  int64_t columns_, held_[kLevels] = {};
  int levels_ = 0;
  Math* total_ = nullptr;
  std::vector<Math> sums_[kLevels];
};

// Sums rows [rows, columns] in groups, as above, into the first row. Rows are `columns` apart; only `count` columns are
// added.
template <class Math> void add_rows(Math* partials, int64_t rows, int64_t columns, int64_t count) {
  constexpr int64_t kGroup = 8;
  for (int64_t first = 0; first < rows; first += kGroup) {
    Math* const group = partials + first * columns;
    for (int64_t row = 1; row < std::min(kGroup, rows - first); ++row) add_to(group + row * columns, group, count);
    if (first > 0) add_to(group, partials, count);
  }
}

// sums [columns] = the sum of the rows of `partials` [rows, columns], in a fixed order; also left in the first row. Row
// by row, because the partial sums of one column are far apart. grain: least columns per thread.
template <class Math, class W>
void add_partials(Math* partials, int64_t rows, int64_t columns, W* sums, int64_t grain, const Parallel& parallel) {
  parallel(columns, grain, [&](int64_t begin, int64_t end) {
    add_rows(partials + begin, rows, columns, end - begin);
    for (int64_t c = begin; c < end; ++c) sums[c] = from_float<W>(partials[c]);
  });
}

}  // namespace warpsmith::cpu
