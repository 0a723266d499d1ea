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

// together: rows whose loads a thread has in flight. resident: blocks that a multiprocessor holds at once.
constexpr BatchNormConfig choose_batch_norm(const BatchNormProblem& p, int together, int resident) {
  BatchNormConfig c;
  c.vector_elems = batch_norm_vector(p.columns, p.element_bytes);
  const int64_t vectors = p.columns / c.vector_elems;
  while (c.lanes < 32 && c.lanes < vectors) c.lanes *= 2;
  c.rows_a_turn = int64_t{together} * c.rows_together();
  c.tiles = ceil_div(vectors, c.lanes);
  const int64_t turns = ceil_div(p.rows, c.rows_a_turn), most = int64_t{resident} * p.multiprocessors / c.tiles;
  c.slices = std::max<int64_t>(1, std::min(turns, most));
  return c;
}

// The four passes over activations.
constexpr BatchNormConfig choose_batch_norm_statistics(const BatchNormProblem& p) { return choose_batch_norm(p, 8, 2); }
constexpr BatchNormConfig choose_batch_norm_normalize(const BatchNormProblem& p) { return choose_batch_norm(p, 4, 3); }
constexpr BatchNormConfig choose_batch_norm_sums(const BatchNormProblem& p) { return choose_batch_norm(p, 4, 2); }
constexpr BatchNormConfig choose_batch_norm_dx(const BatchNormProblem& p) { return choose_batch_norm(p, 4, 2); }

// Rows that slice s takes.
constexpr int64_t batch_norm_rows_of(int64_t rows, int64_t rows_a_turn, int64_t slices, int64_t s) {
  const int64_t turns = ceil_div(rows, rows_a_turn), last = (turns - 1) % slices;
  return ceil_div(turns - s, slices) * rows_a_turn - (s == last ? turns * rows_a_turn - rows : 0);
}

}  // namespace warpsmith
