// The smallest proof that a kernel runs on the host: vector access, a block reduction, an asynchronous copy, launch errors.
#include <cstdio>
#include <string>
#include <vector>

#include "common/launch.h"
#include "device/async_copy.h"
#include "device/programmatic_launch.h"
#include "device/reduce.h"
#include "device/vector.h"
#include "sim/sim.h"

using namespace warpsmith;

namespace {

template <int Threads> __global__ void __launch_bounds__(Threads) row_sums(const bfloat16* x, float* sums, int64_t columns) {
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

int failures = 0;
void expect(bool ok, const std::string& what) {
  if (!ok) std::printf("FAIL %s\n", what.c_str());
  failures += !ok;
}

}  // namespace

int main() {
  constexpr int64_t kRows = 3, kColumns = 1000;
  std::vector<device::Vector<bfloat16, 8>> x(kRows * kColumns / 8);
  std::vector<float> expected(kRows, 0.0f);
  for (int64_t i = 0; i < kRows * kColumns; ++i) {
    const float value = static_cast<float>(i % 7 - 3);
    x[i / 8].at[i % 8] = device::from_float<bfloat16>(value);
    expected[i / kColumns] += value;
  }
  LaunchConfig config{.grid = kRows, .block = 128, .dynamic_shared_bytes = kColumns * 2};
  for (uint64_t seed = 0; seed < 8; ++seed) {
    sim::options().seed = seed;
    sim::counters() = {};
    config.programmatic_dependent = seed % 2;
    std::vector<float> sums(kRows, -1.0f);
    const Status status = launch(row_sums<128>, config, nullptr, x[0].at, sums.data(), kColumns);
    expect(status.ok(), status.what());
    expect(sums == expected, "row sums, seed " + std::to_string(seed));
    expect(sim::counters().global_bytes_read == kRows * kColumns * 2, "bytes read");
    expect(sim::counters().global_bytes_written == kRows * 4, "bytes written");
  }
  config.dynamic_shared_bytes = 300 * 1024;
  Status refused = launch(row_sums<128>, config, nullptr, x[0].at, expected.data(), kColumns);
  expect(refused.kind() == Status::Kind::device && refused.what().starts_with("cudaErrorInvalidValue"), refused.what());
  std::puts(failures ? "failed" : "ok");
  return failures != 0;
}
