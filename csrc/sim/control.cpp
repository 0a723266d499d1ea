#include "sim/sim.h"

// What a Python process that has loaded kernels, bindings and this machine as one library asks of the machine, through
// ctypes (python/warpsmith/testing/sim.py). The library hides all other names.
#define WARPSMITH_EXPORTED extern "C" __attribute__((visibility("default")))

WARPSMITH_EXPORTED void warpsmith_sim_configure(uint64_t seed, int multiprocessors, int code) {
  warpsmith::sim::Options& options = warpsmith::sim::options();
  options.seed = seed;
  options.properties.multiprocessors = multiprocessors;
  options.properties.code_capability = code;
}

WARPSMITH_EXPORTED int64_t warpsmith_sim_launches() { return warpsmith::sim::counters().launches; }

WARPSMITH_EXPORTED void warpsmith_sim_bytes_moved(int64_t* read, int64_t* written) {
  *read = warpsmith::sim::counters().global_bytes_read;
  *written = warpsmith::sim::counters().global_bytes_written;
}
