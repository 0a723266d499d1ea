#include <cxxabi.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <optional>
#include <utility>

#include "sim/machine.h"

namespace warpsmith {

Status device_properties(DeviceProperties& out) {
  out = sim::machine.options.properties;
  return {};
}

Status code_capability(int* capability) {
  *capability = sim::machine.options.properties.code_capability;
  return {};
}

bool runs_sm90a_code() { return sim::machine.options.properties.code_capability == kSm90; }

}  // namespace warpsmith

namespace warpsmith::sim {
namespace {

Status driver_error(const char* text) { return Status::device(text); }
Status invalid_configuration() { return driver_error("cudaErrorInvalidConfiguration: invalid configuration argument"); }

Status invalid_value() { return driver_error("cudaErrorInvalidValue: invalid argument"); }

uint64_t threads_of(const LaunchConfig& c) { return uint64_t{c.block.x} * c.block.y * c.block.z; }

int resident_blocks_per_multiprocessor(const LaunchConfig& c) {
  const int threads = static_cast<int>(threads_of(c));
  const int by_threads = 2048 / ((threads + 31) / 32 * 32);
  const auto by_shared = static_cast<int>(228 * 1024 / (c.dynamic_shared_bytes + 1024));
  return std::min({32, by_threads, by_shared});
}

// What the driver refuses, with its error. CUDA C++ Programming Guide, "Technical Specifications per Compute
// Capability".
Status validate(const LaunchConfig& c) {
  const uint64_t threads = threads_of(c);
  if (threads == 0 || threads > 1024 || c.block.x > 1024 || c.block.y > 1024 || c.block.z > 64)
    return invalid_configuration();
  if (c.grid.x == 0 || c.grid.x > 0x7fffffffu || c.grid.y == 0 || c.grid.y > 65535 || c.grid.z == 0 || c.grid.z > 65535)
    return invalid_configuration();
  if (c.dynamic_shared_bytes > machine.shared_limit_bytes) return invalid_value();
  if (c.cluster == 0) return invalid_configuration();
  if (c.cluster > 1) {
    if (machine.options.device_capability < 90) return driver_error("cudaErrorNotSupported: operation not supported");
    if (c.cluster > 8)  // 16 needs an attribute that no kernel here sets
      return driver_error(
          "cudaErrorInvalidClusterSize: a kernel launch error has occurred due to cluster misconfiguration");
    if (c.grid.x % c.cluster) return invalid_configuration();
  }
  if (c.cooperative) {
    const uint64_t blocks = uint64_t{c.grid.x} * c.grid.y * c.grid.z;
    if (blocks >
        static_cast<uint64_t>(machine.options.properties.multiprocessors * resident_blocks_per_multiprocessor(c)))
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

Counters difference(Counters after, const Counters& before) {
  for (int64_t Counters::* field :
       {&Counters::launches, &Counters::blocks, &Counters::global_bytes_read, &Counters::global_bytes_written,
        &Counters::shared_bytes_read, &Counters::shared_bytes_written, &Counters::flops, &Counters::bank_conflicts,
        &Counters::warp_operations, &Counters::barriers, &Counters::switches, &Counters::atomics})
    after.*field -= before.*field;
  return after;
}

void begin_thread(Block& b, Thread& t, int number) {
  const auto n = static_cast<unsigned>(number);
  t.index = {n % b.threads.x, n / b.threads.x % b.threads.y, n / (b.threads.x * b.threads.y)};
  t.block_view = &b;
  t.block = &b;
  t.linear_index = number;
  t.lane = number % 32;
  t.warp = &b.warps[n / 32];
  t.warp->lanes[t.warp->count++] = &t;
  t.favour = (n / 32 + 64 * b.index.x + machine.options.seed) * 0x9e3779b97f4a7c15ull;
  t.open_copies.clear();
  t.copy_groups.clear();
  t.fenced = false;
  t.last_atomic = nullptr;
  t.waited_for_previous_kernel = !machine.programmatic_dependent;
  t.shared_accesses.clear();
  t.open_bulk.clear();
  t.bulk_groups.clear();
  t.open_wgmmas.clear();
  t.wgmma_groups.clear();
  t.hidden.clear();
  t.wgmma_fenced = false;
  t.cluster_phase = 0;
  t.cluster_arrived = false;
  t.proxy_fence = 0;
}

// The part of a grid that runs, in clusters: `size` of them behind `first` in each dimension.
struct Part {
  uint3 first, size;
};
Part part_of(const LaunchConfig& c) {
  const uint3 all{c.grid.x / c.cluster, c.grid.y, c.grid.z}, last = machine.options.last_blocks;
  const auto most = [](unsigned n, unsigned of) { return n ? std::min(n, of) : of; };
  const uint3 size{most(last.x, all.x), most(last.y, all.y), most(last.z, all.z)};
  return {{all.x - size.x, all.y - size.y, all.z - size.z}, size};
}

void begin_block(const LaunchConfig& c, uint3 index, Block& b, size_t number, Cluster& cluster) {
  b.index = index;
  b.threads = c.block;
  b.grid = c.grid;
  b.cluster_rank = sm90_code() ? static_cast<unsigned>(cluster.blocks.size()) : 0;
  b.cluster_size = sm90_code() ? c.cluster : 1;
  b.thread_count = b.live_threads = static_cast<int>(c.block.x * c.block.y * c.block.z);
  b.cluster = &cluster;
  cluster.blocks.push_back(&b);
  cluster.live_threads += b.thread_count;
  b.warps.assign(static_cast<size_t>(b.thread_count + 31) / 32, {});
  b.thread.resize(static_cast<size_t>(b.thread_count));
  for (Barrier& barrier : b.barriers) {
    barrier.arrived = barrier.expected = 0;
    barrier.waiting.clear();
    barrier.waiting.reserve(static_cast<size_t>(b.thread_count));
  }
  for (int i = 0; i < b.thread_count; ++i) begin_thread(b, b.thread[static_cast<size_t>(i)], i);
  b.started = b.withheld = false;
  b.mbarriers.clear();
  b.mbarriers_published = false;
  b.proxy_view.reset();
  begin_registers(b);
  begin_shared(b, number, c.dynamic_shared_bytes);
}

}  // namespace

void synchronize() { ++machine.launch_number; }

bool write_launched_kernels(const char* path) {
  std::FILE* file = std::fopen(path, "a");
  if (!file) return false;
  for (const auto& [kernel, launched] : machine.launched) {
    Dl_info info{};
    if (!dladdr(kernel, &info) || !info.dli_sname) continue;
    std::fprintf(file, "%s %d%s%s%s\n", info.dli_sname, launched.threads, launched.cluster ? " cluster" : "",
                 launched.programmatic ? " programmatic" : "", launched.bulk_copies ? " bulk" : "");
  }
  return std::fclose(file) == 0;
}

Status set_max_dynamic_shared(const void* kernel, size_t bytes) {
  if (bytes > static_cast<size_t>(machine.options.properties.max_dynamic_shared_bytes)) return invalid_value();
  machine.opted_in = kernel;
  machine.opted_in_bytes = bytes;
  return {};
}

Status run_grid(const LaunchConfig& c, const void* kernel, void (*run_thread)(const void*), const void* arguments) {
  // On the device an opt-in stays with its kernel; here it serves one launch, so that none leans on an earlier one's.
  const bool opted_in = std::exchange(machine.opted_in, nullptr) == kernel;
  machine.shared_limit_bytes = opted_in && c.dynamic_shared_bytes <= machine.opted_in_bytes
                                   ? static_cast<size_t>(machine.options.properties.max_dynamic_shared_bytes)
                                   : kSharedWithoutOptIn;
  WARPSMITH_RETURN_IF_FAILED(validate(c));
  {
    Untracked scope;
    LaunchedKernel& launched = machine.launched[kernel];
    launched.threads = std::max(launched.threads, static_cast<int>(threads_of(c)));
    launched.cluster |= c.cluster > 1;
    launched.programmatic |= c.programmatic_dependent;
    launched.bulk_copies |= c.bulk_copies;
  }
  const Counters before = machine.counters;
  ++machine.counters.launches;
  ++machine.launch_number;
  machine.run_thread = run_thread;
  machine.kernel_arguments = arguments;
  machine.programmatic_dependent = c.programmatic_dependent;
  machine.random_state = 0x9e3779b97f4a7c15ull * (machine.options.seed + 1);
  machine.error.clear();
  machine.spins = 0;
  machine.stacks_used = 0;
  order_release(&machine.launch_begins);

  const auto [origin, size] = part_of(c);
  const uint64_t clusters = uint64_t{size.x} * size.y * size.z;
  // The thread sanitizer's barriers cost the square of the threads at once. One block at a time would be too few:
  // blocks that run in turn on the same stacks are ordered by these.
  const uint64_t most = kThreadSanitizer && threads_of(c) >= 256 ? 2 : 3;
  const uint64_t at_once = c.cooperative ? clusters : machine.options.seed ? 1 + random_bits() % most : 1;
  // By seed, another order of the clusters: start anywhere and step by a number without common factor.
  uint64_t step = 1, position = 0;
  if (machine.options.seed) {
    position = random_bits() % clusters;
    step = 1 + random_bits() % clusters;
    while (std::gcd(step, clusters) != 1) step = step % clusters + 1;
  }
  for (uint64_t done = 0; done < clusters && machine.error.empty();) {
    size_t blocks = 0;
    std::optional<Untracked> scope(std::in_place);
    machine.clusters.clear();
    begin_async_work();
    while (machine.clusters.size() < at_once && done < clusters) {
      const auto x = (origin.x + static_cast<unsigned>(position % size.x)) * c.cluster;
      const auto y = origin.y + static_cast<unsigned>(position / size.x % size.y);
      const auto z = origin.z + static_cast<unsigned>(position / size.x / size.y);
      ++done;
      position = (position + step) % clusters;
      if (machine.options.block_filter && !machine.options.block_filter({x, y, z})) continue;
      Cluster& cluster = machine.clusters.emplace_back();
      cluster.barrier.waiting.reserve(c.cluster * c.block.x * c.block.y * c.block.z);
      for (unsigned rank = 0; rank < c.cluster; ++rank, ++blocks) {
        if (machine.blocks.size() == blocks) machine.blocks.emplace_back();
        begin_block(c, {x + rank, y, z}, machine.blocks[blocks], blocks, cluster);
      }
    }
    machine.blocks.resize(blocks);
    machine.counters.blocks += static_cast<int64_t>(blocks);
    scope.reset();
    if (blocks) run_wave();
    if (machine.options.count_bank_conflicts)
      for (const Block& b : machine.blocks)
        for (const Warp& warp : b.warps) count_bank_conflicts(warp);
  }
  // Once a stack, not once a thread: what ran on a stack later happened after what ran on it before.
  release_pooled_stacks(machine.stacks_used, &machine.launch_ends);
  order_acquire(&machine.launch_ends);
  if (machine.options.after_launch)
    machine.options.after_launch({kernel_name(kernel), c, difference(machine.counters, before)});
  if (machine.error.empty()) return {};
  return Status::device(kernel_name(kernel) + ": " + machine.error);
}

}  // namespace warpsmith::sim
