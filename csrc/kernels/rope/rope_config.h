#pragma once
#include <algorithm>
#include <cstdint>

#include "common/alignment.h"

// Which kernel runs a problem of rope or qk_norm_rope, and how threads divide the problem. Pure functions, printable
// through warpsmith.plan(op, ...).
namespace warpsmith {

struct RopeProblem {
  int64_t tokens = 0;  // over all batch entries
  int64_t q_heads = 0, k_heads = 0;
  int64_t head_dim = 0, rotary_dim = 0;
  int element_bytes = 2;
  bool aligned = true;   // every pointer, token, head and row of cos is aligned to 16 bytes
  bool inplace = false;  // rope: elements that are not rotated are not copied
  // qk_norm_rope:
  bool interleaved = false;  // pairs are neighbours
  bool own_weights = true;   // the weights have the activation's dtype
  int multiprocessors = 132;
  int max_shared_bytes = 227 * 1024;  // most dynamic shared memory per block
};

namespace rope_detail {
constexpr int kMaxThreads = 256, kVectorBytes = 16, kMaxLanes = 32;

// Groups of heads per token. A group's heads are all of q or all of k.
constexpr int64_t head_groups(const RopeProblem& p, int heads_a_group) {
  return ceil_div(p.q_heads, heads_a_group) + ceil_div(p.k_heads, heads_a_group);
}
constexpr bool made_of_vectors(const RopeProblem& p, int vector_elems) {
  return p.aligned && p.head_dim % vector_elems == 0 && p.rotary_dim % (2 * vector_elems) == 0;
}
}  // namespace rope_detail

// ---- rope

// A thread holds two vectors of a head that together hold whole pairs, for `heads_a_thread` heads of one token. It
// loads their angles once.
struct RopeConfig {
  int vector_elems = 1;  // elements per memory access
  int heads_a_thread = 1;
  int rotating = 0;                                  // pairs of vectors per head that are rotated
  int columns = 1;                                   // `rotating` plus the pairs of vectors that are copied
  int threads_x = 1, threads_y = 1, threads_z = 1;   // block: columns, groups of heads, tokens
  int64_t blocks_x = 1, blocks_y = 1, blocks_z = 1;  // grid: tokens, groups of heads, columns
  const char* why = "";
};

// The compiled kernels of rope.
struct RopeInstance {
  bool vectors;  // 16-byte vectors; otherwise element by element
  bool interleaved;
  int heads_a_thread;
  int blocks;  // blocks of kMaxThreads per multiprocessor that the registers allow

  constexpr bool matches(const RopeConfig& c, bool of_neighbours) const {
    return vectors == (c.vector_elems > 1) && (!vectors || interleaved == of_neighbours) &&
           heads_a_thread == c.heads_a_thread;
  }
};
constexpr RopeInstance kRopeInstances[] = {
    {true, false, 1, 6}, {true, true, 1, 6}, {true, false, 2, 3},  {true, true, 2, 3},
    {true, false, 4, 2}, {true, true, 4, 2}, {false, false, 2, 3},  // element by element both orders are one kernel
};

constexpr RopeConfig rope_config_of(const RopeProblem& p, int heads_a_thread, int threads) {
  using namespace rope_detail;
  RopeConfig c;
  const int vector = kVectorBytes / p.element_bytes;
  const bool vectors = made_of_vectors(p, vector);
  c.vector_elems = vectors ? vector : 1;
  c.heads_a_thread = heads_a_thread;
  c.rotating = static_cast<int>(p.rotary_dim / 2 / c.vector_elems);
  c.columns =
      c.rotating + (p.inplace ? 0 : static_cast<int>(ceil_div((p.head_dim - p.rotary_dim) / c.vector_elems, 2)));
  const int64_t columns = std::max(1, c.columns), groups = std::max<int64_t>(1, head_groups(p, heads_a_thread));
  c.blocks_z = ceil_div(columns, threads);
  c.threads_x = static_cast<int>(ceil_div(columns, c.blocks_z));
  c.blocks_y = ceil_div(groups, std::max(1, threads / c.threads_x));
  c.threads_y = static_cast<int>(ceil_div(groups, c.blocks_y));
  c.threads_z = static_cast<int>(
      std::clamp<int64_t>(p.tokens, 1, std::min(64, std::max(1, threads / (c.threads_x * c.threads_y)))));
  c.blocks_x = ceil_div(p.tokens, c.threads_z);
  c.why = vectors ? "16-byte vectors of both halves of a head, angles loaded once for several heads"
                  : "heads or rows of cos are not made of aligned 16-byte vectors: pair by pair";
  return c;
}

// Chooses the kernel. Measured on one H200 (bf16, 5ca5783:lab/rope.cu); the table is in
// docs/design/rope.md, fractions of a copy of the same bytes:
//
// - Heads of 128: two heads per thread if a token then fits in one block, which holds 64 heads (40 heads: 0.962);
//   otherwise four (72 heads: 0.966). A token divided over several blocks loses 0.03.
// - Short heads: one head per thread (32 x 64: 0.973; two heads 0.956, four 0.940).
// - Blocks of short heads: 64 threads if a token fills them, 0.01 to 0.03 better than others; in place 128 threads,
//   0.005 to 0.03 better.
constexpr RopeConfig choose_rope(const RopeProblem& p) {
  using namespace rope_detail;
  constexpr int kShortHead = 4;  // columns
  const RopeConfig c = rope_config_of(p, 2, kMaxThreads);
  if (c.vector_elems == 1) return c;
  const int64_t threads = c.columns * head_groups(p, 1);  // threads per token, with one head per thread
  if (c.columns <= kShortHead && threads <= kMaxThreads) {
    const bool small = p.inplace ? threads <= 128 : threads % 64 == 0;
    return rope_config_of(p, 1, !small ? kMaxThreads : p.inplace ? 128 : 64);
  }
  return c.blocks_y == 1 ? c : rope_config_of(p, 4, kMaxThreads);
}

// ---- qk_norm_rope

enum class QkNormRopeKernel : uint8_t {
  registers,  // forward: a head in the registers of its threads
  ring,       // backward: heads of x and dy stream through shared memory, weight gradients stay in registers
  looped,     // a warp reads a head several times
};

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
  int vector_elems = 1;    // elements per memory access
  int rotating = 0;        // pairs of vectors per head that are rotated
  int columns = 0;         // `rotating` plus the pairs of vectors that are not
  int lanes = 32;          // threads per head, a power of two
  int lane_bits = 5;       // log2(lanes)
  int known_lanes = 0;     // lanes, if the kernel is compiled for that number; otherwise 0
  int heads_a_thread = 1;  // heads of one token: side by side (registers), one after the other (ring)
  int threads_a_token = 32;
  int slot_factor = 1;  // (thread * slot_factor) >> kSlotShift is the index of the thread's token in the block
  int tokens_a_block = 1;
  int threads = 256;
  int64_t blocks = 1;
  int64_t parts = 1;  // blocks that share the heads of a token (registers)
  int stages = 0;     // heads in the ring, including the one in use
  int64_t shared_bytes = 0;
  const char* why = "";
};

// The compiled kernels of qk_norm_rope, beside the looped ones.
struct QkNormRopeInstance {
  bool interleaved;
  int head_dim;  // 64, 128: the lanes of such a head are known at compile time; 0: any lanes
  int heads;     // forward: per thread; backward: in the ring
  int threads;   // most threads per block
  int blocks;    // blocks of `threads` per multiprocessor that the registers allow

  constexpr int lanes(int element_bytes) const { return head_dim * element_bytes / 32; }
  constexpr bool matches(const QkNormRopeConfig& c, bool of_neighbours, int heads_of_c, int element_bytes) const {
    return interleaved == of_neighbours && lanes(element_bytes) == c.known_lanes && heads == heads_of_c &&
           c.threads <= threads;
  }
};
constexpr QkNormRopeInstance kQkNormRopeForward[] = {
    {false, 0, 4, 160, 4}, {false, 64, 4, 160, 4}, {false, 128, 4, 160, 4}, {true, 0, 4, 160, 4}};
constexpr QkNormRopeInstance kQkNormRopeBackward[] = {
    {false, 0, 2, 512, 1}, {false, 64, 2, 512, 1}, {false, 128, 2, 512, 1}, {true, 0, 2, 512, 1}};

namespace qk_norm_rope_detail {
using namespace rope_detail;

// n / d as (n * factor) >> kSlotShift. The factor exceeds 2^kSlotShift / d by less than 1, so n * d must be below
// 2^kSlotShift and n * factor below 2^32. For n and d up to 1,024 both are.
constexpr int kSlotShift = 20;
constexpr int slot_factor(int threads_a_token) { return (1 << kSlotShift) / threads_a_token + 1; }

// Vectors and lanes of a head. `looped` if the head is not made of vectors.
constexpr QkNormRopeConfig head_of(const RopeProblem& p) {
  QkNormRopeConfig c;
  const int vector = kVectorBytes / p.element_bytes;
  const bool vectors = made_of_vectors(p, vector) && p.head_dim <= int64_t{2} * kMaxLanes * vector;
  c.vector_elems = vectors ? vector : 1;
  c.rotating = static_cast<int>(p.rotary_dim / 2 / c.vector_elems);
  c.columns = c.rotating + static_cast<int>(ceil_div((p.head_dim - p.rotary_dim) / c.vector_elems, 2));
  if (vectors && c.columns <= kMaxLanes) {
    c.kernel = QkNormRopeKernel::registers;
    c.lanes = 1, c.lane_bits = 0;
    while (c.lanes < c.columns) c.lanes *= 2, ++c.lane_bits;
  } else {
    c.vector_elems = 1;
    c.rotating = static_cast<int>(p.rotary_dim / 2);
    c.columns = c.rotating + static_cast<int>(ceil_div(p.head_dim - p.rotary_dim, 2));
    c.why = "a warp a head, element by element: not made of aligned 16-byte vectors, or too long for registers";
  }
  return c;
}

// c.lanes, if a kernel of the list is compiled for that number; otherwise 0.
template <size_t kCount>
constexpr int known_lanes(const QkNormRopeInstance (&list)[kCount], const RopeProblem& p, const QkNormRopeConfig& c) {
  for (const QkNormRopeInstance& i : list)
    if (i.interleaved == p.interleaved && i.lanes(p.element_bytes) == c.lanes) return c.lanes;
  return 0;
}

constexpr int64_t looped_blocks(const RopeProblem& p) {
  return std::max<int64_t>(1, ceil_div(p.tokens * (p.q_heads + p.k_heads), kMaxThreads / 32));
}
}  // namespace qk_norm_rope_detail

constexpr QkNormRopeConfig qk_norm_rope_forward_config(const RopeProblem& p, int heads_a_thread, int threads) {
  using namespace qk_norm_rope_detail;
  QkNormRopeConfig c = head_of(p);
  if (c.kernel == QkNormRopeKernel::looped) {
    c.blocks = std::min<int64_t>(looped_blocks(p), 0x7fffffff);
    return c;
  }
  c.heads_a_thread = heads_a_thread;
  // Kernels compiled for a number of lanes also require that every lane rotates two vectors and that every group is
  // full.
  const bool whole = c.lanes == c.rotating && c.lanes == c.columns && p.own_weights &&
                     p.q_heads % heads_a_thread == 0 && p.k_heads % heads_a_thread == 0;
  c.known_lanes = whole ? known_lanes(kQkNormRopeForward, p, c) : 0;
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

// A thread takes a multiple of the heads in the ring, at least `least_heads`.
constexpr QkNormRopeConfig qk_norm_rope_backward_config(const RopeProblem& p, int least_heads, int threads) {
  using namespace qk_norm_rope_detail;
  constexpr QkNormRopeInstance kKernel = kQkNormRopeBackward[0];
  QkNormRopeConfig c = head_of(p);
  if (c.kernel == QkNormRopeKernel::looped) {
    c.blocks = std::min(looped_blocks(p), int64_t{4} * p.multiprocessors);
    return c;
  }
  c.kernel = QkNormRopeKernel::ring;
  c.known_lanes = known_lanes(kQkNormRopeBackward, p, c);
  c.stages = kKernel.heads;
  c.heads_a_thread = least_heads;
  while (head_groups(p, c.heads_a_thread) * c.lanes > threads) c.heads_a_thread += c.stages;
  c.threads_a_token = static_cast<int>(std::max<int64_t>(1, head_groups(p, c.heads_a_thread))) * c.lanes;
  c.tokens_a_block = static_cast<int>(std::clamp<int64_t>(p.tokens, 1, threads / c.threads_a_token));
  c.threads = static_cast<int>(ceil_div(int64_t{c.threads_a_token} * c.tokens_a_block, 32) * 32);
  constexpr int64_t kSlots = 4;  // two vectors of x and two of the gradient
  c.slot_factor = slot_factor(c.threads_a_token);
  c.shared_bytes = kSlots * kVectorBytes * c.stages * kKernel.threads;
  const int64_t registers_for = kKernel.threads * kKernel.blocks / c.threads;
  const int64_t together = std::max<int64_t>(1, std::min(registers_for, p.max_shared_bytes / (c.shared_bytes + 1024)));
  c.blocks = std::min(ceil_div(p.tokens, c.tokens_a_block), together * p.multiprocessors);
  c.why = "persistent blocks, heads stream through shared memory, the weights and their gradients stay in registers";
  return c;
}

// Measured on one H200 (bf16, 5ca5783:lab/qk_norm_rope.cu), fractions of a copy of the same bytes:
//   heads x D                             40 x 128    72 x 128    32 x 64
//   blocks of 96 threads                  0.970                   0.937
//   blocks of 160 (96 registers)          0.964       0.960       0.929
//   blocks of 320                         0.960       0.956       0.912
//   2 heads per thread, blocks of 160     0.963                   0.940
//   8 heads, blocks of 160                0.955       0.950       0.902
//   lanes not known at compile time       0.947       0.937       0.897
constexpr QkNormRopeConfig choose_qk_norm_rope_forward(const RopeProblem& p) {
  constexpr int kSmall = 96, kHeads = kQkNormRopeForward[0].heads, kThreads = kQkNormRopeForward[0].threads;
  const QkNormRopeConfig c = qk_norm_rope_forward_config(p, kHeads, kThreads);
  const bool small = c.kernel == QkNormRopeKernel::registers && c.parts == 1 && c.threads_a_token <= kSmall;
  return small ? qk_norm_rope_forward_config(p, kHeads, kSmall) : c;
}

// Takes the fewest heads per thread that fill 7/8 of a block's threads without fewer blocks. Measured as above:
//   heads per thread          2              4              6              8
//   40 x 128 (threads)    0.911 (480)    0.910 (480)    0.894 (512)    0.893 (480)
//   72 x 128              0.851 (288)    0.908 (448)    0.900 (416)    0.908 (512)
//   32 x 64               0.805 (512)    0.796 (512)    0.800 (512)    0.777 (512)
// Two blocks of 256 threads: 0.900 at 40 x 128, 0.816 at 32 x 64.
constexpr QkNormRopeConfig choose_qk_norm_rope_backward(const RopeProblem& p) {
  constexpr int kHeads = kQkNormRopeBackward[0].heads, kThreads = kQkNormRopeBackward[0].threads;
  constexpr int kEnough = kThreads / 8 * 7, kMostHeads = 8;
  QkNormRopeConfig best = qk_norm_rope_backward_config(p, kHeads, kThreads);
  if (best.kernel == QkNormRopeKernel::looped) return best;
  for (int heads = best.heads_a_thread + best.stages; heads <= kMostHeads && best.threads < kEnough;
       heads += best.stages) {
    const QkNormRopeConfig c = qk_norm_rope_backward_config(p, heads, kThreads);
    if (c.threads > best.threads && c.blocks >= best.blocks) best = c;
  }
  return best;
}

// Rows of partial sums that a backward writes: one per block (ring) or one per warp (looped).
constexpr int64_t qk_norm_rope_partial_rows(const QkNormRopeConfig& c) {
  return c.kernel == QkNormRopeKernel::ring ? c.blocks : c.blocks * (c.threads / 32);
}

}  // namespace warpsmith
