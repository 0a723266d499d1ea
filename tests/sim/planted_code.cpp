// Planted bugs of launchers on a device of sm_90 that runs code of sm_80, where clusters, bulk copies and programmatic
// launches are compiled out.
#include "device/bulk_copy.h"
#include "device/cluster.h"
#include "device/programmatic_launch.h"
#include "device/vector.h"
#include "planted.h"

namespace warpsmith::test {
namespace {

// A device of sm_90 with code of sm_80, while it lives.
class CodeOfSm80 {
 public:
  CodeOfSm80() { sim::options().properties.code_capability = 80; }
  ~CodeOfSm80() { sim::options().properties.code_capability = 90; }
  CodeOfSm80(const CodeOfSm80&) = delete;
  CodeOfSm80& operator=(const CodeOfSm80&) = delete;
};

// A launch wrapper that forgets to refuse.
template <class... P> Status launch_unchecked(void (*kernel)(P...), const LaunchConfig& config, P... arguments) {
  const auto call = [kernel, arguments...] { kernel(arguments...); };
  return sim::run_grid(
      config, reinterpret_cast<const void*>(kernel), [](const void* p) { (*static_cast<decltype(&call)>(p))(); },
      &call);
}

// The sum of 64 integers: by one block, or by each block of a cluster of two, which has half of them.
__global__ void sum_of_all(const int* x, int* out) {
  WARPSMITH_SHARED(int, sums, 2);
  const unsigned rank = device::cluster_rank(), blocks = device::cluster_size();
  int sum = 0;
  for (unsigned i = rank * 32 + threadIdx.x; i < 64; i += blocks * 32) sum += x[i];
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance, 32);
  device::cluster_barrier();
  if (threadIdx.x < blocks) *device::cluster_shared(sums + rank, threadIdx.x) = sum;
  device::cluster_barrier();
  __syncthreads();
  if (threadIdx.x == 0) out[blockIdx.x] = sums[0] + (gridDim.x > 1 ? sums[1] : 0);
}

std::vector<int> one_to(int n) {
  std::vector<int> v(static_cast<size_t>(n));
  for (int i = 0; i < n; ++i) v[static_cast<size_t>(i)] = i + 1;
  return v;
}

unsigned blocks_of_row(bool asks_the_device) {
  DeviceProperties device;
  if (!device_properties(device).ok()) return 0;
  return (asks_the_device ? sim::options().device_capability : device.code_capability) >= 90 ? 2 : 1;
}

PLANTED(launcher_asks_the_device, "plain",
        "expected code of sm_90 or newer for clusters of 2 blocks, got code of sm_80") {
  const CodeOfSm80 scope;
  const std::vector<int> x = one_to(64);
  const unsigned blocks = blocks_of_row(bug);
  std::vector<int> out(blocks);
  return outcome(launch(sum_of_all, {.grid = blocks, .block = 32, .cluster = blocks}, nullptr, x.data(), out.data()),
                 out, std::vector<int>(blocks, 64 * 65 / 2));
}

PLANTED(launcher_asks_the_device_and_nobody_refuses, "plain", "wrong result") {
  const CodeOfSm80 scope;
  const std::vector<int> x = one_to(64);
  const unsigned blocks = blocks_of_row(bug);
  std::vector<int> out(blocks);
  const LaunchConfig config{.grid = blocks, .block = 32, .cluster = blocks};
  return outcome(launch_unchecked<const int*, int*>(sum_of_all, config, x.data(), out.data()), out,
                 std::vector<int>(blocks, 64 * 65 / 2));
}

__global__ void produce(int* x) { device::store(x + threadIdx.x, 7); }
__global__ void consume(const int* x, int* y) {
  device::wait_for_previous_kernel();
  device::store(y + threadIdx.x, device::load(x + threadIdx.x) + 1);
}

// The kernel has its wait, the code that runs has not.
PLANTED(overlap_asks_the_device, "plain", "what the previous kernel wrote before wait_for_previous_kernel()") {
  const CodeOfSm80 scope;
  std::vector<int> x(32), y(32);
  const Status produced = launch(produce, {.block = 32}, nullptr, x.data());
  if (!produced.ok()) return produced.what();
  LaunchConfig config{.block = 32, .programmatic_dependent = bug};
  if (!bug && !allow_overlap(&config).ok()) return "no answer";
  return outcome(launch_unchecked<const int*, int*>(consume, config, x.data(), y.data()), y, std::vector<int>(32, 8));
}

PLANTED(overlap_without_the_code_for_it_is_refused, "plain", "for a programmatic launch, got code of sm_80") {
  const CodeOfSm80 scope;
  std::vector<int> x(32, 7), y(32);
  return outcome(launch(consume, {.block = 32, .programmatic_dependent = bug}, nullptr, x.data(), y.data()), y,
                 std::vector<int>(32, 8));
}

struct alignas(16) Tile {
  int values[32];
};

__global__ void by_bulk_copy(const int* x, int* y, bool bulk) {
  WARPSMITH_SHARED(Tile, tile, 1);
  WARPSMITH_SHARED(device::Mbarrier, full, 1);
  int* values = tile->values;
  if (bulk) {
    if (threadIdx.x == 0) {
      device::mbarrier_init(full, 1);
      device::mbarrier_init_fence();
      device::mbarrier_arrive_expect(full, 128);
      device::bulk_load(values, x, 128, full);
    }
    __syncthreads();
    device::mbarrier_wait(full, 0);
  } else {
    values[threadIdx.x] = x[threadIdx.x];
  }
  y[threadIdx.x] = values[threadIdx.x];
}

// On the device: never ends.
PLANTED(bulk_copies_that_are_compiled_out, "plain", "mbarrier_wait: never returns") {
  const CodeOfSm80 scope;
  Buffer<int> x(32);
  for (int i = 0; i < 32; ++i) x[static_cast<size_t>(i)] = i + 1;
  std::vector<int> y(32);
  return outcome(launch_unchecked<const int*, int*, bool>(by_bulk_copy, {.block = 32}, x.data(), y.data(), bug), y,
                 one_to(32));
}

}  // namespace
}  // namespace warpsmith::test
