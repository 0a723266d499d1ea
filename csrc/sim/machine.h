#pragma once
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "device/host_hooks.h"
#include "sim/fiber.h"
#include "sim/sanitizers.h"
#include "sim/sim.h"

// The running machine: blocks of a wave, their threads, who waits for what. Internal to csrc/sim.
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
};

struct Thread : ThreadView {
  enum class State : uint8_t { ready, waiting, exited };
  Fiber fiber;
  State state = State::ready;
  Wait wait;
  Block* block = nullptr;
  Warp* warp = nullptr;
  int lane = 0;
  // The warp operation this thread has arrived at.
  const void* operation = nullptr;
  void* arguments = nullptr;
  unsigned mask = 0;
  // Copies since the last commit, and committed groups, oldest first.
  std::vector<AsyncCopy> open_copies;
  std::vector<std::vector<AsyncCopy>> copy_groups;
  // Fence and atomic seen last: a fence before an atomic releases, an atomic before a fence acquires.
  bool fenced = false;
  void* last_atomic = nullptr;
  bool waited_for_previous_kernel = false;
};

struct Warp {
  Thread* lanes[32] = {};
  int count = 0;
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
  int live_threads = 0;
};

// Blocks are kept from wave to wave, so that a large grid allocates nothing after its first blocks.
struct Block : BlockView {
  int thread_count = 0, live_threads = 0;
  std::vector<Thread> thread;
  std::vector<Warp> warps;
  Barrier barriers[16];
  unsigned char* arena = nullptr;
  size_t arena_used = 0, shared_bytes = 0;
  std::vector<SharedArray> shared_arrays;
  Cluster* cluster = nullptr;
};

struct Machine {
  Options options;
  Counters counters;
  std::deque<Block> blocks;  // of the wave
  std::deque<Cluster> clusters;
  std::vector<Thread*> ready;
  size_t ready_head = 0;
  uint64_t random_state = 1;
  std::string error;
  Fiber host;
  void (*run_thread)(const void*) = nullptr;
  const void* kernel_arguments = nullptr;
  bool programmatic_dependent = false;
  char launch_begins = 0, launch_ends = 0;  // ordering objects
};
extern Machine machine;

inline Thread& self() { return *static_cast<Thread*>(current_thread); }

// scheduler.cpp
uint64_t random_bits();
void make_ready(Thread& thread);
void block_until_ready(Wait wait);  // the running thread waits until make_ready() is called for it
void maybe_preempt();               // by seed, lets another thread run
void run_wave();
[[noreturn]] void fail(const std::string& message, Site site);

// shared_memory.cpp
constexpr size_t kArenaBytes = 512 << 10;
constexpr size_t kSharedLimitBytes = 227 * 1024;
constexpr size_t kMaxResidentBlocks = 4096;
bool in_shared(const void* pointer);
void begin_shared(Block& block, size_t number, size_t dynamic_bytes);
Block* owner_of_shared(const void* pointer);
uint32_t window_offset(const void* pointer);

// barriers.cpp
void thread_left_barriers(Block& block);

// warp_operations.cpp. `compute` runs once, in the last lane to arrive, with the arguments of every lane of the mask.
using WarpOperation = void (*)(void* const* arguments, unsigned mask);
void warp_operation(unsigned mask, WarpOperation compute, const void* identity, void* arguments, const char* what,
                    Site site);
constexpr unsigned kWholeWarp = 0xffffffffu;

// async_copy.cpp
bool has_unfinished_copies(const Thread& thread);

// When asynchronous work happens relative to its legal window.
enum class Timing { late, early, random };
Timing async_timing();

}  // namespace warpsmith::sim
