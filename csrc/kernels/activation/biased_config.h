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

constexpr int kBiasedForwardThreads = 128, kBiasedBackwardThreads = 256;
constexpr int kBiasedResident = 5;  // blocks of a backward on a multiprocessor at once

struct BiasedConfig {
  int vector_elems = 1;  // elements of one memory access
  int width = 1;         // vectors of a row that a block covers: a power of two
  int threads = kBiasedBackwardThreads;
  int64_t tiles = 1;       // blocks side by side that cover a row
  int64_t row_blocks = 1;  // blocks one below the other; backward: each leaves one row of partial sums
  const char* why = "";

  constexpr int rows_at_once() const { return threads / width; }
  constexpr int64_t blocks() const { return tiles * row_blocks; }
};

namespace biased_detail {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Vectors, and tiles of at most `widest` vectors; one that leaves more than an eighth of its lanes idle is not worth
// it.
constexpr BiasedConfig tiled(const BiasedProblem& p, int widest) {
  BiasedConfig c;
  const int most = 16 / p.element_bytes;
  const bool vectors_fit = p.aligned && p.columns % most == 0;
  c.vector_elems = vectors_fit ? most : 1;
  c.why = vectors_fit ? "rows of 16-byte vectors" : "rows are not made of aligned 16-byte vectors: element by element";
  const int64_t vectors = p.columns / c.vector_elems;
  c.width = widest;
  while (c.width > 1 && ceil_div(vectors, c.width) * c.width * 8 > vectors * 9) c.width /= 2;
  c.tiles = ceil_div(vectors, c.width);
  return c;
}

}  // namespace biased_detail

// Forward, one row a thread. Measured on one H200 (2026-11-21, bf16, tools/gpu/sweep), fractions of a copy of the same
// bytes at 16384x4096, 65536x768, 4096x8192: blocks of 128 threads 1.00, 1.00, 1.00, of 256 threads 0.99, 0.99, 0.99; 2
// rows a thread, both loaded first, 0.99, 1.01, 1.00, 4 rows 0.98, 0.99, 0.97.
constexpr BiasedConfig choose_biased_forward(const BiasedProblem& p) {
  BiasedConfig c = biased_detail::tiled(p, kBiasedForwardThreads);
  c.threads = kBiasedForwardThreads;
  c.row_blocks = biased_detail::ceil_div(p.rows, c.rows_at_once());
  return c;
}

// Backward: as many blocks as run at once, so that each leaves its partial sums only once. Measured as above at
// 16384x4096, 65536x768, 4096x8192, 1024x12288: 5 blocks of 32 vectors 0.94, 0.92, 0.90, 0.84; of 64 vectors 0.93,
// 0.85, 0.88, 0.83; 3 blocks with two rows in flight 0.80, 0.80, 0.76, 0.69.
constexpr BiasedConfig choose_biased_backward(const BiasedProblem& p) {
  BiasedConfig c = biased_detail::tiled(p, 32);
  const int64_t all = int64_t{kBiasedResident} * p.multiprocessors;
  c.row_blocks = std::clamp<int64_t>(all / c.tiles, 1, biased_detail::ceil_div(p.rows, c.rows_at_once()));
  return c;
}

}  // namespace warpsmith
