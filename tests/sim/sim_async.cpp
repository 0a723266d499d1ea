// Named barriers, mbarriers, bulk copies, clusters and register budgets against plain loops, under every schedule.
#include "device/cluster.h"
#include "device/fence.h"
#include "device/launch.h"
#include "device/named_barrier.h"
#include "device/register_budget.h"
#include "device/tensor_copy.h"
#include "device/tensor_map.h"
#include "device/vector.h"
#include "harness.h"

namespace warpsmith::test {
namespace {

using device::Mbarrier;

// ---- named barriers: two warps produce, two consume, through one buffer
__global__ void ping_pong(int* out, int rounds) {
  WARPSMITH_SHARED(int, buffer, 64);
  const int t = threadIdx.x;
  if (t < 64) {
    for (int i = 0; i < rounds; ++i) {
      if (i > 0) device::named_barrier_wait(2, 128);  // empty
      buffer[t] = 1000 * i + t;
      device::named_barrier_arrive(1, 128);  // full
    }
  } else {
    int sum = 0;
    for (int i = 0; i < rounds; ++i) {
      device::named_barrier_wait(1, 128);
      sum += buffer[127 - t];
      if (i + 1 < rounds) device::named_barrier_arrive(2, 128);
    }
    out[t - 64] = sum;
  }
}

TEST(named_barriers_hand_a_buffer_back_and_forth) {
  under_every_seed([] {
    Buffer<int> out(64);
    expect_ok(launch(ping_pong, {.block = 128}, nullptr, out.data(), 5));
    for (int t = 0; t < 64; ++t) expect_equal("sum", out[t], 10 * 1000 + 5 * (63 - t));
  });
}

// ---- a ring of bulk loads: one producer thread, 128 consumers
constexpr int kStages = 3, kTile = 512;

__global__ void ring_sum(const float* x, float* out, int tiles) {
  WARPSMITH_DYNAMIC_SHARED(memory);
  WARPSMITH_SHARED(Mbarrier, full, kStages);
  WARPSMITH_SHARED(Mbarrier, empty, kStages);
  auto* buffer = reinterpret_cast<float*>(memory);
  const int t = threadIdx.x;
  if (t == 0) {
    for (int s = 0; s < kStages; ++s) {
      device::mbarrier_init(full + s, 1);
      device::mbarrier_init(empty + s, 128);
    }
    device::mbarrier_init_fence();
  }
  __syncthreads();
  device::Ring<kStages> ring;
  if (t == 128) {
    for (int i = 0; i < tiles; ++i, ring.next()) {
      device::mbarrier_wait(empty + ring.stage, ring.parity ^ 1);
      device::mbarrier_arrive_expect(full + ring.stage, kTile * 4);
      device::bulk_load(buffer + ring.stage * kTile, x + i * kTile, kTile * 4, full + ring.stage);
    }
  } else if (t < 128) {
    float sum = 0;
    for (int i = 0; i < tiles; ++i, ring.next()) {
      device::mbarrier_wait(full + ring.stage, ring.parity);
      for (int k = 0; k < kTile / 128; ++k) sum += buffer[ring.stage * kTile + k * 128 + t];
      device::mbarrier_arrive(empty + ring.stage);
    }
    out[t] = sum;
  }
}

TEST(bulk_loads_through_a_ring) {
  NEEDS_SM90_CODE;
  constexpr int kTiles = 11;
  Buffer<float> x(kTiles * kTile), out(128);
  std::vector<double> expected(128);
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = static_cast<float>(i % 101);
    expected[i % 128] += static_cast<double>(i % 101);
  }
  under_every_seed([&] {
    out.poison();
    expect_ok(launch(ring_sum, {.block = 160, .dynamic_shared_bytes = kStages * kTile * 4}, nullptr, x.data(),
                     out.data(), kTiles));
    expect_close("sums", out, expected, {});
    expect_bytes({.read = kTiles * kTile * 4, .written = 0});
  });
}

// ---- bulk stores and additions
__global__ void store_and_add(float* stored, float* added) {
  WARPSMITH_DYNAMIC_SHARED(memory);
  auto* buffer = reinterpret_cast<float*>(memory);
  const int t = threadIdx.x;
  for (int round = 0; round < 3; ++round) {
    if (t == 0) device::bulk_wait_read<0>();
    __syncthreads();
    buffer[t] = static_cast<float>(t + round);
    device::fence_async_shared();
    __syncthreads();
    if (t == 0) {
      device::bulk_store(stored + round * 128, buffer, 512);
      device::bulk_add(added, buffer, 512);
      device::bulk_commit();
    }
  }
  if (t == 0) device::bulk_wait<0>();
}

TEST(bulk_stores_and_additions) {
  NEEDS_SM90_CODE;
  Buffer<float> stored(384), added(128);
  std::vector<double> expected_stored(384), expected_added(128);
  for (int round = 0; round < 3; ++round)
    for (int t = 0; t < 128; ++t) {
      expected_stored[static_cast<size_t>(round * 128 + t)] = t + round;
      expected_added[static_cast<size_t>(t)] += t + round + (round == 0 ? 7 : 0);
    }
  under_every_seed([&] {
    stored.poison();
    for (int t = 0; t < 128; ++t) added[t] = 7;
    expect_ok(launch(store_and_add, {.block = 128, .dynamic_shared_bytes = 512}, nullptr, stored.data(), added.data()));
    expect_close("stored", stored, expected_stored, {});
    expect_close("added", added, expected_added, {});
    expect_bytes({.read = 0, .written = 3 * 512 * 2});
  });
}

// ---- clusters
__global__ void cluster_exchange(int* out) {
  WARPSMITH_SHARED(int, mine, 32);
  mine[threadIdx.x] = static_cast<int>(blockIdx.x * 100 + threadIdx.x);
  device::cluster_barrier();
  int sum = 0;
  for (unsigned r = 0; r < device::cluster_size(); ++r) sum += *device::cluster_shared(mine + threadIdx.x, r);
  out[blockIdx.x * 32 + threadIdx.x] = sum + 100000 * static_cast<int>(device::cluster_rank());
  device::cluster_barrier();
}

TEST(distributed_shared_memory) {
  NEEDS_SM90_CODE;
  under_every_seed([] {
    Buffer<int> out(8 * 32);
    expect_ok(launch(cluster_exchange, {.grid = 8, .block = 32, .cluster = 4}, nullptr, out.data()));
    for (int b = 0; b < 8; ++b)
      for (int t = 0; t < 32; ++t) {
        const int first = b / 4 * 4;
        expect_equal("sum over the cluster", out[b * 32 + t], 100 * (4 * first + 6) + 4 * t + 100000 * (b % 4));
      }
  });
}

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

// ---- register budgets
__global__ void move_registers(bool producer_gives) {
  if (threadIdx.x < 128) {
    if (producer_gives) device::decrease_registers<40>();
  } else {
    device::increase_registers<232>();
  }
}

TEST(register_budgets) {
  NEEDS_SM90_CODE;
  under_every_seed([] {
    expect_ok(launch(move_registers, {.block = 384}, nullptr, true));
    expect_refused(launch(move_registers, {.block = 384}, nullptr, false), "at setmaxnreg");
  });
}

}  // namespace
}  // namespace warpsmith::test
