// Planted bugs of asynchronous code: copies, mbarriers, proxies, wgmma, register budgets.
#include "device/async_copy.h"
#include "device/convert.h"
#include "device/fence.h"
#include "device/register_budget.h"
#include "device/tensor_copy.h"
#include "device/vector.h"
#include "device/wgmma.h"
#include "planted.h"

namespace warpsmith::test {
namespace {

using device::Mbarrier;

// ---- cp.async: tiles of 128 floats through two buffers, read by another thread than the one that loaded
enum class Copy { right, weak_wait, no_barrier, refilled_early, never_waited };

template <Copy kind> __global__ void staged_sum(const float* x, float* out, int tiles) {
  WARPSMITH_DYNAMIC_SHARED(memory);
  auto* buffer = reinterpret_cast<float*>(memory);
  const int t = threadIdx.x;
  const auto load = [&](int tile) {
    if (tile < tiles) device::copy_async<4>(buffer + tile % 2 * 128 + t, x + tile * 128 + t);
    device::copy_async_commit();
  };
  load(0);
  float sum = 0;
  for (int i = 0; i < tiles; ++i) {
    if (kind == Copy::refilled_early) {
      load(i + 1);
      device::copy_async_wait<1>();
      __syncthreads();
      sum += buffer[i % 2 * 128 + (127 - t)];
      continue;  // the next load may overwrite what others still read
    }
    load(i + 1);
    if (kind == Copy::never_waited) continue;
    if (kind == Copy::weak_wait)
      device::copy_async_wait<2>();
    else
      device::copy_async_wait<1>();
    if (kind != Copy::no_barrier) __syncthreads();
    sum += buffer[i % 2 * 128 + (127 - t)];
    __syncthreads();
  }
  if (kind != Copy::never_waited) device::copy_async_wait<0>();
  out[t] = sum;
}

template <Copy kind> std::string run_staged_sum(bool bug) {
  Buffer<float> x(8 * 128), out(128);
  std::vector<int> expected(128);
  for (int i = 0; i < 8 * 128; ++i) {
    x[i] = static_cast<float>(i % 50);
    expected[static_cast<size_t>(127 - i % 128)] += i % 50;
  }
  const LaunchConfig config{.block = 128, .dynamic_shared_bytes = 1024};
  const Status status = bug ? launch(staged_sum<kind>, config, nullptr, x.data(), out.data(), 8)
                            : launch(staged_sum<Copy::right>, config, nullptr, x.data(), out.data(), 8);
  return outcome(status, out, expected);
}
PLANTED(copy_wait_too_weak, "plain", "wrong result") { return run_staged_sum<Copy::weak_wait>(bug); }
PLANTED(copy_without_barrier, "plain", "wrong result") { return run_staged_sum<Copy::no_barrier>(bug); }
PLANTED(copy_without_barrier_races, "tsan", "data race") { return run_staged_sum<Copy::no_barrier>(bug); }
PLANTED(copy_refills_too_early, "plain", "wrong result") { return run_staged_sum<Copy::refilled_early>(bug); }
PLANTED(copy_never_waited_for, "plain", "copies that were not waited for") {
  return run_staged_sum<Copy::never_waited>(bug);
}

template <bool bug> __global__ void misaligned_copy(const float* x, float* out) {
  WARPSMITH_DYNAMIC_SHARED(memory);
  device::copy_async<16>(memory + 16 * threadIdx.x, x + 4 * threadIdx.x + (bug ? 1 : 0));
  device::copy_async_commit();
  device::copy_async_wait<0>();
  out[threadIdx.x] = reinterpret_cast<const float*>(memory)[4 * threadIdx.x];
}
PLANTED(misaligned_copy_source, "plain", "cudaErrorMisalignedAddress") {
  Buffer<float> x(132), out(32);
  std::vector<int> expected(32);
  for (int i = 0; i < 132; ++i) x[i] = static_cast<float>(i);
  for (int i = 0; i < 32; ++i) expected[static_cast<size_t>(i)] = 4 * i;
  const LaunchConfig config{.block = 32, .dynamic_shared_bytes = 512};
  return outcome(LAUNCH_PLANTED(bug, misaligned_copy, config, x.data(), out.data()), out, expected);
}

// ---- a ring of bulk loads
enum class RingBug {
  none,
  parity,
  few_bytes,
  many_bytes,
  no_arrive,
  two_arrivals,
  no_init,
  no_init_fence,
  early_release,
  exits_with_copy_in_flight
};

template <RingBug kind> __global__ void ring(const float* x, float* out, int tiles) {
  WARPSMITH_DYNAMIC_SHARED(memory);
  WARPSMITH_SHARED(Mbarrier, full, 2);
  WARPSMITH_SHARED(Mbarrier, empty, 2);
  auto* buffer = reinterpret_cast<float*>(memory);
  const int t = threadIdx.x;
  if (t == 0) {
    for (int s = 0; s < 2; ++s) {
      device::mbarrier_init(full + s, 1);
      if (kind != RingBug::no_init || s == 0) device::mbarrier_init(empty + s, 128);
    }
    if (kind != RingBug::no_init_fence) device::mbarrier_init_fence();
  }
  __syncthreads();
  device::Ring<2> at;
  if (t == 128) {
    const int issued = tiles + (kind == RingBug::exits_with_copy_in_flight ? 1 : 0);
    for (int i = 0; i < issued; ++i, at.next()) {
      device::mbarrier_wait(empty + at.stage, at.parity ^ 1);
      const int bytes = kind == RingBug::few_bytes ? 256 : kind == RingBug::many_bytes ? 1024 : 512;
      device::mbarrier_arrive_expect(full + at.stage, bytes);
      device::bulk_load(buffer + at.stage * 128, x + i % tiles * 128, 512, full + at.stage);
    }
  } else if (t < 128) {
    float sum = 0;
    for (int i = 0; i < tiles; ++i, at.next()) {
      device::mbarrier_wait(full + at.stage, kind == RingBug::parity ? 0 : at.parity);
      if (kind == RingBug::early_release) device::mbarrier_arrive(empty + at.stage);
      for (int k = 0; k < 4; ++k) sum += device::load(buffer + at.stage * 128 + (t + 32 * k) % 128);
      if (kind == RingBug::early_release || (kind == RingBug::no_arrive && t == 5)) continue;
      device::mbarrier_arrive(empty + at.stage);
      if (kind == RingBug::two_arrivals && t == 5) device::mbarrier_arrive(empty + at.stage);
    }
    out[t] = sum;
  }
}

template <RingBug kind> std::string run_ring(bool bug) {
  Buffer<float> x(7 * 128), out(128);
  std::vector<int> expected(128);
  for (int i = 0; i < 7 * 128; ++i) {
    x[i] = static_cast<float>(i / 32 % 13);
    for (int k = 0; k < 4; ++k) expected[static_cast<size_t>((i % 128 + 32 * k) % 128)] += i / 32 % 13;
  }
  const LaunchConfig config{.block = 160, .dynamic_shared_bytes = 1024};
  const Status status = bug ? launch(ring<kind>, config, nullptr, x.data(), out.data(), 7)
                            : launch(ring<RingBug::none>, config, nullptr, x.data(), out.data(), 7);
  return outcome(status, out, expected);
}
PLANTED(wrong_phase_parity, "plain", "more arrivals than the phase expects") { return run_ring<RingBug::parity>(bug); }
PLANTED(transaction_count_too_small, "plain", "lacks 0 of 1 arrivals and -256 bytes]") {
  return run_ring<RingBug::few_bytes>(bug);
}
PLANTED(transaction_count_too_large, "plain", "and 512 bytes]") { return run_ring<RingBug::many_bytes>(bug); }
PLANTED(missing_arrive_on_empty, "plain", "lacks 1 of 128 arrivals") { return run_ring<RingBug::no_arrive>(bug); }
PLANTED(one_arrival_too_many, "plain", "deadlock") { return run_ring<RingBug::two_arrivals>(bug); }
PLANTED(mbarrier_not_initialised, "plain", "the mbarrier was not initialised") {
  return run_ring<RingBug::no_init>(bug);
}
PLANTED(mbarrier_init_without_fence, "plain", "mbarrier_init_fence() is missing") {
  return run_ring<RingBug::no_init_fence>(bug);
}
PLANTED(stage_released_before_it_was_read, "plain", "wrong result") { return run_ring<RingBug::early_release>(bug); }
PLANTED(stage_released_early_races, "tsan", "data race") { return run_ring<RingBug::early_release>(bug); }
PLANTED(block_exits_with_copy_in_flight, "plain", "block exits while a bulk copy") {
  return run_ring<RingBug::exits_with_copy_in_flight>(bug);
}

// ---- bulk stores
enum class StoreBug { none, no_fence, one_thread_fences, overwritten, no_wait, waits_for_read_only };

template <StoreBug kind> __global__ void store_rounds(float* out, float* echo) {
  WARPSMITH_DYNAMIC_SHARED(memory);
  auto* buffer = reinterpret_cast<float*>(memory);
  const int t = threadIdx.x;
  for (int round = 0; round < 3; ++round) {
    if (t == 0 && kind != StoreBug::overwritten) device::bulk_wait_read<0>();
    __syncthreads();
    buffer[t] = static_cast<float>(t + round);
    if (kind == StoreBug::one_thread_fences ? t == 0 : kind != StoreBug::no_fence) device::fence_async_shared();
    __syncthreads();
    if (t == 0) {
      device::bulk_store(out + round * 128, buffer, 512);
      device::bulk_commit();
    }
  }
  if (t == 0) {
    if (kind == StoreBug::no_wait) return;
    if (kind == StoreBug::waits_for_read_only)
      device::bulk_wait_read<0>();
    else
      device::bulk_wait<0>();
    echo[0] = out[2 * 128];
  }
}

template <StoreBug kind> std::string run_store(bool bug) {
  Buffer<float> out(385);
  std::vector<int> expected(385);
  for (int round = 0; round < 3; ++round)
    for (int t = 0; t < 128; ++t) expected[static_cast<size_t>(round * 128 + t)] = t + round;
  expected[384] = 2;
  const LaunchConfig config{.block = 128, .dynamic_shared_bytes = 512};
  const Status status = bug ? launch(store_rounds<kind>, config, nullptr, out.data(), out.data() + 384)
                            : launch(store_rounds<StoreBug::none>, config, nullptr, out.data(), out.data() + 384);
  return outcome(status, out, expected);
}
PLANTED(store_without_proxy_fence, "plain", "without fence_async_shared()") {
  return run_store<StoreBug::no_fence>(bug);
}
PLANTED(proxy_fence_of_one_thread_only, "tsan", "data race") { return run_store<StoreBug::one_thread_fences>(bug); }
PLANTED(store_source_overwritten, "plain", "wrong result") { return run_store<StoreBug::overwritten>(bug); }
PLANTED(store_not_waited_for, "plain", "bulk_wait_read() is missing") { return run_store<StoreBug::no_wait>(bug); }
PLANTED(result_read_after_wait_for_source, "plain", "wrong result") {
  return run_store<StoreBug::waits_for_read_only>(bug);
}

// Rows of 32 floats, in boxes of all rows and some columns.
Status map_rows(TensorMap& map, Buffer<float>& x, int rows, int columns,
                device::Swizzle swizzle = device::Swizzle::none) {
  return make_tensor_map(map, {.base = x.data(),
                               .dtype = Dtype::float32,
                               .rank = 2,
                               .sizes = {32, rows},
                               .strides_bytes = {0, 128},
                               .box = {columns, rows},
                               .swizzle = swizzle});
}

template <bool bug> __global__ void swizzled_load(const __grid_constant__ TensorMap map, float* out) {
  WARPSMITH_DYNAMIC_SHARED(memory);
  WARPSMITH_SHARED(Mbarrier, full, 1);
  if (threadIdx.x) return;
  device::mbarrier_init(full, 1);
  device::mbarrier_init_fence();
  device::mbarrier_arrive_expect(full, 1024);
  device::tensor_load(memory + (bug ? 128 : 0), &map, full, {0, 0});
  device::mbarrier_wait(full, 0);
  for (uint32_t i = 0; i < 256; ++i)
    out[i] = *reinterpret_cast<const float*>(memory + device::swizzled(device::Swizzle::bytes128, i * 4));
}
template <bool bug> __global__ void box_at_column(const __grid_constant__ TensorMap map, float* out) {
  WARPSMITH_DYNAMIC_SHARED(memory);
  WARPSMITH_SHARED(Mbarrier, full, 1);
  if (threadIdx.x) return;
  device::mbarrier_init(full, 1);
  device::mbarrier_init_fence();
  device::mbarrier_arrive_expect(full, 64);
  device::tensor_load(memory, &map, full, {bug ? 6 : 8, 0});
  device::mbarrier_wait(full, 0);
  for (int i = 0; i < 16; ++i) out[i] = reinterpret_cast<const float*>(memory)[i];
}
PLANTED(box_not_on_16_bytes, "plain", "innermost coordinate must be a multiple of 16 bytes") {
  Buffer<float> x(32), out(16);
  std::vector<int> expected(16);
  for (int i = 0; i < 32; ++i) x[i] = static_cast<float>(i);
  for (int i = 0; i < 16; ++i) expected[static_cast<size_t>(i)] = 8 + i;
  TensorMap map;
  const Status made = map_rows(map, x, 1, 16);
  if (!made.ok()) return made.what();
  const LaunchConfig config{.block = 32, .dynamic_shared_bytes = 64};
  return outcome(LAUNCH_PLANTED(bug, box_at_column, config, map, out.data()), out, expected);
}
template <bool bug> __global__ void store_before_the_tensor(const __grid_constant__ TensorMap map) {
  WARPSMITH_DYNAMIC_SHARED(memory);
  if (threadIdx.x) return;
  for (int i = 0; i < 16; ++i) reinterpret_cast<float*>(memory)[i] = static_cast<float>(i);
  device::fence_async_shared();
  device::tensor_store(&map, memory, {bug ? -4 : 4, 0});
  device::bulk_commit();
  device::bulk_wait<0>();
}
PLANTED(store_at_negative_coordinates, "plain", "coordinates must not be negative") {
  Buffer<float> out(32);
  std::vector<int> expected(32);
  for (int i = 0; i < 32; ++i) out[i] = 0;
  for (int i = 0; i < 16; ++i) expected[static_cast<size_t>(4 + i)] = i;
  TensorMap map;
  const Status made = map_rows(map, out, 1, 16);
  if (!made.ok()) return made.what();
  const LaunchConfig config{.block = 32, .dynamic_shared_bytes = 64};
  return outcome(LAUNCH_PLANTED(bug, store_before_the_tensor, config, map), out, expected);
}
PLANTED(swizzled_buffer_misaligned, "plain", "aligned to 1024 bytes") {
  Buffer<float> x(256), out(256);
  std::vector<int> expected(256);
  for (int i = 0; i < 256; ++i) x[i] = static_cast<float>(expected[static_cast<size_t>(i)] = i);
  TensorMap map;
  const Status made = map_rows(map, x, 8, 32, device::Swizzle::bytes128);
  if (!made.ok()) return made.what();
  const LaunchConfig config{.block = 32, .dynamic_shared_bytes = 2048};
  return outcome(LAUNCH_PLANTED(bug, swizzled_load, config, map, out.data()), out, expected);
}

// ---- wgmma
enum class WgmmaBug {
  none,
  read_before_wait,
  no_fence,
  wrong_swizzle,
  no_proxy_fence,
  never_written,
  operand_overwritten,
  wait_too_weak
};

template <WgmmaBug kind> __global__ void __launch_bounds__(128) product(float* d) {
  WARPSMITH_DYNAMIC_SHARED(memory);
  const int t = threadIdx.x;
  constexpr auto kSwizzle = device::Swizzle::bytes128;
  // Both operands: 64 rows of 64 elements; a[r][k] = r % 5, b[n][k] = k < 32.
  for (int i = t; i < (kind == WgmmaBug::never_written ? 0 : 64 * 64); i += 128) {
    const auto at = device::swizzled(kSwizzle, static_cast<uint32_t>(i) * 2);
    *reinterpret_cast<bfloat16*>(memory + at) = device::from_float<bfloat16>(static_cast<float>(i / 64 % 5));
    *reinterpret_cast<bfloat16*>(memory + 8192 + at) = device::from_float<bfloat16>(i % 64 < 32 ? 1.0f : 0.0f);
  }
  if (kind != WgmmaBug::no_proxy_fence && kind != WgmmaBug::never_written) device::fence_async_shared();
  __syncthreads();
  float acc[32] = {};
  const uint64_t a = device::wgmma_descriptor(kSwizzle, memory, 16, 1024);
  const uint64_t b = device::wgmma_descriptor(kind == WgmmaBug::wrong_swizzle ? device::Swizzle::bytes64 : kSwizzle,
                                              memory + 8192, 16, 1024);
  if (kind != WgmmaBug::no_fence) device::wgmma_fence();
  for (uint32_t k = 0; k < 4; ++k)
    device::wgmma<bfloat16, 64>(acc, device::advance(a, 32 * k), device::advance(b, 32 * k), true);
  device::wgmma_commit();
  float early = 0;
  if (kind == WgmmaBug::read_before_wait) early = acc[0] - acc[0];
  if (kind == WgmmaBug::wait_too_weak) {
    device::wgmma_wait<1>();
    early = acc[0] - acc[0];
  }
  if (kind == WgmmaBug::operand_overwritten) {
    __syncthreads();
    for (int i = t; i < 2048; i += 128) reinterpret_cast<uint32_t*>(memory)[i] = 0;
    device::fence_async_shared();
    __syncthreads();
  }
  device::wgmma_wait<0>();
  const int row = t / 32 * 16 + t % 32 / 4;
  for (int j = 0; j < 32; ++j) d[(row + 8 * (j >> 1 & 1)) * 64 + 8 * (j >> 2) + 2 * (t % 4) + (j & 1)] = acc[j] + early;
}

template <WgmmaBug kind> std::string run_product(bool bug) {
  Buffer<float> d(64 * 64);
  std::vector<int> expected(64 * 64);
  for (int i = 0; i < 64 * 64; ++i) expected[static_cast<size_t>(i)] = i / 64 % 5 * 32;
  const LaunchConfig config{.block = 128, .dynamic_shared_bytes = 16384};
  return outcome(bug ? launch(product<kind>, config, nullptr, d.data())
                     : launch(product<WgmmaBug::none>, config, nullptr, d.data()),
                 d, expected);
}
PLANTED(accumulators_read_before_the_wait, "plain", "wrong result") {
  return run_product<WgmmaBug::read_before_wait>(bug);
}
PLANTED(wgmma_wait_too_weak, "plain", "wrong result") { return run_product<WgmmaBug::wait_too_weak>(bug); }
PLANTED(wgmma_without_fence, "plain", "begins with wgmma_fence()") { return run_product<WgmmaBug::no_fence>(bug); }
PLANTED(wgmma_descriptor_of_another_swizzle, "plain", "wrong result") {
  return run_product<WgmmaBug::wrong_swizzle>(bug);
}
PLANTED(wgmma_operand_without_proxy_fence, "plain", "wgmma: reads shared memory that ordinary stores wrote") {
  return run_product<WgmmaBug::no_proxy_fence>(bug);
}
PLANTED(wgmma_operand_never_written, "plain", "wgmma: reads shared memory that nothing wrote") {
  return run_product<WgmmaBug::never_written>(bug);
}
PLANTED(wgmma_operand_overwritten, "plain", "wrong result") { return run_product<WgmmaBug::operand_overwritten>(bug); }

template <bool bug> __global__ void registers() {
  if (threadIdx.x < 128) {
    if (!bug) device::decrease_registers<40>();
  } else {
    device::increase_registers<232>();
  }
}
PLANTED(registers_never_given_back, "plain", "wait at setmaxnreg") {
  return outcome(LAUNCH_PLANTED(bug, registers, {.block = 384}), std::vector<int>(), std::vector<int>());
}

}  // namespace
}  // namespace warpsmith::test
