#pragma once
#include <algorithm>
#include <cstdint>

#include "kernels/norm/norm_config.h"

// Which kernel runs a forward of the norm family: a pure function of the problem.
namespace warpsmith {

// Forward, kernel resident: rows of a block.
constexpr int kNormResidentRows = 4;
// Forward, kernel warp: rows that a lane with so many vectors works on together.
constexpr int norm_rows_of_a_lane(int vectors) { return vectors == 1 ? 4 : vectors < 4 ? 2 : 1; }

// Vectors that a thread of a block holds, and threads that a block may have: what registers allow without spilling.
// Forward: of blocks up to kNormPreferredThreads, three share a multiprocessor.
constexpr int kNormBlockVectors = 4, kNormBlockThreads = 512, kNormPreferredThreads = 384;
// Forward, rows in shared memory.
constexpr int kNormSharedThreads = 256;
// Rows of 65 to 96 vectors that a warp works on together (forward).
constexpr int norm_rows_of_three_vectors(bool layer, bool residual) { return layer && !residual ? 2 : 1; }

// Forward, kernel block, four vectors a thread: threads that there are instances for, at least so many.
constexpr int norm_block_threads_of_four(int least, bool fills) {
  constexpr int kFilled[] = {160, 192, 224, 288, 320, 352, 416, 448, 512};
  for (const int threads : kFilled)
    if (fills && threads == least) return threads;
  constexpr int kPartly[] = {192, 256, 320, 384, 512};
  for (const int threads : kPartly)
    if (threads >= least) return threads;
  return 0;
}

namespace norm_detail {

constexpr NormConfig registers(const NormProblem& p, norm::Scope scope, int lanes, int vectors, int rows, int threads,
                               int cluster, const char* why) {
  NormConfig c;
  c.kernel = NormKernel::registers;
  c.scope = scope;
  c.vector_elems = vector_elems(p);
  c.lanes = lanes, c.vectors = vectors, c.rows = rows, c.threads = threads, c.cluster = cluster;
  c.blocks = ceil_div(p.rows, int64_t{rows} * c.groups()) * cluster;
  c.why = why;
  return c;
}

// Rows of the lengths for which there is a kernel of their own (norm_launch.cuh): 16-bit rows of 64, 128, 256, 512, 768
// and 1,024 columns. The number of rows does not matter, so that it changes none of a row's bits. 0 vectors elsewhere.
constexpr NormConfig warp(const NormProblem& p, int64_t vectors) {
  NormConfig c;
  c.vectors = 0;
  if (p.element_bytes != 2 || p.residual_bytes || !p.affine_as_x) return c;
  if (vectors != 8 && vectors != 16 && vectors != 32 && vectors != 64 && vectors != 96 && vectors != 128) return c;
  c.kernel = NormKernel::warp;
  c.vector_elems = vector_elems(p);
  c.lanes = static_cast<int>(std::min<int64_t>(vectors, 32));
  c.vectors = static_cast<int>(vectors / c.lanes);
  c.rows = norm_rows_of_a_lane(c.vectors);
  c.threads = 64;
  c.blocks = ceil_div(p.rows, int64_t{c.rows} * c.groups());
  c.why = "several rows fill the lanes of a warp, in registers: their length is known to the compiler";
  return c;
}

// Rows of layer_norm in the registers of a block with so many threads as there are instances for (norm_launch.cuh): 129
// to 2,048 vectors, but for the lengths of `shared`, whose kernels add in another order. 0 vectors elsewhere.
constexpr NormConfig block(const NormProblem& p, int64_t vectors) {
  NormConfig c;
  c.vectors = 0;
  if (!p.layer || p.element_bytes != 2 || p.residual_bytes || !p.affine_as_x) return c;
  if (vectors <= 128 || vectors > 2048 || vectors == 1024 || vectors == 1536) return c;
  c.kernel = NormKernel::block;
  c.scope = norm::Scope::block;
  c.vector_elems = vector_elems(p);
  c.vectors = vectors == 3 * 96 || vectors == 3 * 160 ? 3 : vectors <= 512 ? 2 : 4;
  const int least = threads_of(vectors, c.vectors);
  const bool fills = vectors == int64_t{least} * c.vectors;
  c.threads = c.vectors < 4 ? least : norm_block_threads_of_four(least, fills);
  c.lanes = c.threads;
  c.blocks = p.rows;
  c.why = "a row fits in the registers of one block, whose threads are known to the compiler";
  return c;
}

// Rows in shared memory, of the lengths at which a sweep found them ahead of registers (choose_norm_forward) and of no
// others: 16-bit rows of 8,192 and 12,288 columns. The number of rows must not change a row's bits: at 8,192, where
// registers take those that they hold all at once, both kernels add in one order; at 12,288 they would not, so that all
// are here, in blocks of several where there are more than four a multiprocessor and the chip holds them all at once. 0
// vectors elsewhere.
constexpr NormConfig shared(const NormProblem& p, int64_t vectors, int threads) {
  NormConfig c;
  c.vectors = 0;
  if (p.element_bytes != 2 || p.residual_bytes || !p.affine_as_x || !p.clusters) return c;
  if (vectors != 1024 && vectors != 1536) return c;
  const bool widest = vectors == 1536;
  const int64_t row_bytes = vectors * kVectorBytes, many = int64_t{4} * p.multiprocessors;
  if (!widest && p.rows <= many) return c;
  if (shared_bytes_a_block(p, widest || p.layer ? 4 : 8, 128) < row_bytes) return c;
  c.kernel = NormKernel::shared;
  c.scope = norm::Scope::block;
  c.vector_elems = vector_elems(p);
  c.vectors = static_cast<int>(vectors / threads);
  c.lanes = c.threads = threads;
  c.blocks = p.rows;
  c.shared_bytes = row_bytes;
  c.why = "a row lies in shared memory, which holds more of them at once than registers";
  constexpr int kTogether = 2;
  const int64_t blocks = int64_t{kTogether} * p.multiprocessors;
  if (widest && p.rows > many && p.rows <= blocks * kNormResidentRows &&
      shared_bytes_a_block(p, kTogether, 1024) >= kNormResidentRows * row_bytes) {
    c.kernel = NormKernel::resident;
    c.rows = kNormResidentRows;
    c.blocks = std::min(p.rows, blocks);
    c.shared_bytes *= c.rows;
    c.why = "all rows lie in shared memory at once, each block's asked for together";
  }
  return c;
}

}  // namespace norm_detail

// Forward. What was measured, and what lost: docs/design/2026-11-22-norm-forward.md. Two vectors a thread are better
// than four for rms up to 4096 columns (0.98 of a copy of the same bytes, 0.96), worse for layer (0.83); six lost in
// registers everywhere. Clusters for rows that a block can hold lost 5 % and more.
constexpr NormConfig choose_norm_forward(const NormProblem& p) {
  using namespace norm_detail;
  using norm::Scope;
  if (!vectors_fit(p)) return looped(p, kMaxBlocks, kNormNotVectors);
  const int64_t vectors = p.columns / vector_elems(p);
  if (const NormConfig c = warp(p, vectors); c.vectors) return c;
  if (vectors <= 32)
    return registers(p, Scope::group, lanes_of(vectors, 1), 1, 4, 64, 1,
                     "several short rows a group of lanes, in registers");
  if (vectors <= 128) {
    const int each = static_cast<int>(ceil_div(vectors, 32));
    const int rows = each == 3 ? norm_rows_of_three_vectors(p.layer, p.residual_bytes != 0) : 1;
    return registers(p, Scope::group, 32, each, rows, 64, 1, "a row fits in the registers of one warp: no barrier");
  }
  constexpr int64_t block_vectors = int64_t{kNormBlockVectors} * kNormBlockThreads;
  if (vectors <= block_vectors) {
    const NormConfig c = shared(p, vectors, kNormSharedThreads);
    if (c.vectors) return c;
    if (const NormConfig b = block(p, vectors); b.vectors) return b;
    // Three where they leave a tenth fewer places idle: measured for layer, 16-bit.
    const bool three = p.layer && p.element_bytes == 2 && p.residual_bytes <= 2 &&
                       11 * 3 * threads_of(vectors, 3) <= 10 * 4 * threads_of(vectors, 4) &&
                       threads_of(vectors, 3) <= kNormPreferredThreads;
    const int each = !p.layer && !p.residual_bytes && vectors <= 512 ? 2 : three ? 3 : 4;
    const int threads = threads_of(vectors, each);
    return registers(p, Scope::block, threads, each, 1, threads, 1, "a row fits in the registers of one block");
  }
  if (p.clusters && vectors <= block_vectors * norm::kMaxCluster) {
    int cluster = 2;
    while (block_vectors * cluster < vectors) cluster *= 2;
    const int threads = threads_of(ceil_div(vectors, cluster), 4);
    return registers(p, Scope::cluster, threads, 4, 1, threads, cluster,
                     "a row fits in the registers of a cluster of blocks");
  }
  return looped(p, kMaxBlocks, "a row is longer than the registers of its blocks: it is read more than once");
}

}  // namespace warpsmith
