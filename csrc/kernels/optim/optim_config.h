#pragma once
#include <cstdint>

#include "kernels/optim/optim.h"

// How a step is divided into blocks: pure functions of the problem, printable through warpsmith.plan("adamw", ...) and
// under the name of every other optimizer. docs/design/optim.md derives the numbers.
namespace warpsmith {

struct OptimConfig {
  int threads = 0;      // per block
  int vectors = 0;      // 16-byte vectors per array and thread in flight
  int chunk_elems = 0;  // most elements per block
  const char* why = "";
};

constexpr int kOptimThreads = 256;
// Measured with AdamW on one H200 (2026-11-20, through Python and 5ca5783:lab/adamw.cu), 1e9 parameters, fractions of a
// copy of the same bytes: one vector, 4 blocks a multiprocessor, chunks of 4,096 elements, plain loads and stores 0.97;
// the same with registers for 3 blocks 0.92; two vectors, 3 blocks, chunks of 16,384, streaming hints 0.91.
constexpr int kOptimBlocksAMultiprocessor = 4;  // blocks that the registers should allow: 64 per thread
constexpr int kOptimBlocks8Bit = 3;
constexpr int kOptimVectors = 1;
constexpr int kOptimTileElems = kOptimThreads * kOptimVectors * 4;  // float32 elements that a block reads at once

// The longest chunk of a storage. The start of a block takes about 3 us, in which only its first tile is in flight: the
// fewer bytes an element has, the more elements must share that cost. Measured with AdamW on one H200 (2026-11-23), 5e8
// parameters, fractions of a copy, chunks of 4,096 / 8,192 / 16,384: bfloat16 0.83 / 0.92 / 0.96, stochastic 0.67 /
// 0.78 / 0.83, compensated 0.90 / 0.96 / 0.96, masters 0.93 / 0.95, remainder 0.92 / 0.95. A block of 8-bit states
// starts with the copy of two code maps, 18 KB.
constexpr int kOptimMaxChunkElems = 65536;
constexpr int longest_optim_chunk(Storage storage) {
  switch (storage) {
    case Storage::float32:
    case Storage::float64: return 4096;
    case Storage::bfloat16:
    case Storage::float16:
    case Storage::bfloat16_stochastic:
    case Storage::bfloat16_compensated: return 16384;
    case Storage::float32_8bit:
    case Storage::bfloat16_8bit:
    case Storage::float16_8bit: return kOptimMaxChunkElems;
    default: return 8192;
  }
}

// Rows that a block casts to 8-bit floats at most. One of kOptimMaxChunkElems is the longest that is cast so.
constexpr int kOptimCastRows = kOptimThreads;
constexpr int kOptimRowAlign = 16;  // elements of which rows are a multiple, as 8-bit products want them
constexpr int32_t chunk_of_rows(int32_t chunk_elems, int32_t row_elems) {
  const int32_t rows = chunk_elems / row_elems;
  return row_elems * (rows < 1 ? 1 : rows < kOptimCastRows ? rows : kOptimCastRows);
}

// The longest chunk, a power of two of tiles, that still gives every resident block three chunks. `total_elems`: of all
// tensors together.
constexpr OptimConfig choose_optim(int64_t total_elems, int multiprocessors, Storage storage) {
  const int64_t wanted_blocks = int64_t{3} * kOptimBlocksAMultiprocessor * multiprocessors;
  OptimConfig c{kOptimThreads, kOptimVectors, longest_optim_chunk(storage),
                "long chunks: a block's start is a few percent of its life"};
  while (c.chunk_elems > kOptimTileElems && total_elems / c.chunk_elems < wanted_blocks) {
    c.chunk_elems /= 2;
    c.why = "short chunks: the work is little, and every multiprocessor should have an equal part of it";
  }
  return c;
}

}  // namespace warpsmith
