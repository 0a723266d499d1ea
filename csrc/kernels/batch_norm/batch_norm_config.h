#pragma once
#include <algorithm>
#include <cstdint>

#include "common/alignment.h"

// How the kernels share out rows and channels: a pure function of the problem, printable through warpsmith.plan.
namespace warpsmith {

struct BatchNormProblem {
  int64_t rows = 0, columns = 0;
  int element_bytes = 2;
  int multiprocessors = 132;
};

constexpr int kBatchNormThreads = 256;

// A block has `lanes` threads along a row, each with one vector of channels, and 256 / lanes rows side by side. Blocks
// of one tile of channels take turns of rows: a turn is `rows_a_turn` rows, and block s takes turns s, s + slices, ...
struct BatchNormConfig {
  int vector_elems = 1;
  int lanes = 1;
  int64_t rows_a_turn = 1;
  int64_t tiles = 1;   // of channels
  int64_t slices = 1;  // blocks of a tile
  constexpr int rows_together() const { return kBatchNormThreads / lanes; }
  constexpr int64_t blocks() const { return tiles * slices; }
};

// Channels of a vector of 16 bytes where rows are made of them, else 1. The mask has one byte for each vector.
constexpr int batch_norm_vector(int64_t columns, int element_bytes) {
  const int whole = 16 / element_bytes;
  return columns % whole == 0 ? whole : 1;
}

// Rows of a thread in a turn, of each pass.
struct BatchNormTogether {
  static constexpr int statistics = 8, normalize = 4, sums = 4, gradients = 4;
};
constexpr int kBatchNormResident = 2;  // blocks that a multiprocessor holds at once, by their registers

constexpr BatchNormConfig choose_batch_norm(const BatchNormProblem& p, int together) {
  BatchNormConfig c;
  c.vector_elems = batch_norm_vector(p.columns, p.element_bytes);
  const int64_t vectors = p.columns / c.vector_elems;
  while (c.lanes < 32 && c.lanes < vectors) c.lanes *= 2;
  c.rows_a_turn = int64_t{together} * c.rows_together();
  c.tiles = ceil_div(vectors, c.lanes);
  // As few slices as take the same time: each writes partial sums.
  const int64_t turns = ceil_div(p.rows, c.rows_a_turn), resident = int64_t{kBatchNormResident} * p.multiprocessors;
  const int64_t turns_each = ceil_div(turns, std::max<int64_t>(1, resident / c.tiles));
  c.slices = std::max<int64_t>(1, ceil_div(turns, std::max<int64_t>(1, turns_each)));  // of no rows, too
  return c;
}

// How many rows each slice takes, without a division in a kernel.
struct BatchNormSliceRows {
  int64_t rows_a_turn, turns, more, last, missing;  // slices below `more` take a turn more; the last turn lacks rows
  constexpr BatchNormSliceRows(int64_t rows, const BatchNormConfig& c)
      : rows_a_turn(c.rows_a_turn), turns(0), more(0), last(0), missing(0) {
    const int64_t all = ceil_div(rows, rows_a_turn);
    turns = all / c.slices, more = all % c.slices, last = (all - 1) % c.slices, missing = all * rows_a_turn - rows;
  }
  constexpr int64_t of(int64_t slice) const {
    return (turns + (slice < more)) * rows_a_turn - (slice == last ? missing : 0);
  }
};

}  // namespace warpsmith
