#pragma once
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "device/host_hooks.h"
#include "sim/async_proxy.h"
#include "sim/fiber.h"
#include "sim/sanitizers.h"
#include "sim/sim.h"

// The running machine: blocks of a wave, their threads, which thread waits for which barrier. Internal to csrc/sim.
namespace warpsmith::sim {

struct Block;
struct Warp;

// A wait, as deadlock reports print it: "waits at <what> (<file>:<line>)".
struct Wait {
  const char* what = nullptr;
  int id = -1;
  Site site{};
};

struct AsyncCopy {
  unsigned char* to;
  const unsigned char* from;
  int bytes, valid_bytes;
  bool done;
};

struct SharedAccess {
  uint32_t offset, bytes;
};

struct PendingWgmma {
  WgmmaOperands operands;
  Site site;
  bool executed = false;
};

// Accumulators of wgmmas in flight: the registers hold NaN until the last of them has executed, these are the real
// values.
struct HiddenAccumulators {
  float* d;
  std::vector<float> values;
};

// What every switch and warp operation touches comes first, in two cache lines.
struct alignas(64) Thread : ThreadView {
  enum class State : uint8_t { ready, waiting, exited };
  State state = State::ready;
  Fiber fiber;
  uint64_t favour = 0;  // by seed, of its warp
  // The warp operation this thread has arrived at.
  const void* operation = nullptr;
  void* arguments = nullptr;
  unsigned mask = 0;
  int lane = 0;
  Wait wait;
  Block* block = nullptr;
  Warp* warp = nullptr;
  // Copies since the last commit, and committed groups, oldest first.
  std::vector<AsyncCopy> open_copies;
  std::vector<std::vector<AsyncCopy>> copy_groups;
  // Fence and atomic seen last: a fence before an atomic releases, an atomic before a fence acquires.
  bool fenced = false;
  void* last_atomic = nullptr;
  bool waited_for_previous_kernel = false;
  std::vector<SharedAccess> shared_accesses;  // with Options::count_bank_conflicts
  // Bulk stores since the last commit, and committed groups, oldest first.
  std::vector<BulkOperation*> open_bulk;
  std::vector<std::vector<BulkOperation*>> bulk_groups;
  // wgmmas since the last commit, and committed groups, oldest first.
  std::vector<PendingWgmma> open_wgmmas;
  std::vector<std::vector<PendingWgmma>> wgmma_groups;
  std::vector<HiddenAccumulators> hidden;
  bool wgmma_fenced = false;
  uint64_t cluster_phase = 0;
  bool cluster_arrived = false;
  uint64_t proxy_fence = 0;  // number of its latest
};

struct Warp {
  Thread* lanes[32] = {};
  int count = 0;
  unsigned arrived = 0, exited = 0;  // lanes that wait at a warp operation, and that have exited
};

struct Barrier {
  int arrived = 0, expected = 0;
  Site site{};
  std::vector<Thread*> waiting;
  int reduction = 0, result = 0;
};

struct SharedArray {
  const void* key;
  unsigned char* memory;
  size_t bytes;
};

struct Cluster {
  std::vector<Block*> blocks;
  Barrier barrier;
  uint64_t phase = 0;
  int live_threads = 0;
};

// Blocks are kept from wave to wave, so that a large grid allocates nothing after its first blocks.
struct Block : BlockView {
  int thread_count = 0, live_threads = 0;
  std::vector<Thread> thread;
  std::vector<Warp> warps;
  Barrier barriers[16];
  unsigned char* arena = nullptr;
  size_t arena_number = 0, arena_used = 0, shared_bytes = 0, dynamic_shared_bytes = 0;
  std::vector<SharedArray> shared_arrays;
  Cluster* cluster = nullptr;
  bool started = false;                                   // some thread has run
  bool withheld = false;                                  // does not start until nothing else can run
  std::unordered_map<uint32_t, MbarrierState> mbarriers;  // by offset in shared memory
  bool mbarriers_published = false;
  ProxyView proxy_view;
  char proxy_fences = 0, operand_reads = 0;  // ordering objects
  std::vector<int> warpgroup_registers;      // a thread's, by warpgroup
  std::vector<Thread*> waiting_for_registers;
};

struct Ready {
  Thread* thread;
  uint64_t favour;
};

struct Machine {
  Options options;
  Counters counters;
  std::deque<Block> blocks;  // of the wave
  std::deque<Cluster> clusters;
  std::vector<Ready> ready;
  size_t ready_head = 0;
  uint64_t random_state = 1;
  std::string error;
  Fiber host;
  void (*run_thread)(const void*) = nullptr;
  const void* kernel_arguments = nullptr;
  bool programmatic_dependent = false;
  const void* opted_in = nullptr;  // the kernel that may have more than 48 KiB of shared memory, and how much dynamic
  size_t opted_in_bytes = 0;
  size_t shared_limit_bytes = 0;                   // static and dynamic, of the running kernel
  int64_t launch_number = 0;                       // never reset
  std::map<const void*, LaunchedKernel> launched;  // without their symbols; never reset
  std::deque<BulkOperation> bulk_operations;       // of the wave
  std::vector<BulkOperation*> in_flight;
  uint64_t proxy_fences = 0;  // so far
  int64_t tensor_bytes = 0;   // of the tensor copy being issued, without what lies outside the tensor
  int64_t spins = 0;          // since the last release
  size_t stacks_used = 0;     // of the pool, by the launch
  char launch_begins = 0, launch_ends = 0, engine_wrote = 0;  // ordering objects
};
extern Machine machine;

// Whether the code that runs has what csrc/device compiles for sm_90 and newer.
inline bool sm90_code() { return machine.options.properties.code_capability >= kSm90; }

inline Thread& self() { return *static_cast<Thread*>(current_thread); }

// scheduler.cpp
uint64_t random_bits();
void make_ready(Thread& thread);
void block_until_ready(Wait wait);  // the running thread waits until make_ready() is called for it
void maybe_preempt();               // by seed, lets another thread run
void yield(uint64_t favour);        // lets other threads run, on even seeds rather those of more favour
void run_wave();
bool start_withheld_blocks();  // false if there are none
[[noreturn]] void fail(const std::string& message, Site site);

// memory_access.cpp
void count_bank_conflicts(const Warp& warp);
void note_ordinary_store(const void* pointer, int bytes);

// shared_memory.cpp
constexpr size_t kArenaBytes = 512 << 10, kPageBytes = 4096;
constexpr size_t kMaxResidentBlocks = 4096;
bool in_shared(const void* pointer);
void begin_shared(Block& block, size_t number, size_t dynamic_bytes);
Block* owner_of_shared(const void* pointer);
uint32_t window_offset(const void* pointer);

// barriers.cpp and cluster.cpp
void thread_left_barriers(Block& block);
void thread_left_cluster(Cluster& cluster);

// matrix.cpp
// `count` elements to floats that lie `stride` apart.
void widen(const unsigned char* from, int count, Operand type, float* out, int stride);
// A lane's registers of a 16 x 32-byte (four registers) or 8 x 32-byte operand (two), into out[row][k].
void unpack_fragment(const uint32_t* registers, int count, Operand type, int lane, float (*out)[32]);
int64_t bank_conflicts_of_rows(const void* const* rows);

// wgmma.cpp
const char* unfinished_wgmma(const Thread& thread);
void begin_registers(Block& block);

// warp_operations.cpp. `compute` runs once, in the last lane to arrive, with the arguments of every lane of the mask.
using WarpOperation = void (*)(void* const* arguments, unsigned mask);
void warp_operation(unsigned mask, WarpOperation compute, const void* identity, void* arguments, const char* what,
                    Site site);
void check_nobody_waits_for(const Thread& leaving);
constexpr unsigned kWholeWarp = 0xffffffffu;

// async_copy.cpp
bool has_unfinished_copies(const Thread& thread);

// When asynchronous work happens relative to its legal window.
enum class Timing { late, early, random };
Timing async_timing();

}  // namespace warpsmith::sim
