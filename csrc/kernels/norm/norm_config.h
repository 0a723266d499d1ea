#pragma once
#include <algorithm>
#include <cstdint>

// A problem of the norm family and the kernel that runs it, printable through warpsmith.plan. norm_forward_config.h and
// norm_backward_config.h choose: pure functions of the problem.
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

// registers: a row lives in the registers of its threads (forward); warp: so do several of a warp, of a length that the
// compiler knows (forward); block: one row of layer_norm does in the registers of a block, whose threads the compiler
// knows (forward); shared: a row lies in the shared memory of its block, which holds more of them at once (forward);
// resident: so do a few rows of a block, all of a problem at once (forward); batches, ring: rows stream through shared
// memory and the gradients of the parameters stay in registers (backward; batches: rows of a block or cluster in
// tensors of one type, a few together); looped: a row is read twice, for rows too long for the chip or not made of
// vectors.
enum class NormKernel : uint8_t { registers, warp, block, shared, resident, batches, ring, looped };

constexpr const char* name(NormKernel k) {
  switch (k) {
    case NormKernel::registers: return "registers";
    case NormKernel::warp: return "warp";
    case NormKernel::block: return "block";
    case NormKernel::shared: return "shared";
    case NormKernel::resident: return "resident";
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
  const char* why = "";

  constexpr int groups() const { return threads / lanes; }  // rows that a block works on side by side
};

namespace norm_detail {

constexpr int64_t kMaxBlocks = 0x7fffffff;
constexpr int kVectorBytes = 16;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int vector_elems(const NormProblem& p) { return kVectorBytes / p.element_bytes; }

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

// A multiprocessor has 1 KiB of shared memory more than a block may take, and every block costs 1 KiB and its static
// part.
constexpr int64_t shared_bytes_a_block(const NormProblem& p, int together, int64_t static_bytes) {
  return (int64_t{p.max_shared_bytes} + 1024) / together - 1024 - static_bytes;
}

}  // namespace norm_detail

constexpr const char* kNormNotVectors =
    "rows are not made of aligned 16-byte vectors: each is read more than once, element by element";

}  // namespace warpsmith
