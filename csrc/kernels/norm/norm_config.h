#pragma once
#include <algorithm>
#include <cstdint>

// Which kernel runs a problem of the norm family: pure functions of the problem, printable through warpsmith.plan.
namespace warpsmith {

struct NormProblem {
  int64_t rows = 0;
  int64_t columns = 0;
  int element_bytes = 2;   // of x and y
  int residual_bytes = 0;  // of the residual; 0 where the op has none
  bool layer = false;      // two sums a row and two gradients of parameters, instead of one
  bool aligned = true;     // every pointer and row start lies on 16 bytes
  int multiprocessors = 132;
  int max_shared_bytes = 227 * 1024;  // dynamic shared memory that a block may have
  bool clusters = true;               // the device has them (sm_90 and newer)
  bool affine_as_x = true;  // forward: weight (and bias) are given, stored as x, and nothing is added to the weight
};

namespace norm {

// The threads that share a row: an aligned group of 1 to 32 lanes, a block, or the blocks of a cluster.
enum class Scope : uint8_t { group, block, cluster };

constexpr int kMaxCluster = 8;

}  // namespace norm

// registers: a row lives in the registers of its threads (forward); shared: it lies in the shared memory of its block,
// which holds more rows at once (forward); batches, ring: rows stream through shared memory and the gradients of the
// parameters stay in registers (backward; batches: a block's rows in tensors of one type, a few together); looped: a
// row is read twice, for rows too long for the chip or not made of vectors.
enum class NormKernel : uint8_t { registers, shared, batches, ring, looped };

constexpr const char* name(NormKernel k) {
  switch (k) {
    case NormKernel::registers: return "registers";
    case NormKernel::shared: return "shared";
    case NormKernel::batches: return "batches";
    case NormKernel::ring: return "ring";
    case NormKernel::looped: return "looped";
  }
  return "unknown";
}

constexpr const char* name(norm::Scope s) {
  switch (s) {
    case norm::Scope::group: return "group";
    case norm::Scope::block: return "block";
    case norm::Scope::cluster: return "cluster";
  }
  return "unknown";
}

struct NormConfig {
  NormKernel kernel = NormKernel::looped;
  norm::Scope scope = norm::Scope::group;
  int vector_elems = 1;  // elements of one memory access
  int vectors = 1;       // vectors of a row that one thread holds
  int rows = 1;          // that a group, block or cluster works on together
  int stages = 0;        // rows or batches in the ring; kernel ring: the one in use included
  int lanes = 32;        // threads of a row in a block: a power of two up to 32, or all
  int threads = 256;     // of a block
  int cluster = 1;       // blocks that share a row
  int64_t blocks = 1;
  int64_t shared_bytes = 0;
  bool weights_with_row = false;  // asked for together, not when y is made (shared)
  const char* why = "";

  constexpr int groups() const { return threads / lanes; }  // rows that a block works on side by side
};

// Batches: a thread with so many vectors has its weights in shared memory, because they stay in registers themselves.
// With one there is room for both, with four the vectors do not stay.
constexpr int kNormSharedWeightVectors = 2;

namespace norm_detail {

constexpr int64_t kMaxBlocks = 0x7fffffff;
constexpr int kVectorBytes = 16;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int vector_elems(const NormProblem& p) { return kVectorBytes / p.element_bytes; }

// Of the backward's ring: vectors of the wider type.
constexpr int wide_vector_elems(const NormProblem& p) {
  return kVectorBytes / std::max(p.element_bytes, p.residual_bytes);
}

constexpr bool vectors_fit(const NormProblem& p) { return p.aligned && p.columns % vector_elems(p) == 0; }

// The least power of two that leaves at most `most` vectors a thread, at most 32.
constexpr int lanes_of(int64_t vectors, int most) {
  int lanes = 1;
  while (lanes < 32 && int64_t{lanes} * most < vectors) lanes *= 2;
  return lanes;
}

constexpr int threads_of(int64_t vectors, int vectors_a_thread) {
  return static_cast<int>(ceil_div(ceil_div(vectors, vectors_a_thread), 32) * 32);
}

constexpr NormConfig looped(const NormProblem& p, int64_t most_blocks, const char* why) {
  NormConfig c;
  c.vector_elems = vectors_fit(p) ? 4 : 1;
  const int64_t accesses = p.columns / c.vector_elems;
  c.lanes = accesses <= 1024 ? 32 : accesses <= 4096 ? 512 : 1024;
  c.threads = c.lanes == 32 ? 256 : c.lanes;
  c.scope = c.lanes == 32 ? norm::Scope::group : norm::Scope::block;
  c.blocks = std::min(ceil_div(p.rows, c.groups()), most_blocks);
  c.why = why;
  return c;
}

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

// Slots of a thread's vector in the ring: dy, s and, where there is a residual, its gradient.
constexpr int ring_pieces(const NormProblem& p) { return p.residual_bytes ? 3 : 2; }

// A multiprocessor has 1 KiB of shared memory more than a block may take, and every block costs 1 KiB and its static
// part.
constexpr int64_t shared_bytes_a_block(const NormProblem& p, int together, int64_t static_bytes) {
  return (int64_t{p.max_shared_bytes} + 1024) / together - 1024 - static_bytes;
}

// Rows in shared memory, of the lengths at which a sweep found them ahead of registers (choose_norm_forward) and of no
// others: 16-bit rows of 8,192 and 12,288 columns. The number of rows must not change a row's bits: at 8,192, where
// registers take those that they hold all at once, both kernels add in one order; at 12,288 they would not, so that all
// are here, with few blocks a multiprocessor where not all rows are resident, and where even registers would hold all.
// 0 vectors elsewhere.
constexpr NormConfig shared(const NormProblem& p, int64_t vectors, int threads) {
  NormConfig c;
  c.vectors = 0;
  if (p.element_bytes != 2 || p.residual_bytes || !p.affine_as_x || !p.clusters) return c;
  if (vectors != 1024 && vectors != 1536) return c;
  const bool widest = vectors == 1536;
  const int64_t row_bytes = vectors * kVectorBytes, many = int64_t{widest ? 3 : 4} * p.multiprocessors;
  if (!widest && p.rows <= many) return c;
  const auto fit = [&](int together) { return shared_bytes_a_block(p, together, 128) >= row_bytes; };
  c.weights_with_row = widest ? p.rows <= many || p.rows > int64_t{8} * p.multiprocessors || !fit(8) : p.layer;
  if (!fit(c.weights_with_row ? 4 : 8)) return c;
  c.kernel = NormKernel::shared;
  c.scope = norm::Scope::block;
  c.vector_elems = vector_elems(p);
  c.vectors = static_cast<int>(vectors / threads);
  c.lanes = c.threads = threads;
  c.blocks = p.rows;
  c.shared_bytes = row_bytes;
  c.why = "a row lies in shared memory, which holds more of them at once than registers";
  return c;
}

// A block a row; `together` blocks a multiprocessor or fewer, at most `stages` deep; 0 stages if not even one fits.
constexpr NormConfig batches(const NormProblem& p, int vectors, int rows, int together, int stages) {
  NormConfig c;
  c.kernel = NormKernel::batches;
  c.scope = norm::Scope::block;
  c.vector_elems = vector_elems(p);
  c.vectors = vectors, c.rows = rows;
  c.threads = c.lanes = threads_of(p.columns / c.vector_elems, vectors);
  const int64_t stage_bytes = int64_t{ring_pieces(p)} * kVectorBytes * vectors * rows * c.threads;
  const int64_t weight_bytes =
      vectors == kNormSharedWeightVectors ? int64_t{4} * c.vector_elems * vectors * c.threads : 0;
  constexpr int64_t kStaticBytes = 1024;  // dynamic shared memory begins at a whole KiB
  const auto room = [&](int blocks) { return shared_bytes_a_block(p, blocks, kStaticBytes) - weight_bytes; };
  while (together > 1 && room(together) < stage_bytes) --together;
  c.stages = static_cast<int>(std::clamp<int64_t>(room(together) / stage_bytes, 0, stages));
  c.shared_bytes = c.stages * stage_bytes + weight_bytes;
  c.blocks = std::min(p.rows, int64_t{together} * p.multiprocessors);
  c.why = "one block a row: batches of rows stream through shared memory and stay in registers";
  return c;
}

// `together` blocks a multiprocessor or fewer, at most `stages` deep; 0 stages if even two do not fit.
constexpr NormConfig ring(const NormProblem& p, norm::Scope scope, int lanes, int vectors, int rows, int threads,
                          int cluster, int together, int stages, const char* why) {
  NormConfig c;
  c.kernel = NormKernel::ring;
  c.scope = scope;
  c.vector_elems = wide_vector_elems(p);
  c.lanes = lanes, c.vectors = vectors, c.rows = rows, c.threads = threads, c.cluster = cluster;
  const int64_t stage_bytes = int64_t{ring_pieces(p)} * kVectorBytes * vectors * rows * threads;
  const int64_t static_bytes = (scope == norm::Scope::cluster ? 1536 : 384) * int64_t{rows} * (p.layer ? 2 : 1);
  while (together > 1 && shared_bytes_a_block(p, together, static_bytes) / stage_bytes < 2) --together;
  c.stages = static_cast<int>(std::min<int64_t>(stages, shared_bytes_a_block(p, together, static_bytes) / stage_bytes));
  if (c.stages < 2) c.stages = 0;
  c.shared_bytes = c.stages * stage_bytes;
  // Parts of a chip have no room for a last whole cluster: of 4 and 8 blocks an H200 holds 62 where 66 would fit its
  // multiprocessors, and those that wait take as long again as all the others.
  const int64_t blocks = int64_t{together} * p.multiprocessors * (cluster > 2 ? 15 : 16) / 16;
  const int64_t units = std::max<int64_t>(1, blocks / cluster);
  c.blocks = std::min(ceil_div(p.rows, int64_t{rows} * c.groups()), units) * cluster;
  c.why = why;
  return c;
}

}  // namespace norm_detail

constexpr const char* kNormNotVectors =
    "rows are not made of aligned 16-byte vectors: each is read more than once, element by element";

// Vectors that a thread of a block holds, and threads that a block may have: what registers allow without spilling.
// Forward: of blocks up to kNormPreferredThreads, three share a multiprocessor.
constexpr int kNormBlockVectors = 4, kNormBlockThreads = 512, kNormPreferredThreads = 384;
// Forward, rows in shared memory.
constexpr int kNormSharedThreads = 256;
// Rows of 65 to 96 vectors that a warp works on together (forward).
constexpr int norm_rows_of_three_vectors(bool layer, bool residual) { return layer && !residual ? 2 : 1; }
// Backward, a block a row of the ring.
constexpr int kNormRingVectors = 2;
constexpr int norm_ring_threads(bool layer) { return layer ? 512 : 768; }
// Backward, batches: threads that a block may have with two vectors each. With a residual, rms is better in the ring.
constexpr int norm_batch_threads_of_two(bool residual) { return residual ? 512 : 768; }

// Forward. One H200 (2026-11-22, bf16, through Python), fractions of a copy of the same bytes:
//   columns                   128   768   4096  8192  12288
//   rms                       0.93  0.99  1.00  0.97  0.98
//   layer                           0.94  0.97  0.93  0.92
//   rms with residual               0.97  0.97  0.97  0.96
// Two vectors a thread are better than four for rms up to 4096 columns (0.98, 0.96), worse for layer (0.83); six lost
// everywhere. Clusters for rows that a block can hold lost 5 % and more. 8192 and 12288 columns without a residual are
// of before rows in shared memory, which the sweep found ahead of registers, kernels alone: rms 38.8 to 39.3 us,
// registers 40.0 to 40.5 (4096x8192), and 18.8, 19.9 (1024x12288); layer 40.0, 40.9, and 19.8 to 20.0, 20.6. With 4
// blocks a multiprocessor and the weights asked for with the row 19.4 and 20.5 (1024x12288).
constexpr NormConfig choose_norm_forward(const NormProblem& p) {
  using namespace norm_detail;
  using norm::Scope;
  if (!vectors_fit(p)) return looped(p, kMaxBlocks, kNormNotVectors);
  const int64_t vectors = p.columns / vector_elems(p);
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
    const int each = !p.layer && !p.residual_bytes && vectors <= 512 ? 2 : 4, threads = threads_of(vectors, each);
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

// Backward, tensors of one type: rows of more than 32 vectors in batches, where those were measured as the better. One
// H200 (2026-11-21, bf16, kernels alone in a sweep), fractions of a copy of the same bytes, in brackets the bodies
// before:
//   columns                   768          4096         8192         12288
//   rms                       0.94 (0.89)  0.94 (0.95)  0.87 (0.87)  0.73 (0.71)
//   layer                     0.91 (0.82)  0.93 (0.84)  0.81 (0.75)  0.62 (0.57)
//   rms with residual         0.94 (0.94)  0.96 (0.93)
//   layer, residual, dropout               0.94 (0.85)  0.87 (0.77)
// One block a multiprocessor, or its threads in smaller ones, beat two: each writes a row of partial sums for each
// gradient, and a megabyte of those costs 0.8 us. One row at a time, three deep, without a residual, and two rows where
// they are short; with a residual two rows and a ring of one stage, which is empty again before the exchange.
constexpr NormConfig choose_norm_batches(const NormProblem& p) {
  using namespace norm_detail;
  const int64_t vectors = p.columns / vector_elems(p);
  const bool residual = p.residual_bytes != 0;
  if (vectors <= 128) {
    const int threads = threads_of(vectors, 1);
    if (p.layer || residual) return batches(p, 1, 2, 480 / threads, residual ? 1 : 2);
    return batches(p, 1, 2, static_cast<int>(ceil_div(288, threads)), 3);
  }
  if (vectors <= 512) {
    const int together = 512 / threads_of(vectors, 1);
    return residual ? batches(p, 1, 2, together, 1) : batches(p, 1, 1, together, 3);
  }
  if ((p.layer || !residual) && vectors <= 2 * norm_batch_threads_of_two(residual))
    return batches(p, 2, 1, 1, residual ? 1 : 2);
  if (!p.layer && !residual && vectors <= 2048) return batches(p, 4, 1, 1, 2);
  return {};
}

// Backward. The ring: rows of up to 32 vectors (0.84 for rms, 0.80 for layer, 0.85 for rms with residual at 128
// columns), rows that only a cluster can hold, and residuals wider than the activation. Float beside bfloat16, layer,
// 768 columns: 0.97 in blocks of 96 threads with 4 stages, 0.95 in warps, 0.71 with vectors of 8.
constexpr NormConfig choose_norm_backward(const NormProblem& p) {
  using namespace norm_detail;
  using norm::Scope;
  const int64_t looped_blocks = int64_t{4} * p.multiprocessors;
  if (!vectors_fit(p)) return looped(p, looped_blocks, kNormNotVectors);
  const int64_t vectors = p.columns / wide_vector_elems(p);
  const bool wide = p.residual_bytes > p.element_bytes;
  if (vectors <= 32 || (wide && vectors <= 128)) {
    const bool narrow = vectors <= 32;
    const int lanes = narrow ? lanes_of(vectors, 1) : 32, threads = narrow ? 128 : 256;
    const NormConfig c =
        ring(p, Scope::group, lanes, static_cast<int>(ceil_div(vectors, lanes)), 1, threads, 1, narrow ? 6 : 1, 2,
             "a row fits in one warp: rows stream through shared memory without a barrier");
    if (c.stages) return c;
  }
  if (!wide && vectors > 32) {
    const NormConfig c = choose_norm_batches(p);
    if (c.stages) return c;
  }
  const bool in_block = wide || (!p.layer && p.residual_bytes);
  if (in_block && vectors <= int64_t{kNormRingVectors} * norm_ring_threads(p.layer)) {
    const int threads = threads_of(vectors, kNormRingVectors);
    const NormConfig c =
        ring(p, Scope::block, threads, kNormRingVectors, 1, threads, 1, std::max(1, std::min(4, 512 / threads)),
             wide ? 4 : 3, "one block a row: rows stream through shared memory");
    if (c.stages) return c;
  }
  if (p.clusters && vectors <= int64_t{512} * norm::kMaxCluster) {
    const int threads = threads_of(ceil_div(vectors, norm::kMaxCluster), 2);
    const NormConfig c = ring(p, Scope::cluster, threads, 2, 2, threads, norm::kMaxCluster, std::max(1, 384 / threads),
                              3, "a cluster a row: each block takes a part of the columns of its rows");
    if (c.stages) return c;
  }
  return looped(p, looped_blocks, "a row of the inputs does not fit on the chip: each is read twice");
}

// Rows of partial sums that a backward writes: one a block or cluster, or one a group where groups do not share theirs.
constexpr int64_t norm_partial_rows(const NormConfig& c) {
  return c.kernel == NormKernel::looped ? c.blocks * c.groups() : c.blocks / c.cluster;
}

// The second stage. One H200 (2026-11-21, bf16): 256 threads a block were within 0.3 us of the best for 128 to 8,192
// columns, 512 for 12,288; 1,024 cost up to 8 us, whole warps of one row (tiles of 32 vectors) up to 10 us.
struct NormSumConfig {
  int vector_elems = 1;
  int tile_vectors = 4;  // of a block's columns
  int threads = 256;
};

constexpr NormSumConfig choose_norm_sum(int64_t columns) {
  NormSumConfig c;
  c.vector_elems = columns % 4 == 0 ? 4 : 1;
  const int64_t vectors = columns / c.vector_elems;
  c.tile_vectors = vectors <= 256 ? 4 : vectors <= 2048 ? 8 : 16;
  c.threads = c.tile_vectors == 16 ? 512 : 256;
  return c;
}

}  // namespace warpsmith
