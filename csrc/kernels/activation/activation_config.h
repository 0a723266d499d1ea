#pragma once
#include <algorithm>
#include <cstdint>

#include "common/alignment.h"

// How the activations are distributed over the GPU: pure functions of the problem, printable through warpsmith.plan(op,
// ...). Elementwise: gated and unary ops and dropout_add.
namespace warpsmith {

struct ElementwiseProblem {
  int64_t rows = 0;
  int64_t columns = 0;
  int element_bytes = 2;
  bool contiguous = true;  // the rows of every tensor follow each other without gaps
  bool aligned = true;     // every pointer, and with gaps every row, is aligned to 16 bytes
};

struct ElementwiseConfig {
  bool flat = true;      // each tensor is one row, whatever its shape
  int vector_elems = 1;  // elements per memory access
  int threads = 128;     // threads per block; each takes one vector
  int64_t vectors = 0;   // vectors per tensor; the last one of a flat tensor may be partial
  int64_t blocks = 0;
  const char* why = "";
};

constexpr ElementwiseConfig choose_elementwise(const ElementwiseProblem& p) {
  const int most = 16 / p.element_bytes;
  ElementwiseConfig c;
  c.flat = p.contiguous || p.rows == 1;
  if (p.aligned && (c.flat || p.columns % most == 0)) {
    c.vector_elems = most;
    c.why = c.flat ? "contiguous tensors: one 16-byte vector of each a thread"
                   : "rows of 16-byte vectors: one of each tensor a thread";
  } else {
    c.why = "not made of aligned 16-byte vectors: one element a thread";
  }
  const int64_t elements = p.rows * p.columns;
  c.vectors = ceil_div(elements, c.vector_elems);
  c.blocks = ceil_div(c.vectors, c.threads);
  return c;
}

// ---- gated with the cast of y: a row a block, each thread of which holds up to kGatedRowVectors vectors of it.

constexpr int kGatedRowVectors = 4, kGatedRowThreads = 512;

// The threads of such a block; 0: rows do not fit, and the cast is a pass behind.
constexpr int gated_row_threads(int64_t columns, int element_bytes, bool aligned) {
  const int most = 16 / element_bytes;
  if (!aligned || element_bytes != 2 || columns % most) return 0;
  const int64_t threads = ceil_div(ceil_div(columns / most, kGatedRowVectors), 32) * 32;
  return threads <= kGatedRowThreads ? static_cast<int>(threads) : 0;
}

// ---- biased: a block is a tile of `width` vectors times threads / width rows.

struct BiasedProblem {
  int64_t rows = 0;
  int64_t columns = 0;
  int element_bytes = 2;
  bool aligned = true;  // every pointer and row start is aligned to 16 bytes
  int multiprocessors = 132;
};

constexpr int kBiasedForwardThreads = 128, kBiasedBackwardThreads = 256;
constexpr int kBiasedResident = 5;  // blocks of a backward that run on a multiprocessor at once

struct BiasedConfig {
  int vector_elems = 1;  // elements per memory access
  int width = 1;         // vectors of a row per block, a power of two
  int threads = kBiasedBackwardThreads;
  int64_t tiles = 1;       // blocks side by side that cover a row
  int64_t row_blocks = 1;  // blocks along the rows; in the backward each writes one row of partial sums
  const char* why = "";

  constexpr int rows_at_once() const { return threads / width; }
  constexpr int64_t blocks() const { return tiles * row_blocks; }
};

namespace biased_detail {

// Divides rows into tiles of at most `widest` vectors. A width that leaves more than an eighth of its lanes idle is
// rejected.
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

// Forward, one row per thread. Measured on one H200 (2026-11-21, bf16, kernels alone), fractions of a copy of the same
// bytes:
//                                   16384x4096  65536x768  4096x8192
//   blocks of 128 threads           1.00        1.00       1.00
//   blocks of 256 threads           0.99        0.99       0.99
//   2 rows per thread, loaded first 0.99        1.01       1.00
//   4 rows per thread, loaded first 0.98        0.99       0.97
constexpr BiasedConfig choose_biased_forward(const BiasedProblem& p) {
  BiasedConfig c = biased_detail::tiled(p, kBiasedForwardThreads);
  c.threads = kBiasedForwardThreads;
  c.row_blocks = ceil_div(p.rows, c.rows_at_once());
  return c;
}

// Backward: as many blocks as run at once, so that each writes its partial sums only once. Measured in the same way:
//                                   16384x4096  65536x768  4096x8192  1024x12288
//   5 blocks of 32 vectors          0.94        0.92       0.90       0.84
//   5 blocks of 64 vectors          0.93        0.85       0.88       0.83
//   3 blocks, two rows in flight    0.80        0.80       0.76       0.69
constexpr BiasedConfig choose_biased_backward(const BiasedProblem& p) {
  BiasedConfig c = biased_detail::tiled(p, 32);
  const int64_t all = int64_t{kBiasedResident} * p.multiprocessors;
  c.row_blocks = std::clamp<int64_t>(all / c.tiles, 1, ceil_div(p.rows, c.rows_at_once()));
  return c;
}

}  // namespace warpsmith
