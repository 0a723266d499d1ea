// The example of docs/writing_a_kernel.md, in one file: a kernel, its launcher and its test.
#include <algorithm>

#include "device/launch.h"
#include "device/reduce.h"
#include "device/vector.h"
#include "harness.h"

namespace warpsmith {
namespace {

struct RowAbsmaxParams {
  const bfloat16* x;  // (rows, columns), contiguous, 16-byte aligned; columns is a multiple of 8
  float* out;         // (rows)
  int64_t rows, columns;
};

constexpr int kThreads = 256, kWarps = kThreads / 32;

// out[r] = max |x[r, :]|. Reads x once, writes 4 bytes a row. A block takes rows blockIdx.x, blockIdx.x + gridDim.x,
// ...
__global__ void __launch_bounds__(kThreads) row_absmax(RowAbsmaxParams p) {
  WARPSMITH_SHARED(float, scratch, 2 * kWarps);  // two, in turn: block_max has one barrier
  int turn = 0;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x, turn ^= 1) {
    float largest = 0.0f;
    for (int64_t c = threadIdx.x * 8; c < p.columns; c += kThreads * 8) {
      const auto x = device::load_vector<8, device::Cache::streaming>(p.x + row * p.columns + c);
      for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(device::to_float(x.at[i])));
    }
    largest = device::block_max<kThreads>(largest, scratch + turn * kWarps);
    if (threadIdx.x == 0) device::store(p.out + row, largest);
  }
}

Status row_absmax_cuda(const RowAbsmaxParams& p, void* stream) {
  if (p.rows == 0) return {};
  DeviceProperties device;
  WARPSMITH_RETURN_IF_FAILED(device_properties(device));
  LaunchConfig config;
  config.grid.x = static_cast<unsigned>(std::min<int64_t>(p.rows, 8 * device.multiprocessors));
  config.block.x = kThreads;
  return launch(row_absmax, config, stream, p);
}

}  // namespace
}  // namespace warpsmith

namespace warpsmith::test {
namespace {

void matches(int64_t rows, int64_t columns) {
  Buffer<bfloat16> x(rows * columns);
  Buffer<float> out(rows);
  fill_normal(x, 1);
  std::vector<double> expected(static_cast<size_t>(rows), 0.0);
  for (int64_t i = 0; i < rows * columns; ++i) {
    double& largest = expected[static_cast<size_t>(i / columns)];
    largest = std::max(largest, std::fabs(static_cast<double>(to_float(x[i]))));
  }
  sim::options().properties.multiprocessors = 1;  // 8 blocks, so that a block takes several rows
  under_every_seed([&] {
    out.poison();
    expect_ok(row_absmax_cuda({x.data(), out.data(), rows, columns}, nullptr));
    expect_close("out", out, expected, {});
    same_bits_for_every_seed("out", out);
    expect_bytes({.read = rows * columns * 2, .written = rows * 4});
  });
}

TEST(one_row) { matches(1, 8); }
TEST(several_rows_a_block) { matches(40, 3000); }
RANDOM_TEST(any_size) { matches(random.size(0, 60), 8 * random.size(1, 400)); }

}  // namespace
}  // namespace warpsmith::test
