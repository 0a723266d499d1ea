#pragma once
#include <cstdint>
#include <functional>
#include <string>

#include "device/launch.h"

// What a test sees of the machine.
namespace warpsmith::sim {

// Since the last reset. Global and shared bytes are what the vocabulary's loads, stores and copies asked for.
struct Counters {
  int64_t launches = 0, blocks = 0;
  int64_t global_bytes_read = 0, global_bytes_written = 0;
  int64_t shared_bytes_read = 0, shared_bytes_written = 0;
  int64_t flops = 0;           // of matrix instructions
  int64_t bank_conflicts = 0;  // extra passes over the banks
  int64_t warp_operations = 0, barriers = 0, switches = 0;
  int64_t atomics = 0;
};

struct LaunchReport {
  std::string kernel;
  LaunchConfig config;
  Counters counted;  // of this launch alone
};

struct Options {
  // 0: threads run in index order and asynchronous work happens as late as the memory model allows. Other seeds: random
  // order of threads, warps and blocks, several blocks at once, and asynchronous work early (seed % 3 == 1), at random
  // moments (seed % 3 == 2) or late. Under seed 0 and odd seeds one block of each cluster starts as late as it can.
  uint64_t seed = 0;
  // What device_properties() reports. The default is an H200 that runs code of sm_90a. With code of sm_80, every
  // primitive that csrc/device compiles out below sm_90 does here what it does there: nothing, or it gives its
  // fallback.
  DeviceProperties properties{132, 90, 227 * 1024};
  // Of the GPU itself. The driver goes by it, choosers do not.
  int device_capability = 90;
  // Runs only the blocks it accepts: for grids too large to run whole.
  std::function<bool(uint3 block)> block_filter;
  // Runs only so many blocks (x: clusters) at the end of each dimension of a grid; 0: all.
  uint3 last_blocks{};
  // Seed of the errors of approximate instructions, each within its documented bound; 0: exact to rounding. seed % 4 is
  // 1: all results as large as the bound allows, 2: as small, else by input.
  uint64_t approximation = 0;
  // Loads and stores of shared memory through the vocabulary are compared across a warp's lanes, as matrix accesses
  // always are.
  bool count_bank_conflicts = false;
  // Called when a launch has ended.
  std::function<void(const LaunchReport&)> after_launch;
};

Options& options();
Counters& counters();

// A kernel launched so far: the threads of its largest block, and what some launch asked of the code.
struct LaunchedKernel {
  int threads = 0;
  bool cluster = false, programmatic = false, bulk_copies = false;
};
// Of all kernels launched so far, a line each for tools/sim/static_checks.py: symbol, threads, and of the words
// "cluster", "programmatic" and "bulk" those that a launch asked for. They are added to the file. False: it cannot be
// written.
bool write_launched_kernels(const char* path);

// The host waits for the device: the next launch follows no kernel. Memory that was freed and allocated again is then
// not what a previous kernel wrote.
void synchronize();

}  // namespace warpsmith::sim
