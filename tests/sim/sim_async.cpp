// Blocks that work together, under every schedule: a multicast load of a cluster, cooperative blocks that take turns,
// the last block's reduction. Each primitive by itself: tools/gpu/conformance; rings, stores, budgets:
// planted_async.cpp.
#include "device/cluster.h"
#include "device/fence.h"
#include "device/launch.h"
#include "device/tensor_copy.h"
#include "device/tensor_map.h"
#include "harness.h"

namespace warpsmith::test {
namespace {

using device::Mbarrier;

// Rank 0 loads one tile for the whole cluster; every block tells rank 0 when its buffer is free.
__global__ void multicast_tiles(const __grid_constant__ TensorMap map, float* out, int tiles) {
  WARPSMITH_DYNAMIC_SHARED(memory);
  WARPSMITH_SHARED(Mbarrier, full, 1);
  WARPSMITH_SHARED(Mbarrier, empty, 1);
  const auto* buffer = reinterpret_cast<const float*>(memory);
  const unsigned blocks = device::cluster_size();
  if (threadIdx.x == 0) {
    device::mbarrier_init(full, 1);
    device::mbarrier_init(empty, static_cast<int>(blocks));
    device::mbarrier_init_fence();
  }
  device::cluster_barrier();
  float sum = 0;
  for (int i = 0; i < tiles; ++i) {
    if (threadIdx.x == 0) {
      device::mbarrier_arrive_expect(full, 256);
      device::mbarrier_arrive_remote(device::cluster_shared(empty, 0));
      if (device::cluster_rank() == 0) {
        device::mbarrier_wait(empty, i & 1);
        device::tensor_load_multicast(memory, &map, full, static_cast<uint16_t>((1u << blocks) - 1), {0, 2 * i});
      }
    }
    device::mbarrier_wait(full, i & 1);
    sum += buffer[threadIdx.x] + buffer[threadIdx.x + 32];
    __syncthreads();
  }
  out[blockIdx.x * 32 + threadIdx.x] = sum;
  device::cluster_barrier();
}

TEST(tensor_load_multicast_to_a_cluster) {
  NEEDS_SM90_CODE;
  constexpr int kTiles = 4;
  Buffer<float> x(32 * 2 * kTiles), out(4 * 32);
  std::vector<double> expected(4 * 32);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 17);
  for (size_t i = 0; i < x.size(); ++i)
    for (size_t b = 0; b < 4; ++b) expected[b * 32 + i % 32] += static_cast<double>(i % 17);
  TensorMap map;
  expect_ok(make_tensor_map(map, {.base = x.data(),
                                  .dtype = Dtype::float32,
                                  .rank = 2,
                                  .sizes = {32, 2 * kTiles},
                                  .strides_bytes = {0, 128},
                                  .box = {32, 2}}));
  under_every_seed([&] {
    out.poison();
    expect_ok(launch(multicast_tiles, {.grid = 4, .block = 32, .dynamic_shared_bytes = 256, .cluster = 2}, nullptr, map,
                     out.data(), kTiles));
    expect_close("sums", out, expected, {});
  });
}

// ---- between blocks
__global__ void in_turn(int* flag, int* total) {
  if (threadIdx.x) return;
  const int me = static_cast<int>(gridDim.x - 1 - blockIdx.x);  // the last block goes first: all must be resident
  while (device::load_acquire(flag) != me) {}
  *total = *total * 2 + 1;
  device::store_release(flag, me + 1);
}

TEST(cooperative_blocks_take_turns) {
  under_every_seed([] {
    int flag = 0, total = 0;
    expect_ok(launch(in_turn, {.grid = 10, .block = 32, .cooperative = true}, nullptr, &flag, &total));
    expect_equal("total", total, 1023);
  });
}

__global__ void last_block_sums(const float* x, float* partial, unsigned* done, float* out) {
  WARPSMITH_SHARED(int, last, 1);
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = x[2 * blockIdx.x] + x[2 * blockIdx.x + 1];
    __threadfence();
    *last = atomicAdd(done, 1) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (!*last || threadIdx.x) return;
  float sum = 0;
  for (unsigned b = 0; b < gridDim.x; ++b) sum += partial[b];
  *out = sum;
}

TEST(the_last_block_reduces) {
  under_every_seed([] {
    Buffer<float> x(20), partial(10), out(1);
    for (int i = 0; i < 20; ++i) x[i] = static_cast<float>(i);
    unsigned done = 0;
    expect_ok(launch(last_block_sums, {.grid = 10, .block = 64}, nullptr, x.data(), partial.data(), &done, out.data()));
    expect_close("sum", out, std::vector<double>{190}, {});
  });
}

}  // namespace
}  // namespace warpsmith::test
