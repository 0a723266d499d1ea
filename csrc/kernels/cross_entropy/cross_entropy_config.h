#pragma once
#include <algorithm>
#include <cstdint>

#include "common/alignment.h"

// Which kernel runs a cross_entropy problem: pure functions of the problem, printable through
// warpsmith.plan("cross_entropy", ...).
namespace warpsmith {

struct CrossEntropyProblem {
  int64_t rows = 0;
  int64_t classes = 0;
  int element_bytes = 2;
  bool aligned = true;   // every row starts on 16 bytes
  bool gradient = true;  // written in the same pass
  bool loss = true;      // wanted: its gradient, in this pass or a later one, follows from the same bits of the sums
  int multiprocessors = 132;
  int code_capability = 90;           // of the code that runs there: 90 and more has clusters and bulk copies
  int max_shared_bytes = 227 * 1024;  // dynamic shared memory that a block may have
};

enum class CrossEntropyKernel : uint8_t {
  resident,   // forward: a row in the shared memory of its threads: part of a warp, a block or a cluster of blocks
  looped,     // forward: a row is read once for its sums and once more for its gradient
  streaming,  // backward and scaling: element by element
};

constexpr const char* name(CrossEntropyKernel k) {
  switch (k) {
    case CrossEntropyKernel::resident: return "resident";
    case CrossEntropyKernel::looped: return "looped";
    case CrossEntropyKernel::streaming: return "streaming";
  }
  return "unknown";
}

struct CrossEntropyConfig {
  CrossEntropyKernel kernel = CrossEntropyKernel::looped;
  int lanes = 512;    // threads of a row in one block: a power of two up to 32, or the whole block
  int threads = 512;  // of a block
  int cluster = 1;    // blocks of a row
  int slots = 0;      // 16-byte vectors of a row that one thread has (resident)
  int64_t part = 0;   // and that one block has
  bool bulk = false;  // a row, or its part, comes by one bulk copy
  int64_t blocks = 1;
  int64_t shared_bytes = 0;
  const char* why = "";

  constexpr bool block_a_row() const { return lanes == threads; }
  constexpr int groups() const { return threads / lanes; }  // rows that a block works on side by side
};

namespace cross_entropy_detail {

constexpr int64_t kMaxBlocks = 0x7fffffff;
constexpr int kMaxCluster = 8;                 // what every sm_90 grants without opting in
constexpr int kVectorsOfThread = 16;           // fewer threads cost less beside the elements: the exchange of the sums
constexpr int kVectorsOfClusterAlone = 24;     // of a thread of a cluster, for 16-bit rows without a loss
constexpr int kVectorsOfStream = 8;            // of a thread of the backward in long rows: twice what is under way
constexpr int kVectorsOfLane = 8;              // of a warp with rows of its own
constexpr int kMaxThreads = 512;               // of a block that has a row
constexpr int kMaxWarpsOfCluster = 32;         // which exchange their sums
constexpr int64_t kSharedOfBlock = 52 * 1024;  // at most: blocks with other rows cover its waits
constexpr int64_t kBlocksInTurn = 16;          // of a multiprocessor, before one takes several rows
constexpr int64_t kMostRowsInTurn = 2;         // of a block
constexpr int64_t kStaticShared = 4 * 1024;    // what a kernel declares itself, at most

// Aligned 16-byte vectors that a row touches; one more if it may begin inside one.
constexpr int64_t vectors_of(const CrossEntropyProblem& p) {
  const int n = 16 / p.element_bytes;
  return p.aligned ? ceil_div(p.classes, n) : (p.classes + n - 2) / n + 1;
}

// What a thread and a block keep of a row.
constexpr void divide(CrossEntropyConfig& c, int64_t vectors) {
  c.part = ceil_div(vectors, c.cluster);
  c.slots = static_cast<int>(ceil_div(c.part, c.lanes));
}

constexpr void spread(CrossEntropyConfig& c, int64_t rows) {
  c.blocks = std::min(ceil_div(rows, c.groups()), kMaxBlocks / c.cluster) * c.cluster;
}

}  // namespace cross_entropy_detail

// Measured on one H200 (2026-11-21, bf16, lab), fractions of a copy of the same bytes; cluster x threads:
//                   loss and gradient                         loss alone; eight rows a block in turn
//   4096 x 128256   8x128 0.949, 8x96 0.941, 4x256 0.937      8x128 0.865; 0.900
//   8192 x 50304    2x192 0.965, 2x128 0.964, 1x416 0.934     2x128 0.921; 0.963, 1x256 0.921
//   8192 x 50257    2x256 0.943, 2x128 0.940, 1x416 0.882     2x192 0.893; 0.890, 2x128 0.890; 0.908
//   16384 x 32000   2x128 0.972, 1x192 0.970, 1x256 0.964     1x256 0.926; 0.952, 2x128 0.962 in turn
//   32768 x 2048    lanes 32 0.926, 16 0.891                  lanes 32 0.683, two in turn 0.699
//   65536 x 1024    lanes 16 0.918, 8 0.886, 32 0.682         lanes 16 0.684, two in turn 0.707
//   131072 x 500    lanes 8 0.656, 4 0.686, 32 0.342          lanes 8 0.523, two in turn 0.530
//   262144 x 128    lanes 2 0.695, 4 0.698, 16 0.257          lanes 2 0.547, two in turn 0.587
// With a gradient, rows in turn change nothing: the stores of one block hide the loads of another.
// Log-probability alone (2026-11-22, lab/log_prob.cu), and with the entropy; two rows a block in turn. A
// loss does not take this choice: its sums would be added in another order than where the gradient is written.
//   4096 x 128256   8x96 0.903, 0.869; 8x128 0.893, 0.853      16384 x 32000   2x96 0.980, 0.938; 2x128 0.968
//   8192 x 50304    2x128 0.963, 0.928; 2x192 0.947, 0.897     8192 x 16384    1x128 0.899, 0.863; 1x96 0.871, 0.851
constexpr CrossEntropyConfig choose_cross_entropy_forward(const CrossEntropyProblem& p) {
  using namespace cross_entropy_detail;
  const int64_t vectors = vectors_of(p);
  CrossEntropyConfig c;
  c.kernel = CrossEntropyKernel::resident;
  c.lanes = vectors > 1 ? 2 : 1;
  if (vectors <= kVectorsOfLane * 32) {
    while (c.lanes * kVectorsOfLane < vectors) c.lanes *= 2;
    c.threads = 128;
    c.why = "a row fits in the shared memory of a warp: no barrier";
  } else {
    const int64_t bytes = vectors * 16;
    if (p.code_capability >= 90)
      while (c.cluster < kMaxCluster && bytes > c.cluster * kSharedOfBlock) c.cluster *= 2;
    const bool alone = !p.loss && !p.gradient && c.cluster > 1 && p.element_bytes == 2;
    const int64_t threads = alone ? (vectors / (c.cluster * kVectorsOfClusterAlone) + 16) / 32 * 32
                                  : (vectors / (c.cluster * kVectorsOfThread) + 32) / 64 * 64;
    const int64_t most = std::min(kMaxThreads, kMaxWarpsOfCluster * 32 / c.cluster);
    c.lanes = c.threads = static_cast<int>(std::clamp<int64_t>(threads, 64, most));
    c.bulk = p.code_capability >= 90;
    c.why = c.cluster > 1 ? "a row fits in the shared memory of a cluster of blocks"
                          : "a row fits in a block's shared memory";
  }
  divide(c, vectors);
  const int64_t stage_bytes = int64_t{c.slots} * c.threads * 16, most_bytes = p.max_shared_bytes - kStaticShared;
  if (stage_bytes > most_bytes) {
    c = {};
    divide(c, vectors);
    c.why = "a row is longer than the chip's shared memory: it is read twice";
    spread(c, p.rows);
    return c;
  }
  c.shared_bytes = stage_bytes;
  // Without a gradient a block takes some rows in turn, if there are enough.
  const int64_t blocks = ceil_div(p.rows, c.groups()) * c.cluster;
  const int64_t rows_of_block =
      p.gradient ? 1 : std::clamp<int64_t>(blocks / (kBlocksInTurn * p.multiprocessors), 1, kMostRowsInTurn);
  spread(c, ceil_div(p.rows, rows_of_block));
  return c;
}

// The backward is one kernel. Its rows have so many threads that each handles a few vectors: per-thread set-up is then
// paid for.
// Measured on one H200 (2026-11-22, bf16, lab/log_prob.cu), fractions of a copy, and with a gradient of the
// entropy: by threads of a row
//                   128           256           512
//   8192 x 50304    0.930, 0.927  0.943, 0.944  0.959, 0.921
//   16384 x 32000   0.943, 0.941  0.954, 0.955  0.950, 0.894
//   8192 x 16384    0.921, 0.914  0.946, 0.912  0.812, 0.717
//   16384 x 8192    0.956, 0.908  0.859, 0.752  0.549, 0.502
constexpr CrossEntropyConfig choose_cross_entropy_backward(const CrossEntropyProblem& p) {
  using namespace cross_entropy_detail;
  const int64_t vectors = vectors_of(p);
  CrossEntropyConfig c;
  c.kernel = CrossEntropyKernel::streaming;
  c.lanes = 1;
  const auto vectors_of_thread = [&] {  // at least; the warps of few rows have too little under way
    return c.lanes < 32 || p.rows * c.lanes < int64_t{512} * p.multiprocessors ? 1 : kVectorsOfStream;
  };
  while (c.lanes < 512 && int64_t{c.lanes} * 2 * vectors_of_thread() <= vectors) c.lanes *= 2;
  c.threads = std::max(c.lanes, 256);
  c.why = "element by element";
  spread(c, p.rows);
  return c;
}

// Scales the saved gradient by the upstream one. That is almost always 1, and then every block returns at once, so few
// are launched.
constexpr CrossEntropyConfig choose_cross_entropy_scale(const CrossEntropyProblem& p) {
  CrossEntropyConfig c = choose_cross_entropy_backward(p);
  c.blocks = std::min<int64_t>(c.blocks, 1024);
  return c;
}

}  // namespace warpsmith
