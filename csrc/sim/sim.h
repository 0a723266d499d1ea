#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "common/launch.h"

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
  // moments (seed % 3 == 2) or late.
  uint64_t seed = 0;
  // What device_properties() reports. The default is an H200.
  DeviceProperties properties{132, 90, 227 * 1024};
  // Runs only the blocks it accepts: for grids too large to run whole.
  std::function<bool(uint3 block)> block_filter;
  // Loads and stores of shared memory through the vocabulary are compared across a warp's lanes, as matrix accesses
  // always are.
  bool count_bank_conflicts = false;
  // Called when a launch has ended.
  std::function<void(const LaunchReport&)> after_launch;
};

Options& options();
Counters& counters();

// Every kernel launched so far, by its symbol, with the threads of its largest block.
std::vector<std::pair<std::string, int>> launched_kernels();

}  // namespace warpsmith::sim
