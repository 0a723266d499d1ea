#pragma once
#include <algorithm>
#include <cstdint>

#include "common/alignment.h"

// The norm family's problem and kernel config, printable through warpsmith.plan. The choosers are pure functions of the
// problem: forward_config.h and backward_config.h.
namespace warpsmith {

struct NormProblem {
  int64_t rows = 0;
  int64_t columns = 0;
  int element_bytes = 2;   // of x and y
  int residual_bytes = 0;  // of the residual; 0: the op has none
  bool layer = false;      // layer_norm: two sums per row and two parameter gradients instead of one
  bool dropout = false;
  bool aligned = true;  // every pointer and row start is a multiple of 16 bytes
  int multiprocessors = 132;
  int max_shared_bytes = 227 * 1024;  // most dynamic shared memory per block
  int code_capability = 90;           // architecture of the code that runs: clusters and bulk copies need 90
  bool affine_as_x = true;            // forward: a weight (and bias) is given, in the dtype of x, without an offset
  bool as_added = false;              // forward without a residual: adds up a row in the order of the op with one

  constexpr bool clusters() const { return code_capability >= 90; }
};

namespace norm {

// The threads that share a row.
enum class Scope : uint8_t {
  group,    // an aligned group of 1 to 32 lanes of a warp
  block,    // a block
  cluster,  // the blocks of a cluster
};

constexpr int kMaxCluster = 8;

// What a thread of the backward kernel `batches` keeps of a row in registers between the row's sums and its gradients.
enum class Keep : uint8_t {
  nothing,   // the thread reads the ring twice
  elements,  // dy and s as read
  products,  // dy * weight and s_hat: twice the registers, fewer instructions
};

}  // namespace norm

enum class NormKernel : uint8_t {
  registers,  // forward: one row per thread group, block or cluster, in registers; length known at run time
  warp,       // forward: several rows per warp, in registers; length known at compile time
  block,      // forward of layer_norm: one row per block, in registers; threads known at compile time
  shared,     // forward: one row per block, in shared memory, so that more rows are in flight
  resident,   // forward: a few rows per block, in shared memory; all rows of the problem at once
  batches,    // backward: rows of a block or cluster, a few at once, through shared memory; tensors of one dtype
  ring,       // backward: rows of a group, block or cluster through shared memory
  looped,     // both: each row is read more than once; too long for the chip, or not made of 16-byte vectors
};

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

// What the compiler knows of a kernel: the kernel's template argument, through norm::Compiled. NormForwardInstances and
// NormBackwardInstances list an op's instances. The choosers pick from these lists; the launchers instantiate them.
struct NormInstance {
  NormKernel kernel = NormKernel::looped;
  norm::Scope scope = norm::Scope::group;
  int vectors = 1;    // vectors of a row that one thread holds
  int rows = 1;       // rows that a group, block or cluster works on together
  int lanes = 0;      // threads per row; 0: known at run time
  bool fills = true;  // warp, block, shared, resident: rows have exactly lanes * vectors vectors; false: at most that
  // shared: weight and bias are requested together with the row and wait in registers.
  bool weight_with_x = false;
  norm::Keep keep = norm::Keep::nothing;  // batches
  bool shared_weight = false;             // batches: weights are in shared memory; registers hold `keep`
  int cluster = 1;                        // batches: most blocks per cluster
  int max_threads = 0;                    // launch bounds: most threads per block
  int min_blocks_before_sm90 = 0;         // min_blocks before sm_90, where min_blocks would spill; 0: the same
  int min_blocks = 1;                     // launch bounds: blocks per multiprocessor that the registers must allow

  constexpr int capacity() const { return lanes * vectors; }
};

namespace norm {

// An instance as a type. nvcc 13.0 rejects a namespace's class as a kernel's template argument, but accepts a type made
// of scalars.
template <auto... kFields> struct Compiled {
  static constexpr NormInstance instance{kFields...};
};

}  // namespace norm

struct NormConfig {
  NormKernel kernel = NormKernel::looped;
  norm::Scope scope = norm::Scope::group;
  int vector_elems = 1;  // elements per memory access
  int vectors = 1;       // vectors of a row that one thread holds
  int rows = 1;          // rows that a group, block or cluster works on together
  int stages = 0;        // rows or batches in the ring; kernel ring: including the one in use
  int lanes = 32;        // threads per row in a block: a power of two up to 32, or all
  int threads = 256;     // threads per block
  int cluster = 1;       // blocks that share a row
  int64_t blocks = 1;
  int64_t shared_bytes = 0;
  int instance = -1;  // index in the list of compiled kernels; -1: looped, which is not in the list
  const char* why = "";

  constexpr int groups() const { return threads / lanes; }  // rows that a block works on side by side
  // The kernel exists only with bulk copies. (Cluster kernels count their sums on mbarriers or use cluster barriers.)
  constexpr bool bulk_copies() const { return kernel == NormKernel::resident; }
};

namespace norm_detail {

constexpr int64_t kMaxBlocks = 0x7fffffff;
constexpr int kVectorBytes = 16;

struct Found {
  NormInstance instance;
  int place = -1;
  constexpr explicit operator bool() const { return place >= 0; }
};

// The first instance of a list for which is(instance) holds. each(problem, use) calls use(instance) for each instance;
// it reads only what an op's types decide: element_bytes, residual_bytes, layer and dropout.
template <class Each, class Is> constexpr Found first_of(const Each& each, const NormProblem& p, const Is& is) {
  Found found;
  int place = 0;
  each(p, [&](const NormInstance& instance) {
    if (!found && is(instance)) found = {instance, place};
    ++place;
  });
  return found;
}

constexpr int vector_elems(const NormProblem& p) { return kVectorBytes / p.element_bytes; }

constexpr bool vectors_fit(const NormProblem& p) { return p.aligned && p.columns % vector_elems(p) == 0; }

// The least power of two, at most 32, that leaves at most `most` vectors per thread.
constexpr int lanes_of(int64_t vectors, int most) {
  int lanes = 1;
  while (lanes < 32 && int64_t{lanes} * most < vectors) lanes *= 2;
  return lanes;
}

// Threads in whole warps; the cap is far above what a block may have.
constexpr int threads_of(int64_t vectors, int vectors_a_thread) {
  return static_cast<int>(std::min<int64_t>(ceil_div(ceil_div(vectors, vectors_a_thread), 32) * 32, 1 << 20));
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

// A multiprocessor has 1 KiB more shared memory than a block may take. Every block costs 1 KiB and its static part.
constexpr int64_t shared_bytes_a_block(const NormProblem& p, int together, int64_t static_bytes) {
  return (int64_t{p.max_shared_bytes} + 1024) / together - 1024 - static_bytes;
}

}  // namespace norm_detail

constexpr const char* kNormNotVectors =
    "rows are not made of aligned 16-byte vectors: each is read more than once, element by element";

}  // namespace warpsmith
