#pragma once
#include <algorithm>
#include <cstdint>

// Which kernel runs an rms_norm problem: pure functions of the problem, printable through warpsmith.plan("rms_norm",
// ...).
namespace warpsmith {

struct RmsNormProblem {
  int64_t rows = 0;
  int64_t columns = 0;
  int element_bytes = 2;
  int weight_bytes = 0;  // 0: no weight
  bool aligned = true;   // every pointer and row start lies on 16 bytes
  int multiprocessors = 132;
  int max_shared_bytes = 227 * 1024;  // dynamic shared memory that a block may have
};

// registers: a row lives in the registers of its threads; ring: rows stream through shared memory and the weight
// gradient stays in registers; looped: a row is read twice, for rows too long for the chip or not aligned to vectors.
enum class RmsNormKernel : uint8_t { registers, ring, looped };

constexpr const char* name(RmsNormKernel k) {
  switch (k) {
    case RmsNormKernel::registers: return "registers";
    case RmsNormKernel::ring: return "ring";
    case RmsNormKernel::looped: return "looped";
  }
  return "unknown";
}

struct RmsNormConfig {
  RmsNormKernel kernel = RmsNormKernel::looped;
  int vector_elems = 1;  // elements of one memory access
  int vectors = 1;       // vectors of a row that one thread holds
  int rows_at_once = 1;  // rows that one thread has in flight (registers)
  int stages = 0;        // rows in the ring, the one in use included (ring)
  int lanes = 32;        // threads of a row: a power of two up to 32, or the whole block
  int threads = 256;     // of a block
  int64_t blocks = 1;
  int64_t shared_bytes = 0;
  const char* why = "";

  constexpr bool block_a_row() const { return lanes == threads; }
  constexpr int groups() const { return threads / lanes; }  // rows that a block works on side by side
};

namespace rms_norm_detail {

constexpr int64_t kMaxBlocks = 0x7fffffff;
constexpr int kMaxVectors = 4;  // of a thread in a block of 1,024: what fits in its 64 registers

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr bool vectors_fit(const RmsNormProblem& p) { return p.aligned && p.columns % (16 / p.element_bytes) == 0; }

// The threads of a row that fits in one warp: the least power of two that leaves one vector a thread, at most 32.
constexpr int lanes_of(int64_t vectors) {
  int lanes = 1;
  while (lanes < 32 && lanes < vectors) lanes *= 2;
  return lanes;
}

constexpr int threads_of(int64_t vectors, int vectors_a_thread) {
  return static_cast<int>(ceil_div(ceil_div(vectors, vectors_a_thread), 32) * 32);
}

constexpr RmsNormConfig looped(const RmsNormProblem& p, int64_t most_blocks, const char* why) {
  RmsNormConfig c;
  c.vector_elems = vectors_fit(p) ? 16 / p.element_bytes : 1;
  const int64_t accesses = p.columns / c.vector_elems;
  c.lanes = accesses <= 1024 ? 32 : accesses <= 4096 ? 512 : 1024;
  c.threads = c.lanes == 32 ? 256 : c.lanes;
  c.blocks = std::min(ceil_div(p.rows, c.groups()), most_blocks);
  c.why = why;
  return c;
}

// dy and x of the rows that a block has in one stage.
constexpr int64_t ring_stage_bytes(const RmsNormConfig& c) { return int64_t{2} * 16 * c.vectors * c.threads; }

// Stages that fit beside the weight when `together` blocks share a multiprocessor, at most 4. A multiprocessor has 1 KiB
// more than a block may take, and every block costs 1 KiB and its static shared memory.
constexpr int ring_stages(const RmsNormProblem& p, const RmsNormConfig& c, int together) {
  const int64_t room = (int64_t{p.max_shared_bytes} + 1024) / together - 1024 - 512 - p.columns * p.weight_bytes;
  return static_cast<int>(std::clamp<int64_t>(room / ring_stage_bytes(c), 0, 4));
}

}  // namespace rms_norm_detail

constexpr const char* kRmsNormNotVectors =
    "rows are not made of aligned 16-byte vectors: each is read twice, element by element";

// Forward: a row stays in registers and is read once. Enough warps are resident to hide latency without a ring.
constexpr RmsNormConfig choose_rms_norm_forward(const RmsNormProblem& p) {
  using namespace rms_norm_detail;
  if (!vectors_fit(p)) return looped(p, kMaxBlocks, kRmsNormNotVectors);
  const int64_t vectors = p.columns / (16 / p.element_bytes);
  if (vectors > 1024 * kMaxVectors)
    return looped(p, kMaxBlocks, "a row is longer than a block's registers: it is read twice");

  RmsNormConfig c;
  c.kernel = RmsNormKernel::registers;
  c.vector_elems = 16 / p.element_bytes;
  if (vectors <= 32 * 4) {
    c.lanes = lanes_of(vectors);
    c.vectors = static_cast<int>(ceil_div(vectors, c.lanes));
    c.rows_at_once = c.vectors == 1 ? 4 : c.vectors == 2 ? 2 : 1;
    c.why = "a row fits in one warp: no barrier, and several rows a warp are in flight";
  } else {
    c.vectors = vectors <= 256 ? 2 : 4;
    c.threads = c.lanes = threads_of(vectors, c.vectors);
    c.why = "a row fits in the registers of one block";
  }
  c.blocks = std::min(ceil_div(p.rows, int64_t{c.groups()} * c.rows_at_once), kMaxBlocks);
  return c;
}

// Backward: persistent blocks, contiguous rows each, so that the weight gradient is summed in registers and leaves the
// block once. dy and x stream through a ring of shared memory filled by asynchronous copies, `stages - 1` rows ahead.
constexpr RmsNormConfig choose_rms_norm_backward(const RmsNormProblem& p) {
  using namespace rms_norm_detail;
  const int64_t looped_blocks = int64_t{4} * p.multiprocessors;
  if (!vectors_fit(p)) return looped(p, looped_blocks, kRmsNormNotVectors);
  const int64_t vectors = p.columns / (16 / p.element_bytes);

  RmsNormConfig c;
  c.kernel = RmsNormKernel::ring;
  c.vector_elems = 16 / p.element_bytes;
  int together = 1;  // blocks of a multiprocessor
  if (vectors <= 32 * kMaxVectors) {
    c.lanes = lanes_of(vectors);
    c.vectors = static_cast<int>(ceil_div(vectors, c.lanes));
    together = 3;
    c.why = "a row fits in one warp: dy and x stream through shared memory without a barrier";
  } else {
    c.vectors = vectors <= 512 ? 1 : vectors <= 1024 ? 2 : vectors <= 1024 * 3 ? 3 : 4;
    c.threads = c.lanes = threads_of(vectors, c.vectors);
    together = c.threads <= 512 ? 2 : 1;
    c.why = "one block a row: dy and x stream through shared memory";
  }
  // Two rows ahead where they fit, if need be with fewer blocks.
  while (together > 1 && ring_stages(p, c, together) < 3) --together;
  c.stages = c.threads > 1024 ? 0 : ring_stages(p, c, together);
  if (c.stages < 2)
    return looped(p, looped_blocks,
                  "two rows of dy and x do not fit in a block's shared memory: each row is read twice");
  c.shared_bytes = c.stages * ring_stage_bytes(c) + p.columns * p.weight_bytes;
  c.blocks = std::min(ceil_div(p.rows, c.groups()), int64_t{together} * p.multiprocessors);
  return c;
}

// Rows of partial sums that a backward writes: one a block, or one a group where groups do not share theirs.
constexpr int64_t rms_norm_partial_rows(const RmsNormConfig& c) {
  return c.kernel == RmsNormKernel::ring ? c.blocks : c.blocks * c.groups();
}

}  // namespace warpsmith
