#pragma once
#include <algorithm>
#include <cstdint>

// How a biased activation is spread over the card: a pure function of the problem, printable through
// warpsmith.plan("bias_gelu", ...). A block is a tile of `width` vectors times threads / width rows.
namespace warpsmith {

struct BiasedProblem {
  int64_t rows = 0;
  int64_t columns = 0;
  int element_bytes = 2;
  bool aligned = true;  // every pointer and row start lies on 16 bytes
  int multiprocessors = 132;
};

struct BiasedConfig {
  int vector_elems = 1;  // elements of one memory access
  int width = 1;         // vectors of a row that a block covers: a power of two
  int threads = 256;
  int64_t tiles = 1;       // blocks side by side that cover a row
  int64_t row_blocks = 1;  // blocks one below the other; backward: each leaves one row of partial sums
  const char* why = "";

  constexpr int rows_at_once() const { return threads / width; }
  constexpr int64_t blocks() const { return tiles * row_blocks; }
};

// Rows of a thread that are loaded before the first is used; forward these are all of its rows.
constexpr int kBiasedForwardRows = 4, kBiasedBackwardRows = 2;
constexpr int kBiasedResident = 3;  // blocks of a backward on a multiprocessor at once

namespace biased_detail {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Vectors and tiles. Wide tiles read long pieces of a row; one that leaves more than an eighth of its lanes idle is not
// worth it.
constexpr BiasedConfig tiled(const BiasedProblem& p) {
  BiasedConfig c;
  const int most = 16 / p.element_bytes;
  const bool vectors_fit = p.aligned && p.columns % most == 0;
  c.vector_elems = vectors_fit ? most : 1;
  c.why = vectors_fit ? "rows of 16-byte vectors" : "rows are not made of aligned 16-byte vectors: element by element";
  const int64_t vectors = p.columns / c.vector_elems;
  c.width = c.threads;
  while (c.width > 1 && ceil_div(vectors, c.width) * c.width * 8 > vectors * 9) c.width /= 2;
  c.tiles = ceil_div(vectors, c.width);
  return c;
}

}  // namespace biased_detail

constexpr BiasedConfig choose_biased_forward(const BiasedProblem& p) {
  BiasedConfig c = biased_detail::tiled(p);
  c.row_blocks = biased_detail::ceil_div(p.rows, int64_t{c.rows_at_once()} * kBiasedForwardRows);
  return c;
}

// As many blocks as run at once, so that each leaves its partial sums only once.
constexpr BiasedConfig choose_biased_backward(const BiasedProblem& p) {
  BiasedConfig c = biased_detail::tiled(p);
  const int64_t all = int64_t{kBiasedResident} * p.multiprocessors;
  c.row_blocks = std::clamp<int64_t>(all / c.tiles, 1, biased_detail::ceil_div(p.rows, c.rows_at_once()));
  return c;
}

}  // namespace warpsmith
