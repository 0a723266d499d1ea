// Planted bugs of shared memory that both proxies write, and of blocks that share theirs.
#include "device/async_copy.h"
#include "device/cluster.h"
#include "device/fence.h"
#include "device/tensor_copy.h"
#include "device/vector.h"
#include "planted.h"

namespace warpsmith::test {
namespace {

using device::Mbarrier;

// ---- a stage that is loaded, changed in place by ordinary stores, and loaded again

enum class Fence { by_writers, by_issuer, none, by_another, before_the_store };
enum class Store { vocabulary, pointer, copy_async };

template <Fence fence, Store store> __global__ void reloaded(const float* x, float* out, int tiles) {
  WARPSMITH_DYNAMIC_SHARED(memory);
  WARPSMITH_SHARED(Mbarrier, full, 1);
  auto* stage = reinterpret_cast<float*>(memory);
  const int t = static_cast<int>(threadIdx.x);
  if (t == 0) {
    device::mbarrier_init(full, 1);
    device::mbarrier_init_fence();
  }
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < tiles; ++i) {
    if (t == 0) {
      if (fence == Fence::by_issuer) device::fence_async_shared();
      device::mbarrier_arrive_expect(full, 512);
      device::bulk_load(stage, x + i * 128, 512, full);
    }
    device::mbarrier_wait(full, static_cast<unsigned>(i % 2));
    const float v = device::load(stage + t);
    __syncthreads();
    if (fence == Fence::before_the_store) device::fence_async_shared();
    if (store == Store::vocabulary) device::store(stage + (t + 1) % 128, 2 * v);
    if (store == Store::pointer) stage[(t + 1) % 128] = 2 * v;
    if (store == Store::copy_async) {
      device::copy_async<4>(stage + (t + 1) % 128, x + t);
      device::copy_async_commit();
      device::copy_async_wait<0>();
    }
    if (fence == Fence::by_writers || (fence == Fence::by_another && t == 100)) device::fence_async_shared();
    __syncthreads();
    sum += store == Store::copy_async ? v : v + device::load(stage + t);
    __syncthreads();
  }
  out[t] = sum;
}

template <Fence planted, Store store, Fence right = Fence::by_writers> std::string run_reloaded(bool bug) {
  Buffer<float> x(5 * 128), out(128);
  std::vector<int> expected(128);
  for (int i = 0; i < 5 * 128; ++i) {
    x[static_cast<size_t>(i)] = static_cast<float>(i % 37 + 1);
    expected[static_cast<size_t>(i % 128)] += i % 37 + 1;
    if (store != Store::copy_async) expected[static_cast<size_t>((i + 1) % 128)] += 2 * (i % 37 + 1);
  }
  const LaunchConfig config{.block = 128, .dynamic_shared_bytes = 512};
  return outcome(bug ? launch(reloaded<planted, store>, config, nullptr, x.data(), out.data(), 5)
                     : launch(reloaded<right, store>, config, nullptr, x.data(), out.data(), 5),
                 out, expected);
}

constexpr const char* kUnfenced = "bulk load: overwrites shared memory that ordinary stores wrote without";
PLANTED(stage_reloaded_without_proxy_fence, "plain", kUnfenced) {
  return run_reloaded<Fence::none, Store::pointer>(bug);
}
PLANTED(stage_reloaded_behind_another_threads_fence, "plain", kUnfenced) {
  return run_reloaded<Fence::by_another, Store::vocabulary, Fence::by_issuer>(bug);
}
PLANTED(stage_reloaded_behind_an_early_fence, "plain", kUnfenced) {
  return run_reloaded<Fence::before_the_store, Store::vocabulary>(bug);
}
PLANTED(stage_reloaded_behind_copies_of_threads, "plain", kUnfenced) {
  return run_reloaded<Fence::before_the_store, Store::copy_async>(bug);
}
PLANTED(stage_reloaded_behind_another_threads_fence_races, "tsan", "data race") {
  return run_reloaded<Fence::by_another, Store::pointer, Fence::by_issuer>(bug);
}

// ---- blocks of a cluster that start at different times

// Much happens before the first remote store, so that in the usual order of threads both blocks have long started.
template <bool bug> __global__ void exchange_sums(const float* x, float* out) {
  WARPSMITH_SHARED(float, box, 2);
  float v = device::load(x + blockIdx.x * 64 + threadIdx.x);
  if (!bug) device::cluster_arrive_relaxed();
  for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(0xffffffffu, v, d);
  if (!bug) device::cluster_wait();
  if (threadIdx.x % 32 == 0) device::cluster_shared(box, device::cluster_rank() ^ 1)[threadIdx.x / 32] = v;
  device::cluster_barrier();
  out[blockIdx.x * 64 + threadIdx.x] = box[0] + box[1];
}
PLANTED(cluster_start_barrier_dropped, "plain", "has not started") {
  Buffer<float> x(128), out(128);
  std::vector<int> expected(128, 64);
  for (size_t i = 0; i < 128; ++i) x[i] = i < 64 ? 1 : 2;
  std::fill(expected.begin(), expected.begin() + 64, 128);
  const LaunchConfig config{.grid = 2, .block = 64, .cluster = 2};
  return outcome(LAUNCH_PLANTED(bug, exchange_sums, config, x.data(), out.data()), out, expected);
}

template <bool bug> __global__ void multicast_at_once(const __grid_constant__ TensorMap map, float* out) {
  WARPSMITH_DYNAMIC_SHARED(memory);
  WARPSMITH_SHARED(Mbarrier, full, 1);
  if (threadIdx.x == 0) {
    device::mbarrier_init(full, 1);
    device::mbarrier_init_fence();
    device::mbarrier_arrive_expect(full, 128);
  }
  if (bug)
    __syncthreads();
  else
    device::cluster_barrier();
  if (threadIdx.x == 0 && device::cluster_rank() == 0) device::tensor_load_multicast(memory, &map, full, 3, {0});
  device::mbarrier_wait(full, 0);
  out[blockIdx.x * 32 + threadIdx.x] = reinterpret_cast<const float*>(memory)[threadIdx.x];
  device::cluster_barrier();
}
PLANTED(multicast_into_a_block_that_has_not_started, "plain", "in a block that has not started") {
  Buffer<float> x(32), out(64);
  std::vector<int> expected(64);
  for (size_t i = 0; i < 64; ++i) x[i % 32] = static_cast<float>(expected[i] = static_cast<int>(i % 32));
  TensorMap map;
  const Status made =
      make_tensor_map(map, {.base = x.data(), .dtype = Dtype::float32, .rank = 1, .sizes = {32}, .box = {32}});
  if (!made.ok()) return made.what();
  const LaunchConfig config{.grid = 2, .block = 32, .dynamic_shared_bytes = 128, .cluster = 2};
  return outcome(LAUNCH_PLANTED(bug, multicast_at_once, config, map, out.data()), out, expected);
}

}  // namespace
}  // namespace warpsmith::test
