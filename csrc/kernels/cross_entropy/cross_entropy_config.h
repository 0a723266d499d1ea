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
  bool gradient = true;  // the forward also writes the gradient
  bool loss = true;      // a loss is wanted: its gradient, now or later, must follow from the same sums
  int multiprocessors = 132;
  int code_capability = 90;           // architecture of the code that runs: clusters and bulk copies need 90
  int max_shared_bytes = 227 * 1024;  // most dynamic shared memory per block
};

enum class CrossEntropyKernel : uint8_t {
  resident,   // forward: a row in the shared memory of part of a warp, a block or a cluster
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
  int lanes = 512;    // threads per row in one block: a power of two up to 32, or the whole block
  int threads = 512;  // threads per block
  int cluster = 1;    // blocks per row
  int slots = 0;      // 16-byte vectors of a row per thread (resident)
  int64_t part = 0;   // 16-byte vectors of a row per block
  bool bulk = false;  // a row, or a block's part of it, arrives by one bulk copy
  int64_t blocks = 1;
  int64_t shared_bytes = 0;
  const char* why = "";

  constexpr bool block_a_row() const { return lanes == threads; }
  constexpr int groups() const { return threads / lanes; }  // rows that a block works on side by side
};

namespace cross_entropy_detail {

constexpr int64_t kMaxBlocks = 0x7fffffff;
constexpr int kMaxCluster = 8;                 // largest cluster that every sm_90 grants without opting in
constexpr int kVectorsOfThread = 16;           // per thread of a block or cluster: few threads exchange sums
constexpr int kVectorsOfClusterAlone = 24;     // vectors per thread in a cluster, for 16-bit rows without a loss
constexpr int kVectorsOfStream = 8;            // vectors per thread in the backward of long rows: two batches of loads
constexpr int kVectorsOfLane = 8;              // vectors per lane where a warp holds whole rows
constexpr int kMaxThreads = 512;               // most threads per block that holds one row
constexpr int kMaxWarpsOfCluster = 32;         // most warps that exchange the sums of a row
constexpr int64_t kSharedOfBlock = 52 * 1024;  // most shared memory per block: blocks with other rows hide its waits
constexpr int64_t kBlocksInTurn = 16;          // blocks per multiprocessor before one block takes several rows
constexpr int64_t kMostRowsInTurn = 2;         // most rows that one block takes in turn
constexpr int64_t kStaticShared = 4 * 1024;    // most static shared memory of a kernel

// Aligned 16-byte vectors that a row touches; one more if the row may start inside a vector.
constexpr int64_t vectors_of(const CrossEntropyProblem& p) {
  const int n = 16 / p.element_bytes;
  return p.aligned ? ceil_div(p.classes, n) : (p.classes + n - 2) / n + 1;
}

// Sets how many vectors of a row a block and a thread hold.
constexpr void divide(CrossEntropyConfig& c, int64_t vectors) {
  c.part = ceil_div(vectors, c.cluster);
  c.slots = static_cast<int>(ceil_div(c.part, c.lanes));
}

constexpr void spread(CrossEntropyConfig& c, int64_t rows) {
  c.blocks = std::min(ceil_div(rows, c.groups()), kMaxBlocks / c.cluster) * c.cluster;
}

}  // namespace cross_entropy_detail

// Chooses the forward kernel. Measured on one H200 (bf16); the sweep's table is in
// docs/design/cross_entropy.md. What it showed:
//
// - Rows of 128,256 classes: clusters of 8 blocks of 128 threads (0.949 of a copy of the same bytes). Rows of 32,000 to
//   50,304: clusters of 2 blocks (0.94 to 0.97). Short rows: as many lanes as leave 8 vectors per lane.
// - Loss alone: blocks that take several rows in turn gain up to 0.04. With a gradient that changes nothing: the stores
//   of one block hide the loads of another.
// - Log-probability alone, in a cluster: 24 vectors per thread instead of 16. A loss cannot use that configuration: its
//   sums would be added in another order than in the pass that writes the gradient.
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
  // Without a gradient a block takes several rows in turn, if there are enough rows.
  const int64_t blocks = ceil_div(p.rows, c.groups()) * c.cluster;
  const int64_t rows_of_block =
      p.gradient ? 1 : std::clamp<int64_t>(blocks / (kBlocksInTurn * p.multiprocessors), 1, kMostRowsInTurn);
  spread(c, ceil_div(p.rows, rows_of_block));
  return c;
}

// Chooses the backward. There is one kernel. Enough threads per row that each handles a few vectors: per-thread set-up
// is then paid for. Rows of 50,304 classes are fastest with 512 threads (0.959 of a copy of the same bytes), rows of
// 16,384 with 256 (0.946), rows of 8,192 with 128 (0.956): docs/design/cross_entropy.md.
constexpr CrossEntropyConfig choose_cross_entropy_backward(const CrossEntropyProblem& p) {
  using namespace cross_entropy_detail;
  const int64_t vectors = vectors_of(p);
  CrossEntropyConfig c;
  c.kernel = CrossEntropyKernel::streaming;
  c.lanes = 1;
  const auto vectors_of_thread = [&] {  // at least; few rows have too few loads in flight
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
