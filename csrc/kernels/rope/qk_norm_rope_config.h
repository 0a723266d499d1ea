#pragma once
#include <algorithm>
#include <cstdint>

// Which kernel runs a qk_norm_rope problem: pure functions, printable through warpsmith.plan("qk_norm_rope", ...).
namespace warpsmith {

struct QkNormRopeProblem {
  int64_t tokens = 0;  // of all batch entries
  int64_t q_heads = 0, k_heads = 0;
  int64_t head_dim = 0, rotary_dim = 0;
  int element_bytes = 2;
  bool aligned = true;  // every pointer, token and head begins on 16 bytes, rows of cos and sin too
  int multiprocessors = 132;
  int max_shared_bytes = 227 * 1024;  // dynamic shared memory that a block may have
};

// registers: a head lies in the registers of its threads; ring: heads of x and of the gradient stream through shared
// memory, and the gradients of the weights stay in registers; looped: a warp reads a head several times.
enum class QkNormRopeKernel : uint8_t { registers, ring, looped };

constexpr const char* name(QkNormRopeKernel k) {
  switch (k) {
    case QkNormRopeKernel::registers: return "registers";
    case QkNormRopeKernel::ring: return "ring";
    case QkNormRopeKernel::looped: return "looped";
  }
  return "unknown";
}

struct QkNormRopeConfig {
  QkNormRopeKernel kernel = QkNormRopeKernel::looped;
  int vector_elems = 1;    // of one memory access
  int rotating = 0;        // pairs of vectors of a head that are rotated
  int columns = 0;         // and those that are not
  int lanes = 32;          // threads of a head, a power of two
  int lane_bits = 5;       // its logarithm
  bool whole = false;      // every lane rotates two vectors, and (forward) every group of heads is full
  int heads_a_thread = 1;  // of one token: side by side (registers), one after the other (ring)
  int threads_a_token = 32;
  int slot_factor = 1;  // a thread times this, shifted, is its token among the block's
  int tokens_a_block = 1;
  int threads = 256;
  int64_t blocks = 1;
  int64_t parts = 1;  // blocks along the heads of a token (registers)
  int stages = 0;     // heads in the ring, the one in use included
  int64_t shared_bytes = 0;
  const char* why = "";
};

namespace qk_norm_rope_detail {
constexpr int kMaxThreads = 256, kVectorBytes = 16, kMaxLanes = 32;
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t head_groups(const QkNormRopeProblem& p, int heads_a_thread) {
  return ceil_div(p.q_heads, heads_a_thread) + ceil_div(p.k_heads, heads_a_thread);
}

// n / d as (n * factor) >> kSlotShift: the factor is off by less than d in 2^kSlotShift, so n * d must be less than
// that, and n * factor less than 2^32. 1,024 threads are.
constexpr int kSlotShift = 20;
constexpr int slot_factor(int threads_a_token) { return (1 << kSlotShift) / threads_a_token + 1; }

// Vectors and lanes of a head, or none (looped).
constexpr QkNormRopeConfig head_of(const QkNormRopeProblem& p) {
  QkNormRopeConfig c;
  const int vector = kVectorBytes / p.element_bytes;
  const bool vectors = p.aligned && p.head_dim % vector == 0 && p.rotary_dim % (2 * vector) == 0 &&
                       p.head_dim <= int64_t{2} * kMaxLanes * vector;
  c.vector_elems = vectors ? vector : 1;
  c.rotating = static_cast<int>(p.rotary_dim / 2 / c.vector_elems);
  c.columns = c.rotating + static_cast<int>(ceil_div((p.head_dim - p.rotary_dim) / c.vector_elems, 2));
  if (vectors && c.columns <= kMaxLanes) {
    c.kernel = QkNormRopeKernel::registers;
    c.lanes = 1, c.lane_bits = 0;
    while (c.lanes < c.columns) c.lanes *= 2, ++c.lane_bits;
    c.whole = c.lanes == c.rotating && c.lanes == c.columns;
  } else {
    c.vector_elems = 1;
    c.rotating = static_cast<int>(p.rotary_dim / 2);
    c.columns = c.rotating + static_cast<int>(ceil_div(p.head_dim - p.rotary_dim, 2));
    c.why = "a warp a head, element by element: not made of aligned 16-byte vectors, or too long for registers";
  }
  return c;
}

constexpr int64_t looped_blocks(const QkNormRopeProblem& p) {
  return std::max<int64_t>(1, ceil_div(p.tokens * (p.q_heads + p.k_heads), kMaxThreads / 32));
}
}  // namespace qk_norm_rope_detail

// Of the kernels that are compiled. Forward: a block's threads, and blocks for which a multiprocessor has registers.
constexpr int kQkNormRopeHeadsAThread = 4, kQkNormRopeForwardThreads = 160, kQkNormRopeForwardBlocks = 4;
// Backward: heads in the ring, the most threads of a block, and blocks as in the forward.
constexpr int kQkNormRopeBackwardHeads = 2, kQkNormRopeBackwardThreads = 512, kQkNormRopeBackwardBlocks = 1;

constexpr QkNormRopeConfig qk_norm_rope_forward_config(const QkNormRopeProblem& p, int heads_a_thread, int threads) {
  using namespace qk_norm_rope_detail;
  QkNormRopeConfig c = head_of(p);
  if (c.kernel == QkNormRopeKernel::looped) {
    c.blocks = std::min<int64_t>(looped_blocks(p), 0x7fffffff);
    return c;
  }
  c.heads_a_thread = heads_a_thread;
  c.whole = c.whole && p.q_heads % heads_a_thread == 0 && p.k_heads % heads_a_thread == 0;
  const int64_t a_token = std::max<int64_t>(1, head_groups(p, heads_a_thread)) * c.lanes;
  c.parts = ceil_div(a_token, threads);
  c.threads_a_token = static_cast<int>(ceil_div(ceil_div(a_token, c.parts), c.lanes) * c.lanes);
  if (c.parts > 1) c.threads_a_token = static_cast<int>(ceil_div(c.threads_a_token, 32) * 32);
  c.tokens_a_block = static_cast<int>(std::clamp<int64_t>(p.tokens, 1, std::max(1, threads / c.threads_a_token)));
  c.threads = static_cast<int>(ceil_div(int64_t{c.threads_a_token} * c.tokens_a_block, 32) * 32);
  c.blocks = ceil_div(p.tokens, c.tokens_a_block);
  c.slot_factor = slot_factor(c.threads_a_token);
  c.why = "a head in the registers of its threads, read once";
  return c;
}

// A thread takes a multiple of the heads that the ring has.
constexpr QkNormRopeConfig qk_norm_rope_backward_config(const QkNormRopeProblem& p, int least_heads, int threads) {
  using namespace qk_norm_rope_detail;
  QkNormRopeConfig c = head_of(p);
  if (c.kernel == QkNormRopeKernel::looped) {
    c.blocks = std::min(looped_blocks(p), int64_t{4} * p.multiprocessors);
    return c;
  }
  c.kernel = QkNormRopeKernel::ring;
  c.stages = kQkNormRopeBackwardHeads;
  c.heads_a_thread = least_heads;
  while (head_groups(p, c.heads_a_thread) * c.lanes > threads) c.heads_a_thread += c.stages;
  c.threads_a_token = static_cast<int>(std::max<int64_t>(1, head_groups(p, c.heads_a_thread))) * c.lanes;
  c.tokens_a_block = static_cast<int>(std::clamp<int64_t>(p.tokens, 1, threads / c.threads_a_token));
  c.threads = static_cast<int>(ceil_div(int64_t{c.threads_a_token} * c.tokens_a_block, 32) * 32);
  constexpr int64_t kSlots = 4;  // two vectors of x and two of the gradient
  c.slot_factor = slot_factor(c.threads_a_token);
  c.shared_bytes = kSlots * kVectorBytes * c.stages * kQkNormRopeBackwardThreads;
  const int64_t registers_for = kQkNormRopeBackwardThreads * kQkNormRopeBackwardBlocks / c.threads;
  const int64_t together = std::max<int64_t>(1, std::min(registers_for, p.max_shared_bytes / (c.shared_bytes + 1024)));
  c.blocks = std::min(ceil_div(p.tokens, c.tokens_a_block), together * p.multiprocessors);
  c.why = "persistent blocks, heads stream through shared memory, the weights and their gradients stay in registers";
  return c;
}

// Measured on one H200 (bf16, tools/gpu/sweep/qk_norm_rope.cu), fractions of a copy of the same bytes:
//   heads x D                          40 x 128    72 x 128    32 x 64
//   blocks of 96 threads                 0.970                   0.937
//   blocks of 160 (96 registers)         0.964       0.960       0.929
//   blocks of 320                        0.960       0.956       0.912
//   2 heads a thread, blocks of 160      0.963                   0.940
//   8 heads, blocks of 160               0.955       0.950       0.902
//   any problem's kernel                 0.947       0.937       0.897
constexpr QkNormRopeConfig choose_qk_norm_rope_forward(const QkNormRopeProblem& p) {
  constexpr int kSmall = 96;
  const QkNormRopeConfig c = qk_norm_rope_forward_config(p, kQkNormRopeHeadsAThread, kQkNormRopeForwardThreads);
  const bool small = c.kernel == QkNormRopeKernel::registers && c.parts == 1 && c.threads_a_token <= kSmall;
  return small ? qk_norm_rope_forward_config(p, kQkNormRopeHeadsAThread, kSmall) : c;
}

// Takes the fewest heads a thread that fill 7/8 of a block's threads and do not cost blocks. Measured as above:
//   heads a thread            2              4              6              8
//   40 x 128 (threads)    0.911 (480)    0.910 (480)    0.894 (512)    0.893 (480)
//   72 x 128              0.851 (288)    0.908 (448)    0.900 (416)    0.908 (512)
//   32 x 64               0.805 (512)    0.796 (512)    0.800 (512)    0.777 (512)
// Two blocks of 256 threads: 0.900 at 40 x 128, 0.816 at 32 x 64.
constexpr QkNormRopeConfig choose_qk_norm_rope_backward(const QkNormRopeProblem& p) {
  constexpr int kEnough = kQkNormRopeBackwardThreads / 8 * 7, kMostHeads = 8;
  QkNormRopeConfig best = qk_norm_rope_backward_config(p, kQkNormRopeBackwardHeads, kQkNormRopeBackwardThreads);
  if (best.kernel == QkNormRopeKernel::looped) return best;
  for (int heads = best.heads_a_thread + best.stages; heads <= kMostHeads && best.threads < kEnough;
       heads += best.stages) {
    const QkNormRopeConfig c = qk_norm_rope_backward_config(p, heads, kQkNormRopeBackwardThreads);
    if (c.threads > best.threads && c.blocks >= best.blocks) best = c;
  }
  return best;
}

// Rows of partial sums that a backward writes: one a block, or one a warp where each warp keeps its own.
constexpr int64_t qk_norm_rope_partial_rows(const QkNormRopeConfig& c) {
  return c.kernel == QkNormRopeKernel::ring ? c.blocks : c.blocks * (c.threads / 32);
}

}  // namespace warpsmith
