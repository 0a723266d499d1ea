#pragma once
#include <algorithm>
#include <cstdint>

// Which kernel runs a backward of rms_norm (its forward is the norm family's): pure functions of the problem, printable
// through warpsmith.plan("rms_norm", ...).
namespace warpsmith {

struct RmsNormProblem {
  int64_t rows = 0;
  int64_t columns = 0;
  int element_bytes = 2;
  bool aligned = true;  // every pointer and row start lies on 16 bytes
  int multiprocessors = 132;
  int max_shared_bytes = 227 * 1024;  // dynamic shared memory that a block may have
};

// ring: rows stream through shared memory and the weight gradient stays in registers; looped: a row is read twice, for
// rows too long for the chip or not aligned to vectors.
enum class RmsNormKernel : uint8_t { ring, looped };

constexpr const char* name(RmsNormKernel k) {
  switch (k) {
    case RmsNormKernel::ring: return "ring";
    case RmsNormKernel::looped: return "looped";
  }
  return "unknown";
}

struct RmsNormConfig {
  RmsNormKernel kernel = RmsNormKernel::looped;
  int vector_elems = 1;  // elements of one memory access
  int vectors = 1;       // vectors of a row that one thread holds
  int stages = 0;        // rows in the ring, the one in use included (ring)
  int lanes = 32;        // threads of a row: a power of two up to 32, or the whole block
  int threads = 256;     // of a block
  int64_t blocks = 1;
  int64_t shared_bytes = 0;
  const char* why = "";

  constexpr bool block_a_row() const { return lanes == threads; }
  constexpr int groups() const { return threads / lanes; }  // rows that a block works on side by side
};

// Threads that a block of the ring may have with `vectors` vectors each: what their registers allow without spilling.
constexpr int ring_threads(int vectors) { return vectors == 1 ? 1024 : vectors == 2 ? 768 : 512; }

namespace rms_norm_detail {

constexpr int64_t kMaxBlocks = 0x7fffffff;
constexpr int kVectorBytes = 16;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr bool vectors_fit(const RmsNormProblem& p) {
  return p.aligned && p.columns % (kVectorBytes / p.element_bytes) == 0;
}

// The least power of two that leaves at most `most` vectors a thread, at most 32.
constexpr int lanes_of(int64_t vectors, int most) {
  int lanes = 1;
  while (lanes < 32 && int64_t{lanes} * most < vectors) lanes *= 2;
  return lanes;
}

constexpr int threads_of(int64_t vectors, int vectors_a_thread) {
  return static_cast<int>(ceil_div(ceil_div(vectors, vectors_a_thread), 32) * 32);
}

constexpr RmsNormConfig looped(const RmsNormProblem& p, int64_t most_blocks, const char* why) {
  RmsNormConfig c;
  c.vector_elems = vectors_fit(p) ? kVectorBytes / p.element_bytes : 1;
  const int64_t accesses = p.columns / c.vector_elems;
  c.lanes = accesses <= 1024 ? 32 : accesses <= 4096 ? 512 : 1024;
  c.threads = c.lanes == 32 ? 256 : c.lanes;
  c.blocks = std::min(ceil_div(p.rows, c.groups()), most_blocks);
  c.why = why;
  return c;
}

// A multiprocessor has 1 KiB of shared memory more than a block may take, and every block costs 1 KiB and its static
// part.
constexpr int64_t shared_bytes_a_block(const RmsNormProblem& p, int together) {
  return (int64_t{p.max_shared_bytes} + 1024) / together - 1024 - 512;
}

// A ring of `tensors` rows a stage, `together` blocks a multiprocessor or fewer, at most `stages` deep; 0 stages if
// even two do not fit.
constexpr RmsNormConfig ring(const RmsNormProblem& p, int tensors, int lanes, int vectors, int threads, int together,
                             int stages, const char* why) {
  RmsNormConfig c;
  c.kernel = RmsNormKernel::ring;
  c.vector_elems = kVectorBytes / p.element_bytes;
  c.lanes = lanes;
  c.vectors = vectors;
  c.threads = threads;
  const int64_t stage_bytes = int64_t{tensors} * kVectorBytes * vectors * threads;
  while (together > 1 && shared_bytes_a_block(p, together) / stage_bytes < 2) --together;
  c.stages = static_cast<int>(std::min<int64_t>(stages, shared_bytes_a_block(p, together) / stage_bytes));
  if (c.stages < 2) c.stages = 0;
  c.shared_bytes = c.stages * stage_bytes;
  c.blocks = std::min(ceil_div(p.rows, c.groups()), int64_t{together} * p.multiprocessors);
  c.why = why;
  return c;
}

}  // namespace rms_norm_detail

constexpr const char* kRmsNormNotVectors =
    "rows are not made of aligned 16-byte vectors: each is read twice, element by element";

// Backward: persistent blocks, so that the weight gradient is summed in registers and leaves the block once. Measured
// as above: 0.86 (128 columns), 0.92, 0.96, 0.96, 0.88, 0.71 (12288); with the weight and both rows in shared memory
// only, and without registers for them, 0.75 and less.
constexpr RmsNormConfig choose_rms_norm_backward(const RmsNormProblem& p) {
  using namespace rms_norm_detail;
  const int64_t looped_blocks = int64_t{4} * p.multiprocessors;
  if (!vectors_fit(p)) return looped(p, looped_blocks, kRmsNormNotVectors);
  const int64_t vectors = p.columns / (kVectorBytes / p.element_bytes);
  if (vectors <= 128) {
    const bool narrow = vectors <= 32;
    const int lanes = narrow ? lanes_of(vectors, 2) : 32;
    return ring(p, 2, lanes, static_cast<int>(ceil_div(vectors, lanes)), narrow ? 256 : 128, narrow ? 2 : 3,
                narrow ? 2 : 3, "a row fits in one warp: dy and x stream through shared memory without a barrier");
  }
  if (vectors <= 2048) {
    const int each = vectors <= 1024 ? 1 : vectors <= 1536 ? 3 : 4, threads = threads_of(vectors, each);
    const int together = each == 1 ? std::max(1, std::min(4, 1024 / threads)) : 1;
    const RmsNormConfig c = ring(p, 2, threads, each, threads, together, each == 1 ? 3 : 2,
                                 "one block a row: dy and x stream through shared memory");
    if (c.stages) return c;
  }
  return looped(p, looped_blocks, "a row of dy and x does not fit on the chip: each is read twice");
}

// Rows of partial sums that a backward writes: one a block, or one a group where groups do not share theirs.
constexpr int64_t rms_norm_partial_rows(const RmsNormConfig& c) {
  return c.kernel == RmsNormKernel::ring ? c.blocks : c.blocks * c.groups();
}

}  // namespace warpsmith
