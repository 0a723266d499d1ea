#include <dlfcn.h>

#include <cstdlib>
#include <cxxabi.h>
#include <numeric>

#include "sim/machine.h"

namespace warpsmith {

Status device_properties(DeviceProperties& out) {
  out = sim::machine.options.properties;
  return {};
}

}  // namespace warpsmith

namespace warpsmith::sim {
namespace {

Status driver_error(const char* text) { return Status::device(text); }
Status invalid_configuration() { return driver_error("cudaErrorInvalidConfiguration: invalid configuration argument"); }

int resident_blocks_per_multiprocessor(const LaunchConfig& c) {
  const int threads = static_cast<int>(c.block.x * c.block.y * c.block.z);
  const int by_threads = 2048 / ((threads + 31) / 32 * 32);
  const auto by_shared = static_cast<int>(228 * 1024 / (c.dynamic_shared_bytes + 1024));
  return std::min({32, by_threads, by_shared});
}

// What the driver refuses, with its error. CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
Status validate(const LaunchConfig& c) {
  const uint64_t threads = uint64_t{c.block.x} * c.block.y * c.block.z;
  if (threads == 0 || threads > 1024 || c.block.x > 1024 || c.block.y > 1024 || c.block.z > 64) return invalid_configuration();
  if (c.grid.x == 0 || c.grid.x > 0x7fffffffu || c.grid.y == 0 || c.grid.y > 65535 || c.grid.z == 0 || c.grid.z > 65535)
    return invalid_configuration();
  if (c.dynamic_shared_bytes > static_cast<size_t>(machine.options.properties.max_dynamic_shared_bytes))
    return driver_error("cudaErrorInvalidValue: invalid argument");  // of cudaFuncSetAttribute
  if (c.cluster == 0) return invalid_configuration();
  if (c.cluster > 1) {
    if (machine.options.properties.compute_capability < 90)
      return driver_error("cudaErrorNotSupported: operation not supported");
    if (c.cluster > 8)  // 16 needs an attribute that no kernel here sets
      return driver_error("cudaErrorInvalidClusterSize: a kernel launch error has occurred due to cluster misconfiguration");
    if (c.grid.x % c.cluster) return invalid_configuration();
  }
  if (c.cooperative) {
    const uint64_t blocks = uint64_t{c.grid.x} * c.grid.y * c.grid.z;
    if (blocks > static_cast<uint64_t>(machine.options.properties.multiprocessors * resident_blocks_per_multiprocessor(c)))
      return driver_error("cudaErrorCooperativeLaunchTooLarge: too many blocks in cooperative launch");
  }
  return {};
}

std::string kernel_name(const void* kernel) {
  Dl_info info{};
  if (!dladdr(kernel, &info) || !info.dli_sname) return "kernel";
  int status = 0;
  char* text = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
  std::string name = status == 0 ? text : info.dli_sname;
  std::free(text);
  return name.substr(0, name.rfind('('));
}

void add_block(const LaunchConfig& c, uint3 index, Cluster& cluster) {
  Block& b = machine.blocks.emplace_back();
  b.index = index;
  b.threads = c.block;
  b.grid = c.grid;
  b.cluster_rank = static_cast<unsigned>(cluster.blocks.size());
  b.cluster_size = c.cluster;
  b.thread_count = b.live_threads = static_cast<int>(c.block.x * c.block.y * c.block.z);
  b.cluster = &cluster;
  cluster.blocks.push_back(&b);
  cluster.live_threads += b.thread_count;
  b.warps.resize(static_cast<size_t>(b.thread_count + 31) / 32);
  b.thread = std::vector<Thread>(static_cast<size_t>(b.thread_count));
  for (Barrier& barrier : b.barriers) barrier.waiting.reserve(static_cast<size_t>(b.thread_count));
  for (int i = 0; i < b.thread_count; ++i) {
    Thread& t = b.thread[static_cast<size_t>(i)];
    const auto n = static_cast<unsigned>(i);
    t.index = {n % c.block.x, n / c.block.x % c.block.y, n / (c.block.x * c.block.y)};
    t.block_view = &b;
    t.block = &b;
    t.linear_index = i;
    t.lane = i % 32;
    t.warp = &b.warps[n / 32];
    t.warp->lanes[t.warp->count++] = &t;
  }
  begin_shared(b, machine.blocks.size() - 1, c.dynamic_shared_bytes);
}

bool accepted(uint3 index) { return !machine.options.block_filter || machine.options.block_filter(index); }

}  // namespace

Status run_grid(const LaunchConfig& c, const void* kernel, void (*run_thread)(const void*), const void* arguments) {
  WARPSMITH_RETURN_IF_FAILED(validate(c));
  ++machine.counters.launches;
  machine.run_thread = run_thread;
  machine.kernel_arguments = arguments;
  machine.programmatic_dependent = c.programmatic_dependent;
  machine.random_state = 0x9e3779b97f4a7c15ull * (machine.options.seed + 1);
  machine.error.clear();
  order_release(&machine.launch_begins);

  const uint64_t clusters_x = c.grid.x / c.cluster, clusters = clusters_x * c.grid.y * c.grid.z;
  const uint64_t at_once = c.cooperative ? clusters : machine.options.seed ? 1 + random_bits() % 3 : 1;
  // By seed, another order of the clusters: start anywhere and step by a number without common factor.
  uint64_t step = 1, position = 0;
  if (machine.options.seed) {
    position = random_bits() % clusters;
    step = 1 + random_bits() % clusters;
    while (std::gcd(step, clusters) != 1) step = step % clusters + 1;
  }
  for (uint64_t done = 0; done < clusters;) {
    machine.blocks.clear();
    machine.clusters.clear();
    for (uint64_t n = 0; n < at_once && done < clusters; ++done, position = (position + step) % clusters) {
      const auto x = static_cast<unsigned>(position % clusters_x) * c.cluster;
      const auto y = static_cast<unsigned>(position / clusters_x % c.grid.y);
      const auto z = static_cast<unsigned>(position / clusters_x / c.grid.y);
      if (!accepted({x, y, z})) continue;
      Cluster& cluster = machine.clusters.emplace_back();
      for (unsigned rank = 0; rank < c.cluster; ++rank) add_block(c, {x + rank, y, z}, cluster);
      ++n;
    }
    if (machine.blocks.empty()) continue;
    machine.counters.blocks += static_cast<int64_t>(machine.blocks.size());
    run_wave();
    if (!machine.error.empty()) break;
  }
  order_acquire(&machine.launch_ends);
  if (machine.error.empty()) return {};
  return Status::device(kernel_name(kernel) + ": " + machine.error);
}

}  // namespace warpsmith::sim
