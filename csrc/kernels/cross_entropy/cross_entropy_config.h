#pragma once
#include <algorithm>
#include <cstdint>

// Which kernel runs a cross_entropy problem: pure functions of the problem, printable through
// warpsmith.plan("cross_entropy", ...).
namespace warpsmith {

struct CrossEntropyProblem {
  int64_t rows = 0;
  int64_t classes = 0;
  int element_bytes = 2;
  bool aligned = true;   // every row starts on 16 bytes
  bool general = false;  // softcap, label smoothing or entropy: more arithmetic and registers an element
  int compute_capability = 90;
};

// resident: a row lives in the registers of its threads, those of part of a warp, of a block or of a cluster of blocks;
// looped: a row is read once for its sums and once more for its gradient.
enum class CrossEntropyKernel : uint8_t { resident, looped };

constexpr const char* name(CrossEntropyKernel k) {
  return k == CrossEntropyKernel::resident ? "resident" : "looped";
}

struct CrossEntropyConfig {
  CrossEntropyKernel kernel = CrossEntropyKernel::looped;
  int vectors = 1;    // 16-byte vectors of a row that one thread holds (resident)
  int lanes = 512;    // threads of a row in one block: a power of two up to 32, or the whole block
  int threads = 512;  // of a block
  int cluster = 1;    // blocks of a row
  int64_t blocks = 1;
  const char* why = "";

  constexpr bool block_a_row() const { return lanes == threads; }
  constexpr int groups() const { return threads / lanes; }  // rows that a block works on side by side
};

namespace cross_entropy_detail {

constexpr int64_t kMaxBlocks = 0x7fffffff;
constexpr int kMaxCluster = 8;  // what every sm_90 grants without opting in

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Aligned 16-byte vectors that a row touches; one more if it may begin inside one.
constexpr int64_t vectors_of(const CrossEntropyProblem& p) {
  const int n = 16 / p.element_bytes;
  return p.aligned ? ceil_div(p.classes, n) : (p.classes + n - 2) / n + 1;
}

constexpr void spread(CrossEntropyConfig& c, int64_t rows) {
  c.blocks = std::min(ceil_div(rows, c.groups()), kMaxBlocks / c.cluster) * c.cluster;
}

}  // namespace cross_entropy_detail

constexpr CrossEntropyConfig choose_cross_entropy_forward(const CrossEntropyProblem& p) {
  using namespace cross_entropy_detail;
  const int64_t vectors = vectors_of(p);
  CrossEntropyConfig c;
  c.kernel = CrossEntropyKernel::resident;
  if (vectors <= 128) {
    c.vectors = vectors <= 32 ? 1 : 4;
    c.lanes = 1;
    while (c.lanes < 32 && int64_t{c.lanes} * c.vectors < vectors) c.lanes *= 2;
    c.threads = 128;
    c.why = "a row fits in the registers of a warp: no barrier";
  } else {
    constexpr int kPreferredThreads = 256;
    const bool clusters = p.compute_capability >= 90;
    c.vectors = p.general || vectors <= 1024 ? 4 : 8;
    while (clusters && c.cluster < kMaxCluster && int64_t{c.cluster} * c.vectors * kPreferredThreads < vectors)
      c.cluster *= 2;
    const int64_t threads = ceil_div(ceil_div(vectors, int64_t{c.cluster} * c.vectors), 32) * 32;
    c.lanes = c.threads = static_cast<int>(std::min<int64_t>(threads, 1024));
    c.why = c.cluster > 1 ? "a row fits in the registers of a cluster of blocks" : "a row fits in a block's registers";
    if (threads > 1024) {
      c = {};
      c.why = "a row is longer than the registers of a cluster: it is read twice";
    }
  }
  spread(c, p.rows);
  return c;
}

// The backward is one kernel: threads of a row so many that each has a few vectors of it.
constexpr CrossEntropyConfig choose_cross_entropy_backward(const CrossEntropyProblem& p) {
  using namespace cross_entropy_detail;
  const int64_t vectors = vectors_of(p);
  CrossEntropyConfig c;
  c.lanes = 1;
  while (c.lanes < 512 && int64_t{c.lanes} * 2 < vectors) c.lanes *= 2;
  c.threads = std::max(c.lanes, 256);
  c.why = "element by element";
  spread(c, p.rows);
  return c;
}

}  // namespace warpsmith
