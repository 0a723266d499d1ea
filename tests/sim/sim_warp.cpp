// What the vectors from a card (tools/gpu/conformance) do not ask of warps: masks of a part of the lanes, bank
// conflicts, what is refused, known answers.
#include "device/launch.h"
#include "device/matrix_access.h"
#include "device/philox.h"
#include "device/programmatic_launch.h"
#include "device/stochastic_rounding.h"
#include "device/transpose_matrix.h"
#include "device/vector.h"
#include "harness.h"

namespace warpsmith::test {
namespace {

constexpr unsigned kWarp = 0xffffffffu;

__global__ void shuffles(int* out) {
  const int lane = threadIdx.x, v = 100 + lane;
  out[0 * 32 + lane] = __shfl_sync(kWarp, v, 9, 8);
  out[1 * 32 + lane] = static_cast<int>(__reduce_max_sync(kWarp, static_cast<unsigned>(lane)));
  // Two halves of a warp at different operations, each with its own mask.
  if (lane < 16)
    out[2 * 32 + lane] = __shfl_xor_sync(0x0000ffffu, v, 1);
  else
    out[2 * 32 + lane] = static_cast<int>(__reduce_add_sync(0xffff0000u, 1u));
}

TEST(groups_and_masks) {
  under_every_seed([] {
    std::vector<int> out(3 * 32, -1);
    expect_ok(launch(shuffles, {.block = 32}, nullptr, out.data()));
    for (int lane = 0; lane < 32; ++lane) {
      const auto at = [&](int row) { return out[static_cast<size_t>(row * 32 + lane)]; };
      expect_equal("shfl in groups of 8", at(0), 100 + lane / 8 * 8 + 1);
      expect_equal("reduce_max", at(1), 31);
      expect_equal("halves", at(2), lane < 16 ? 100 + (lane ^ 1) : 16);
    }
  });
}

__global__ void transpose(uint32_t* out) {
  const uint32_t low = 2 * threadIdx.x;  // element (row, column) is 8 row + column
  out[threadIdx.x] = device::transpose_matrix(low | (low + 1) << 16);
}

TEST(transposed_in_registers) {
  under_every_seed([] {
    std::vector<uint32_t> out(32);
    expect_ok(launch(transpose, {.block = 32}, nullptr, out.data()));
    for (int r = 0; r < 8; ++r)
      for (int c = 0; c < 8; ++c)
        expect_equal("transposed", static_cast<int>(out[r * 4 + c / 2] >> c % 2 * 16 & 0xffff), 8 * c + r);
  });
}

__global__ void column_of_rows(uint32_t* out) {
  using Row = device::Vector<uint16_t, 8>;
  WARPSMITH_SHARED(Row, tile, 8 * 8);
  for (int i = threadIdx.x; i < 64; i += 32) tile[i] = {};
  __syncwarp(kWarp);
  uint32_t r[1];
  device::load_matrix(r, tile + threadIdx.x % 8 * 8);  // rows 128 bytes apart: all in the same banks
  out[threadIdx.x] = r[0];
}

TEST(bank_conflicts_are_counted) {
  std::vector<uint32_t> out(32);
  sim::counters() = {};
  expect_ok(launch(column_of_rows, {.block = 32}, nullptr, out.data()));
  expect_equal("conflicts of eight rows in one bank group", sim::counters().bank_conflicts, int64_t{7});
}

template <int Stride, int N> __global__ void strided_reads(float* out) {
  WARPSMITH_DYNAMIC_SHARED(memory);
  auto* s = reinterpret_cast<float*>(memory);
  for (int i = threadIdx.x; i < 32 * Stride; i += 32) s[i] = static_cast<float>(i);
  __syncwarp(kWarp);
  out[threadIdx.x] = device::load_vector<N>(s + threadIdx.x * Stride).at[0];
}

TEST(bank_conflicts_of_strided_reads) {
  const auto conflicts = [](auto kernel, int stride) {
    Buffer<float> out(32);
    sim::options().count_bank_conflicts = true;
    sim::counters() = {};
    expect_ok(launch(kernel, {.block = 32, .dynamic_shared_bytes = static_cast<size_t>(32 * stride * 4)}, nullptr,
                     out.data()));
    sim::options().count_bank_conflicts = false;
    for (int t = 0; t < 32; ++t) expect_equal("read", static_cast<int>(out[t]), t * stride);
    return sim::counters().bank_conflicts;
  };
  expect_equal("stride 32", conflicts(strided_reads<32, 1>, 32), int64_t{31});
  expect_equal("stride 33", conflicts(strided_reads<33, 1>, 33), int64_t{0});
  expect_equal("stride 2", conflicts(strided_reads<2, 1>, 2), int64_t{1});
  expect_equal("16 bytes, contiguous", conflicts(strided_reads<4, 4>, 4), int64_t{0});
  expect_equal("16 bytes, every other", conflicts(strided_reads<8, 4>, 8), int64_t{4});
}

__global__ void bad_warp_operation(int which) {
  const int lane = threadIdx.x;
  switch (which) {
    case 0: __syncwarp(1u << (lane ^ 1)); break;
    case 1:
      if (lane == 0) return;
      __syncwarp(kWarp);
      break;
    case 2: __syncwarp(lane < 16 ? kWarp : 0xfffffffeu); break;
    case 3:
      if (lane < 16)
        __syncwarp(kWarp);
      else
        __shfl_xor_sync(kWarp, lane, 1);
      break;
    case 4:
      if (lane < 16)
        __syncthreads();
      else
        __syncthreads();
      break;
    case 5:
      if (lane < 31)
        __syncwarp(kWarp);
      else
        __syncthreads();
      break;
    default: break;
  }
}

TEST(what_warp_operations_refuse) {
  const char* expected[] = {"not in its own mask", "names a lane that has exited",
                            "different masks",     "different operations",
                            "divergent barrier",   "deadlock"};
  for (int which = 0; which < 6; ++which)
    for (uint64_t seed = 0; seed < 4; ++seed) {
      sim::options().seed = seed;
      expect_refused(launch(bad_warp_operation, {.block = 32}, nullptr, which), expected[which]);
    }
  sim::options().seed = 0;
}

TEST(deadlock_report_names_thread_barrier_and_line) {
  const Status status = launch(bad_warp_operation, {.block = 32}, nullptr, 5);
  for (const char* part : {"block (0,0,0) thread (0,0,0) and 30 more wait at __syncwarp",
                           "thread (31,0,0) waits at __syncthreads (sim_warp.cpp:"})
    expect_refused(status, part);
}

// Known answers of the Random123 distribution.
TEST(philox_known_answers) {
  const auto check = [](device::PhiloxCounter counter, uint64_t key, std::vector<uint32_t> expected) {
    const device::PhiloxCounter out = device::philox(counter, key);
    for (size_t i = 0; i < 4; ++i) expect_equal("philox word", out.word[i], expected[i]);
  };
  check({{0, 0, 0, 0}}, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  check({{~0u, ~0u, ~0u, ~0u}}, ~0ull, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  check({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0x299f31d0a4093822ull,
        {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST(stochastic_rounding_is_unbiased_and_keeps_special_values) {
  const float x = 1.0f + 0.25f / 128;  // a quarter of the way to the next bfloat16
  int up = 0;
  for (uint32_t r = 0; r < 65536; ++r) up += device::round_stochastic(x, r).bits == 0x3f81;
  expect_equal("rounded up, of 65536", up, 16384);
  expect_equal("NaN", int{device::round_stochastic(NAN, 0xffff).bits}, 0x7fff);
  expect_equal("infinity", int{device::round_stochastic(-INFINITY, 0xffff).bits}, 0xff80);
  expect_equal("exact values stay", int{device::round_stochastic(-2.0f, 0xffff).bits}, 0xc000);
}

static __global__ void permute_bytes(unsigned selector, unsigned* out) {
  *out = __byte_perm(0x33221100u, 0x77665544u, selector);
}
TEST(selectors_that_would_repeat_a_sign) {
  unsigned out = 0;
  expect_refused(launch(permute_bytes, {.block = 1}, nullptr, 0x8210u, &out), "digits of the selector are 0 to 7");
}

// A dependent launch may read at once what an earlier kernel wrote before the host waited: the memory may be another's.
static __global__ void write_one(int* x) { device::store(x, 1); }
static __global__ void read_early(const int* x, int* y) {
  const int v = device::load(x);
  device::wait_for_previous_kernel();
  device::store(y, v);
}
TEST(the_host_waits_between_launches) {
  NEEDS_SM90_CODE;
  alignas(16) int x = 0, y = 0;
  const LaunchConfig dependent{.block = 1, .programmatic_dependent = true};
  expect_ok(launch(write_one, {.block = 1}, nullptr, &x));
  sim::synchronize();
  expect_ok(launch(read_early, dependent, nullptr, &x, &y));
  expect_equal("y", y, 1);
  expect_ok(launch(write_one, {.block = 1}, nullptr, &x));
  expect_refused(launch(read_early, dependent, nullptr, &x, &y), "before wait_for_previous_kernel()");
}

}  // namespace
}  // namespace warpsmith::test
