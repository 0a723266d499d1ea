#pragma once
#include <algorithm>
#include <cstdint>

#include "common/alignment.h"

// How the kernels share out rows: a pure function of the problem, printable through warpsmith.plan.
namespace warpsmith {

struct SoftmaxProblem {
  int64_t rows = 0, columns = 0;
  int element_bytes = 2;              // of what is read
  bool aligned = true;                // every row begins on 16 bytes
  int tensors = 1;                    // that are read: x, backward y and dy
  int code_capability = 90;           // architecture of the code that runs: clusters and bulk copies need 90
  int max_shared_bytes = 227 * 1024;  // most dynamic shared memory per block
};

// Rows lie in shared memory, one in that of `lanes` threads of a warp, a block, or a cluster of blocks; or, without
// slots, a block reads its row twice.
struct SoftmaxConfig {
  int lanes = 512;    // threads per row in one block: a power of two up to 32, or the whole block
  int threads = 512;  // per block
  int cluster = 1;    // blocks per row
  int slots = 0;      // 16-byte vectors of a row and tensor per thread
  int64_t part = 0;   // 16-byte vectors of a row and tensor per block
  bool bulk = false;  // a block's part of a row arrives by one bulk copy
  int64_t blocks = 1;
  int64_t shared_bytes = 0;
  const char* why = "";

  constexpr bool block_a_row() const { return lanes == threads; }
};

// The sizes are those of cross_entropy's forward with a gradient, measured on one H200, which moves the same bytes in
// the same way (docs/design/cross_entropy.md): 8 vectors a lane of a warp, 16 a thread of a block, 52 KB a block.
constexpr SoftmaxConfig choose_softmax(const SoftmaxProblem& p) {
  constexpr int kMaxCluster = 8;  // the largest that every sm_90 grants without opting in
  constexpr int64_t kVectorsOfLane = 8, kVectorsOfThread = 16, kSharedOfBlock = 52 * 1024, kStaticShared = 2 * 1024;
  const int n = 16 / p.element_bytes;
  const int64_t vectors = p.aligned ? ceil_div(p.columns, n) : (p.columns + n - 2) / n + 1;
  SoftmaxConfig c;
  if (vectors <= kVectorsOfLane * 32) {
    c.lanes = vectors > 1 ? 2 : 1;
    while (c.lanes * kVectorsOfLane < vectors) c.lanes *= 2;
    c.threads = 128;
    c.why = "a row fits in the shared memory of a warp: no barrier";
  } else {
    const int64_t bytes = vectors * 16 * p.tensors;
    c.bulk = p.code_capability >= 90;
    while (c.bulk && c.cluster < kMaxCluster && bytes > c.cluster * kSharedOfBlock) c.cluster *= 2;
    const int64_t most = std::min(512, 1024 / c.cluster);  // 32 warps exchange the sums of a row
    c.threads =
        static_cast<int>(std::clamp((vectors / (c.cluster * kVectorsOfThread) + 32) / 64 * 64, int64_t{64}, most));
    c.lanes = c.threads;
    c.why = c.cluster > 1 ? "a row fits in the shared memory of a cluster of blocks"
                          : "a row fits in a block's shared memory";
  }
  c.part = ceil_div(vectors, c.cluster);
  c.slots = static_cast<int>(ceil_div(c.part, c.lanes));
  c.shared_bytes = int64_t{c.slots} * c.threads * 16 * p.tensors;
  if (c.shared_bytes > p.max_shared_bytes - kStaticShared) {
    c = {};
    c.part = vectors;
    c.why = "a row is longer than the shared memory: it is read twice";
  }
  c.blocks = ceil_div(p.rows, c.threads / c.lanes) * c.cluster;
  return c;
}

}  // namespace warpsmith
