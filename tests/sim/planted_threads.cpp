// Planted bugs of ordinary code: barriers, masks, bounds, indices, blocks that depend on each other.
#include "device/cluster.h"
#include "device/fence.h"
#include "device/named_barrier.h"
#include "device/programmatic_launch.h"
#include "device/reduce.h"
#include "device/vector.h"
#include "planted.h"
#include "sim/sparse_memory.h"

namespace warpsmith::test {
namespace {

constexpr unsigned kWarp = 0xffffffffu;
constexpr int kThreads = 128;

std::vector<int> reversed(int n, int add = 0) {
  std::vector<int> v(static_cast<size_t>(n));
  for (int i = 0; i < n; ++i) v[static_cast<size_t>(i)] = n - 1 - i + add;
  return v;
}

// ---- barriers
template <bool bug> __global__ void reverse_block(int* out) {
  WARPSMITH_SHARED(int, s, kThreads);
  s[threadIdx.x] = threadIdx.x;
  if (!bug) __syncthreads();
  out[threadIdx.x] = s[kThreads - 1 - threadIdx.x];
}
std::string run_reverse_block(bool bug) {
  Buffer<int> out(kThreads);
  return outcome(LAUNCH_PLANTED(bug, reverse_block, {.block = kThreads}, out.data()), out, reversed(kThreads));
}
PLANTED(missing_barrier, "plain", "wrong result") { return run_reverse_block(bug); }
PLANTED(missing_barrier_races, "tsan", "data race") { return run_reverse_block(bug); }

template <bool bug> __global__ void reverse_twice(int* out) {
  WARPSMITH_SHARED(int, s, kThreads);
  int sum = 0;
  for (int i = 0; i < 4; ++i) {
    s[threadIdx.x] = threadIdx.x + i;
    __syncthreads();
    sum += s[kThreads - 1 - threadIdx.x];
    if (!bug) __syncthreads();
  }
  out[threadIdx.x] = sum / 4;
}
PLANTED(buffer_reused_without_barrier, "plain", "wrong result") {
  Buffer<int> out(kThreads);
  return outcome(LAUNCH_PLANTED(bug, reverse_twice, {.block = kThreads}, out.data()), out, reversed(kThreads, 1));
}

template <bool bug> __global__ void reverse_warp(int* out) {
  WARPSMITH_SHARED(int, s, 32);
  s[threadIdx.x] = threadIdx.x;
  if (!bug) __syncwarp(kWarp);
  out[threadIdx.x] = s[31 - threadIdx.x];
}
PLANTED(missing_syncwarp, "tsan", "data race") {
  Buffer<int> out(32);
  return outcome(LAUNCH_PLANTED(bug, reverse_warp, {.block = 32}, out.data()), out, reversed(32));
}

template <bool bug> __global__ void divergent(int n) {
  if (bug && static_cast<int>(threadIdx.x) < n)
    __syncthreads();
  else
    __syncthreads();
}
PLANTED(divergent_barrier, "plain", "divergent barrier") {
  return outcome(LAUNCH_PLANTED(bug, divergent, {.block = 64}, 32), std::vector<int>(), std::vector<int>());
}

template <bool bug> __global__ void early_return(int n, int* out) {
  if (bug && static_cast<int>(threadIdx.x) >= n) return;
  device::named_barrier_wait(1, 64);
  if (static_cast<int>(threadIdx.x) < n) out[threadIdx.x] = 1;
}
PLANTED(early_return_before_barrier, "plain", "wait at named barrier 1") {
  Buffer<int> out(50);
  return outcome(LAUNCH_PLANTED(bug, early_return, {.block = 64}, 50, out.data()), out, std::vector<int>(50, 1));
}

template <bool bug> __global__ void wrong_count() {
  if (threadIdx.x < 32)
    device::named_barrier_arrive(1, 64);
  else if (threadIdx.x < 64)
    device::named_barrier_wait(1, bug ? 96 : 64);
}
PLANTED(named_barrier_count, "plain", "threads disagree on the count") {
  return outcome(LAUNCH_PLANTED(bug, wrong_count, {.block = 96}), std::vector<int>(), std::vector<int>());
}

// ---- warp operations
template <bool bug> __global__ void masked_sum(int n, int* out) {
  const int lane = threadIdx.x;
  if (lane >= n) return;
  const unsigned mask = bug ? kWarp : (1u << n) - 1;
  out[lane] = static_cast<int>(__reduce_add_sync(mask, 1u));
}
PLANTED(mask_names_exited_lanes, "plain", "lane that has exited") {
  Buffer<int> out(20);
  return outcome(LAUNCH_PLANTED(bug, masked_sum, {.block = 32}, 20, out.data()), out, std::vector<int>(20, 20));
}

template <bool bug> __global__ void half_warp(int* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_xor_sync(bug ? 0x7fffu : 0xffffu, static_cast<int>(threadIdx.x), 1);
}
PLANTED(lane_missing_in_mask, "plain", "not in its own mask") {
  Buffer<int> out(16);
  std::vector<int> expected(16);
  for (int i = 0; i < 16; ++i) expected[static_cast<size_t>(i)] = i ^ 1;
  return outcome(LAUNCH_PLANTED(bug, half_warp, {.block = 32}, out.data()), out, expected);
}

template <bool bug> __global__ void shuffle_in_branch(int* out) {
  int v = threadIdx.x;
  if (!bug || threadIdx.x < 16) v = __shfl_xor_sync(kWarp, v, 1);
  __syncthreads();
  out[threadIdx.x] = v ^ 1;
}
PLANTED(warp_operation_in_a_branch, "plain", "deadlock") {
  Buffer<int> out(32);
  std::vector<int> expected(32);
  for (int i = 0; i < 32; ++i) expected[static_cast<size_t>(i)] = i;
  return outcome(LAUNCH_PLANTED(bug, shuffle_in_branch, {.block = 32}, out.data()), out, expected);
}

// ---- memory
template <bool bug> __global__ void copy_rows(const float* x, float* y, int n) {
  for (int i = threadIdx.x; bug ? i <= n : i < n; i += kThreads) device::store(y + i % n, device::load(x + i));
}
PLANTED(read_past_the_end, "asan", "heap-buffer-overflow") {
  Buffer<float> x(300), y(300);
  return outcome(LAUNCH_PLANTED(bug, copy_rows, {.block = kThreads}, x.data(), y.data(), 300), std::vector<int>(),
                 std::vector<int>());
}

template <bool bug> __global__ void write_rows(float* y, int n) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (bug ? i <= n : i < n) y[i] = 1;
}
PLANTED(write_past_the_end, "asan", "heap-buffer-overflow") {
  Buffer<float> y(300);
  return outcome(LAUNCH_PLANTED(bug, write_rows, (LaunchConfig{.grid = 3, .block = kThreads}), y.data(), 300), y,
                 std::vector<int>(300, 1));
}

template <bool bug> __global__ void shared_overrun(int* out) {
  WARPSMITH_SHARED(int, s, kThreads);
  s[threadIdx.x + (bug ? 1 : 0)] = 5;
  __syncthreads();
  if (threadIdx.x > 0) out[threadIdx.x] = s[threadIdx.x];
}
PLANTED(shared_array_overrun, "asan", "out of bounds for type") {
  Buffer<int> out(kThreads);
  return outcome(LAUNCH_PLANTED(bug, shared_overrun, {.block = kThreads}, out.data()), std::vector<int>(),
                 std::vector<int>());
}

template <bool bug> __global__ void dynamic_overrun(int* out, int n) {
  WARPSMITH_DYNAMIC_SHARED(memory);
  auto* s = reinterpret_cast<int*>(memory);
  for (int i = threadIdx.x; i < n + (bug ? 1 : 0); i += kThreads) s[i] = i;
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
}
PLANTED(dynamic_shared_overrun, "asan", "use-after-poison") {
  Buffer<int> out(kThreads);
  const LaunchConfig config{.block = kThreads, .dynamic_shared_bytes = 200 * 4};
  return outcome(LAUNCH_PLANTED(bug, dynamic_overrun, config, out.data(), 200), std::vector<int>(), std::vector<int>());
}

template <bool bug> __global__ void unwritten(float* out) {
  WARPSMITH_SHARED(float, s, kThreads);
  if (!bug || threadIdx.x > 0) s[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = s[kThreads - 1 - threadIdx.x];
}
PLANTED(shared_memory_read_before_written, "plain", "wrong result") {
  Buffer<float> out(kThreads);
  return outcome(LAUNCH_PLANTED(bug, unwritten, {.block = kThreads}, out.data()), out, std::vector<int>(kThreads, 1));
}

template <bool bug> __global__ void vector_rows(const float* x, float* out, int columns) {
  const float* row = x + threadIdx.x * columns;
  float sum = 0;
  for (int i = 0; i < columns; i += 4) {
    if (bug || columns % 4 == 0)
      for (float v : device::load_vector<4>(row + i).at) sum += v;
    else
      for (int k = 0; k < 4 && i + k < columns; ++k) sum += row[i + k];
  }
  out[threadIdx.x] = sum;
}
PLANTED(misaligned_vector_load, "plain", "cudaErrorMisalignedAddress") {
  Buffer<float> x(33 * 8), out(32);
  for (size_t i = 0; i < x.size(); ++i) x[i] = 1;
  return outcome(LAUNCH_PLANTED(bug, vector_rows, {.block = 32}, x.data(), out.data(), 7), out,
                 std::vector<int>(32, 7));
}

template <bool bug> __global__ void scale_huge(unsigned char* x, int rows, int columns) {
  const int row = rows - 1 - static_cast<int>(blockIdx.x);
  if (bug)
    x[row * columns + threadIdx.x] = 1;
  else
    x[static_cast<int64_t>(row) * columns + threadIdx.x] = 1;
}
PLANTED(int32_index_beyond_2_31_elements, "asan", "signed integer overflow") {
  const int rows = 70000, columns = 40000;
  sim::SparseMemory<unsigned char> x(static_cast<size_t>(rows) * columns);
  sim::options().block_filter = [](uint3 b) { return b.x == 0; };
  const Status status =
      LAUNCH_PLANTED(bug, scale_huge, (LaunchConfig{.grid = 70000, .block = 32}), x.data(), rows, columns);
  sim::options().block_filter = nullptr;
  return outcome(status, std::vector<int>{x[static_cast<size_t>(rows - 1) * columns + 31]}, std::vector<int>{1});
}

// ---- blocks
template <bool bug> __global__ void last_block(float* partial, unsigned* done, float* out) {
  WARPSMITH_SHARED(int, last, 1);
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = 1;
    if (!bug) __threadfence();
    *last = atomicAdd(done, 1) == gridDim.x - 1;
    if (!bug) __threadfence();
  }
  __syncthreads();
  if (*last && threadIdx.x == 0) {
    float sum = 0;
    for (unsigned b = 0; b < gridDim.x; ++b) sum += partial[b];
    *out = sum;
  }
}
PLANTED(partial_sums_without_fence, "tsan", "data race") {
  Buffer<float> partial(8), out(1);
  unsigned done = 0;
  const Status status =
      LAUNCH_PLANTED(bug, last_block, (LaunchConfig{.grid = 8, .block = 256}), partial.data(), &done, out.data());
  return outcome(status, out, std::vector<int>{8});
}

template <bool bug> __global__ void atomic_sum(const float* x, float* sum) {
  if (bug)
    atomicAdd(sum, x[blockIdx.x]);
  else if (blockIdx.x == 0) {
    float s = 0;
    for (unsigned i = 0; i < gridDim.x; ++i) s += x[i];
    *sum = s;
  }
}
PLANTED(sum_depends_on_block_order, "plain", "bits differ") {
  static float first = -1;
  Buffer<float> x(64);
  for (int i = 0; i < 64; ++i) x[i] = 1.0f / static_cast<float>(i + 1);
  float sum = 0;
  const Status status = LAUNCH_PLANTED(bug, atomic_sum, (LaunchConfig{.grid = 64, .block = 1}), x.data(), &sum);
  if (!status.ok()) return status.what();
  if (first < 0) first = sum;
  return sum == first ? "" : "bits differ";
}

template <bool bug> __global__ void two_blocks_one_row(float* out) {
  const int row = bug ? blockIdx.x / 2 : blockIdx.x;
  out[row] = static_cast<float>(row);
}
PLANTED(two_blocks_write_one_element, "tsan", "data race") {
  Buffer<float> out(8);
  return outcome(LAUNCH_PLANTED(bug, two_blocks_one_row, (LaunchConfig{.grid = 8, .block = 1}), out.data()),
                 std::vector<int>(), std::vector<int>());
}

template <bool bug> __global__ void large_blocks_one_row(float* out) {
  const int row = bug ? blockIdx.x / 2 : blockIdx.x;
  if (threadIdx.x == 7) out[row] = static_cast<float>(row);
}
PLANTED(two_large_blocks_write_one_element, "tsan", "data race") {
  Buffer<float> out(8);
  return outcome(LAUNCH_PLANTED(bug, large_blocks_one_row, (LaunchConfig{.grid = 8, .block = 512}), out.data()),
                 std::vector<int>(), std::vector<int>());
}

// Static shared memory leaves less than 48 KiB for the dynamic part of a launch that does not opt in to more.
template <bool bug> __global__ void two_kinds_of_shared(float* out) {
  WARPSMITH_SHARED(float, fixed, bug ? 5120 : 64);
  WARPSMITH_DYNAMIC_SHARED(rest);
  fixed[threadIdx.x] = 1;
  *out = fixed[threadIdx.x] + static_cast<float>(rest != nullptr);
}
PLANTED(static_shared_memory_that_the_opt_in_forgets, "plain", "cudaErrorInvalidValue") {
  Buffer<float> out(1);
  return outcome(LAUNCH_PLANTED(bug, two_kinds_of_shared, (LaunchConfig{.block = 1, .dynamic_shared_bytes = 31 << 10}),
                                out.data()),
                 out, std::vector<int>{2});
}

template <bool bug> __global__ void wait_for_later_block(int* flag, int* out) {
  if (blockIdx.x == 0) {
    while (device::load_acquire(flag) == 0) {}
    *out = 1;
  } else {
    device::store_release(flag, 1);
  }
}
PLANTED(spin_on_a_block_that_is_not_resident, "plain", "spins without end") {
  int flag = 0, value = 0;
  const Status status = LAUNCH_PLANTED(bug, wait_for_later_block,
                                       (LaunchConfig{.grid = 4, .block = 1, .cooperative = !bug}), &flag, &value);
  return outcome(status, std::vector<int>{value}, std::vector<int>{1});
}

template <bool bug> __global__ void read_neighbour(int* out) {
  WARPSMITH_SHARED(int, mine, 32);
  mine[threadIdx.x] = static_cast<int>(device::cluster_rank());
  device::cluster_barrier();
  out[blockIdx.x * 32 + threadIdx.x] = *device::cluster_shared(mine + threadIdx.x, device::cluster_rank() ^ 1);
  if (!bug) device::cluster_barrier();
}
PLANTED(cluster_block_exits_too_early, "plain", "that block has exited") {
  Buffer<int> out(64);
  std::vector<int> expected(64, 0);
  std::fill(expected.begin(), expected.begin() + 32, 1);
  return outcome(LAUNCH_PLANTED(bug, read_neighbour, (LaunchConfig{.grid = 2, .block = 32, .cluster = 2}), out.data()),
                 out, expected);
}

template <bool bug> __global__ void write_neighbour(int* out) {
  WARPSMITH_SHARED(int, box, 1);
  if (!bug) device::cluster_barrier();
  if (threadIdx.x == 0) *device::cluster_shared(box, device::cluster_rank() ^ 1) = 7;
  device::cluster_barrier();
  out[blockIdx.x] = *box;
}
PLANTED(cluster_block_not_started, "plain", "has not started") {
  Buffer<int> out(2);
  return outcome(LAUNCH_PLANTED(bug, write_neighbour, (LaunchConfig{.grid = 2, .block = 32, .cluster = 2}), out.data()),
                 out, std::vector<int>{7, 7});
}

template <bool bug> __global__ void dependent(int* x) {
  if (!bug) device::wait_for_previous_kernel();
  x[threadIdx.x] += 1;
}
PLANTED(dependent_launch_without_wait, "plain", "without wait_for_previous_kernel") {
  std::vector<int> x(32, 1);
  const LaunchConfig config{.block = 32, .programmatic_dependent = true};
  return outcome(LAUNCH_PLANTED(bug, dependent, config, x.data()), x, std::vector<int>(32, 2));
}

static __global__ void produce(int* x) { device::store(x + threadIdx.x, static_cast<int>(threadIdx.x)); }
template <bool bug> __global__ void consume(const int* x, int* y) {
  if (!bug) device::wait_for_previous_kernel();
  const int v = device::load(x + threadIdx.x);
  if (bug) device::wait_for_previous_kernel();
  y[threadIdx.x] = v;
}
PLANTED(dependent_launch_reads_too_early, "plain", "what the previous kernel wrote before wait_for_previous_kernel()") {
  Buffer<int> x(32), y(32);
  const Status produced = launch(produce, {.block = 32}, nullptr, x.data());
  if (!produced.ok()) return produced.what();
  std::vector<int> expected(32);
  for (int i = 0; i < 32; ++i) expected[static_cast<size_t>(i)] = i;
  const LaunchConfig config{.block = 32, .programmatic_dependent = true};
  return outcome(LAUNCH_PLANTED(bug, consume, config, x.data(), y.data()), y, expected);
}

// The scratch of one reduction serves the next without a barrier in between: against block_reduce's contract.
template <bool bug> __global__ void two_sums(float* out) {
  WARPSMITH_SHARED(float, scratch, 2 * kThreads / 32);
  float total = 0;
  for (int i = 0; i < 4; ++i)
    total += device::block_sum<kThreads>(static_cast<float>(i), scratch + (bug ? 0 : i % 2 * (kThreads / 32)));
  out[threadIdx.x] = total;
}
PLANTED(reduction_scratch_reused, "tsan", "data race") {
  Buffer<float> out(kThreads);
  return outcome(LAUNCH_PLANTED(bug, two_sums, {.block = kThreads}, out.data()), out,
                 std::vector<int>(kThreads, 6 * kThreads));
}

}  // namespace
}  // namespace warpsmith::test
