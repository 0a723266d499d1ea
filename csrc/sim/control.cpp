#include "sim/sim.h"

// What a Python process that has loaded kernels, bindings and this machine as one library asks of the machine, through
// ctypes (python/warpsmith/testing/sim.py). The library hides all other names.
#define WARPSMITH_EXPORTED extern "C" __attribute__((visibility("default")))

WARPSMITH_EXPORTED void warpsmith_sim_configure(uint64_t seed, int multiprocessors, int code, uint64_t approximation,
                                                unsigned last_blocks, int shared_bytes) {
  warpsmith::sim::Options& options = warpsmith::sim::options();
  options.seed = seed;
  options.properties.multiprocessors = multiprocessors;
  options.properties.code_capability = code;
  options.approximation = approximation;
  options.properties.max_dynamic_shared_bytes = shared_bytes;
  options.last_blocks = {last_blocks, 0, 0};
}

WARPSMITH_EXPORTED int64_t warpsmith_sim_launches() { return warpsmith::sim::counters().launches; }

WARPSMITH_EXPORTED bool warpsmith_sim_write_launched_kernels(const char* path) {
  return warpsmith::sim::write_launched_kernels(path);
}

WARPSMITH_EXPORTED int64_t warpsmith_sim_bytes() {
  return warpsmith::sim::counters().global_bytes_read + warpsmith::sim::counters().global_bytes_written;
}

WARPSMITH_EXPORTED int64_t warpsmith_sim_bytes_written() { return warpsmith::sim::counters().global_bytes_written; }
