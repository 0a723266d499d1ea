// The smallest proof that a kernel runs on the host: vector access, a block reduction, an asynchronous copy, errors of
// launches and tensor maps.
#include "device/async_copy.h"
#include "device/launch.h"
#include "device/programmatic_launch.h"
#include "device/reduce.h"
#include "device/tensor_map.h"
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

void sums_are_right(bool programmatic) {
  Problem p;
  p.config.programmatic_dependent = programmatic;
  under_every_seed([&] {
    p.sums.poison();
    expect_ok(p.run());
    expect_close("sums", p.sums, p.expected, {});
    same_bits_for_every_seed("sums", p.sums);
    expect_bytes({.read = kRows * kColumns * 2, .written = kRows * 4});
  });
}

TEST(row_sums_are_right_under_every_schedule) { sums_are_right(false); }

TEST(row_sums_are_right_in_a_programmatic_launch) {
  NEEDS_SM90_CODE;
  sums_are_right(true);
}

// Never launched: a kernel whose waits are compiled out would give wrong sums without an error.
TEST(launches_beyond_the_code_are_refused) {
  const auto with_code = [](int code, void (*change)(LaunchConfig&)) {
    Problem p;
    change(p.config);
    Status status;
    sim::counters() = {};
    on_machine(132, code, [&] { status = p.run(); });
    expect(status.ok() || sim::counters().launches == 0, "refused, but launched");
    return status;
  };
  const auto refused = [&](void (*change)(LaunchConfig&), const std::string& asked) {
    for (const int code : {80, 86, 89})
      expect_refused(with_code(code, change),
                     "expected code of sm_90 or newer for " + asked + ", got code of sm_" +
                         std::to_string(std::min(code, sim::options().properties.code_capability)));
  };
  refused([](LaunchConfig& c) { c.grid.x = 8, c.cluster = 4; }, "clusters of 4 blocks");
  refused([](LaunchConfig& c) { c.programmatic_dependent = true; }, "a programmatic launch");
  refused([](LaunchConfig& c) { c.bulk_copies = true; }, "bulk copies");
  refused([](LaunchConfig& c) { c.grid.x = 8, c.cluster = 2, c.programmatic_dependent = c.bulk_copies = true; },
          "clusters of 2 blocks and a programmatic launch and bulk copies");
  expect_ok(with_code(80, [](LaunchConfig&) {}));
}

TEST(launches_beyond_the_code_are_right_with_newer_code) {
  NEEDS_SM90_CODE;
  for (const int code : {90, 100, 120}) {
    sim::options().properties.code_capability = code;
    sums_are_right(true);
  }
  sim::options().properties.code_capability = 90;
}

TEST(an_overlap_is_asked_for_where_the_code_can_wait) {
  for (const int code : {80, 90}) {
    LaunchConfig config;
    on_machine(132, code, [&] { expect_ok(allow_overlap(&config)); });
    const bool can_wait = std::min(code, sim::options().properties.code_capability) >= 90;
    expect(config.programmatic_dependent == can_wait, "overlap with code of sm_" + std::to_string(code));
  }
}

void refused(void (*change)(LaunchConfig&), const char* error) {
  Problem p;
  change(p.config);
  expect_refused(p.run(), error);
}

TEST(clusters_the_driver_refuses) {
  NEEDS_SM90_CODE;
  refused([](LaunchConfig& c) { c.cluster = 2; }, "cudaErrorInvalidConfiguration");  // does not divide five blocks
  refused([](LaunchConfig& c) { c.cluster = 16; }, "cudaErrorInvalidClusterSize");
  sim::options().device_capability = 89;
  refused([](LaunchConfig& c) { c.grid.x = 8, c.cluster = 2; }, "cudaErrorNotSupported");
  sim::options().device_capability = 90;
}

TEST(launches_the_driver_refuses) {
  refused([](LaunchConfig& c) { c.grid.x = 0; }, "cudaErrorInvalidConfiguration");
  refused([](LaunchConfig& c) { c.grid.y = 65536; }, "cudaErrorInvalidConfiguration");
  refused([](LaunchConfig& c) { c.grid.z = 65536; }, "cudaErrorInvalidConfiguration");
  refused([](LaunchConfig& c) { c.block.x = 1025; }, "cudaErrorInvalidConfiguration");
  refused([](LaunchConfig& c) { c.block = dim3(1, 1, 65); }, "cudaErrorInvalidConfiguration");
  refused([](LaunchConfig& c) { c.dynamic_shared_bytes = 227 * 1024 + 1; }, "cudaErrorInvalidValue");
  refused([](LaunchConfig& c) { c.grid.x = 132 * 16 + 1, c.cooperative = true; }, "cudaErrorCooperativeLaunchTooLarge");
  refused([](LaunchConfig& c) { c.dynamic_shared_bytes = 227 * 1024; }, "bytes of static and dynamic shared memory");
}

TEST(tensor_maps_the_driver_refuses) {
  Buffer<float> x(64);
  const auto refused = [&](auto change, const char* part) {
    TensorMapSpec spec{
        .base = x.data(), .dtype = Dtype::float32, .rank = 2, .sizes = {8, 8}, .strides_bytes = {0, 32}, .box = {8, 4}};
    change(spec);
    TensorMap map;
    expect_refused(make_tensor_map(map, spec), part);
  };
  refused([](auto& s) { s.rank = 6; }, "rank must be 1 to 5");
  refused([&](auto& s) { s.base = x.data() + 1; }, "base address");
  refused([](auto& s) { s.strides_bytes[1] = 36; }, "strides_bytes[1]");
  refused([](auto& s) { s.box[1] = 257; }, "box[1]");
  refused([](auto& s) { s.box[0] = 3; }, "multiple of 16 bytes");
  refused([](auto& s) { s.swizzle = device::Swizzle::bytes128; }, "swizzle's span");
  refused([](auto& s) { s.sizes[0] = 0; }, "sizes[0]");
}

}  // namespace
}  // namespace warpsmith::test
