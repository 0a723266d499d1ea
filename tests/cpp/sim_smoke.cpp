// The smallest proof that a kernel runs on the host: vector access, a block reduction, an asynchronous copy, launch
// errors.
#include "common/launch.h"
#include "device/async_copy.h"
#include "device/programmatic_launch.h"
#include "device/reduce.h"
#include "device/vector.h"
#include "harness.h"

namespace warpsmith::test {
namespace {

template <int Threads> __global__ void __launch_bounds__(Threads)
    row_sums(const bfloat16* x, float* sums, int64_t columns) {
  WARPSMITH_SHARED(float, scratch, Threads / 32);
  WARPSMITH_DYNAMIC_SHARED(tile);
  device::wait_for_previous_kernel();
  const bfloat16* row = x + blockIdx.x * columns;
  auto* staged = reinterpret_cast<device::Vector<bfloat16, 8>*>(tile);
  for (int64_t i = threadIdx.x; i < columns / 8; i += Threads) device::copy_async<16>(staged + i, row + i * 8);
  device::copy_async_commit();
  device::copy_async_wait<0>();
  float sum = 0;
  for (int64_t i = threadIdx.x; i < columns / 8; i += Threads) {
    const auto v = device::load(staged + i);
    for (int k = 0; k < 8; ++k) sum += device::to_float(v.at[k]);
  }
  sum = device::block_sum<Threads>(sum, scratch);
  if (threadIdx.x == 0) device::store<device::Cache::streaming>(sums + blockIdx.x, sum);
}

constexpr int64_t kRows = 5, kColumns = 1000;

struct Problem {
  Buffer<bfloat16> x{kRows * kColumns};
  Buffer<float> sums{kRows};
  std::vector<double> expected = std::vector<double>(kRows, 0.0);
  LaunchConfig config{.grid = kRows, .block = 128, .dynamic_shared_bytes = kColumns * 2};

  Problem() {
    for (int64_t i = 0; i < kRows * kColumns; ++i) {
      x[i] = from_float<bfloat16>(static_cast<float>(i % 7 - 3));  // small integers: every order gives the same sum
      expected[i / kColumns] += static_cast<double>(i % 7 - 3);
    }
  }
  Status run() { return launch(row_sums<128>, config, nullptr, x.data(), sums.data(), kColumns); }
};

TEST(row_sums_are_right_under_every_schedule) {
  Problem p;
  for (bool programmatic : {false, true}) {
    p.config.programmatic_dependent = programmatic;
    under_every_seed([&] {
      p.sums.poison();
      expect_ok(p.run());
      expect_close("sums", p.sums, p.expected, {});
      same_bits_for_every_seed("sums", p.sums);
      expect_bytes({.read = kRows * kColumns * 2, .written = kRows * 4});
    });
  }
}

TEST(launches_the_driver_refuses) {
  const auto refused = [](void (*change)(LaunchConfig&), const char* error) {
    Problem p;
    change(p.config);
    expect_refused(p.run(), error);
  };
  refused([](LaunchConfig& c) { c.grid.x = 0; }, "cudaErrorInvalidConfiguration");
  refused([](LaunchConfig& c) { c.grid.y = 65536; }, "cudaErrorInvalidConfiguration");
  refused([](LaunchConfig& c) { c.grid.z = 65536; }, "cudaErrorInvalidConfiguration");
  refused([](LaunchConfig& c) { c.block.x = 1025; }, "cudaErrorInvalidConfiguration");
  refused([](LaunchConfig& c) { c.block = dim3(1, 1, 65); }, "cudaErrorInvalidConfiguration");
  refused([](LaunchConfig& c) { c.cluster = 2; }, "cudaErrorInvalidConfiguration");  // does not divide five blocks
  refused([](LaunchConfig& c) { c.cluster = 16; }, "cudaErrorInvalidClusterSize");
  refused([](LaunchConfig& c) { c.dynamic_shared_bytes = 227 * 1024 + 1; }, "cudaErrorInvalidValue");
  refused([](LaunchConfig& c) { c.grid.x = 132 * 16 + 1, c.cooperative = true; }, "cudaErrorCooperativeLaunchTooLarge");
  refused([](LaunchConfig& c) { c.dynamic_shared_bytes = 227 * 1024; }, "bytes of static and dynamic shared memory");
}

}  // namespace
}  // namespace warpsmith::test
