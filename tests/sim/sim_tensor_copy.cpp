// Copies of boxes by tensor maps, to and from shared memory and in every swizzle, against plain loops, under every
// schedule; and the maps that a driver refuses.
#include "device/launch.h"
#include "device/tensor_copy.h"
#include "device/tensor_map.h"
#include "harness.h"

namespace warpsmith::test {
namespace {

using device::Mbarrier;
using device::Swizzle;

template <class T> __global__ void copy_box(const __grid_constant__ TensorMap from,
                                            const __grid_constant__ TensorMap to, int row, int column, int bytes,
                                            bool add, T* raw) {
  WARPSMITH_DYNAMIC_SHARED(buffer);
  WARPSMITH_SHARED(Mbarrier, full, 1);
  const int t = threadIdx.x;
  if (t == 0) {
    device::mbarrier_init(full, 1);
    device::mbarrier_init_fence();
    device::prefetch_tensor_map(&from);
    device::mbarrier_arrive_expect(full, bytes);
    device::tensor_load(buffer, &from, full, {column, row});
    device::mbarrier_wait(full, 0);
    if (add)
      device::tensor_add(&to, buffer, {column, row});
    else
      device::tensor_store(&to, buffer, {column, row});
    device::bulk_commit();
  }
  __syncthreads();
  if (t == 0) {
    for (int i = 0; i < bytes / static_cast<int>(sizeof(T)); ++i) raw[i] = reinterpret_cast<const T*>(buffer)[i];
    device::bulk_wait<0>();
  }
}

template <class T> constexpr Dtype kDtype = Dtype::float32;
template <> constexpr Dtype kDtype<float16> = Dtype::float16;
template <> constexpr Dtype kDtype<bfloat16> = Dtype::bfloat16;

template <class T> void box_is_copied(Random& random, Swizzle swizzle) {
  const int per_16 = 16 / static_cast<int>(sizeof(T));
  const int span = swizzle == Swizzle::none ? per_16 * static_cast<int>(random.integer(1, 4))
                                            : device::swizzle_span_bytes(swizzle) / static_cast<int>(sizeof(T));
  const int box_rows = static_cast<int>(random.integer(1, 20)), rows = static_cast<int>(random.integer(1, 40)),
            columns = per_16 * static_cast<int>(random.integer(1, 20));
  const int row = static_cast<int>(random.integer(0, rows)),
            column = per_16 * static_cast<int>(random.integer(0, columns / per_16));
  const bool add = random.coin();
  Buffer<T> x(rows * columns), y(rows * columns), raw(box_rows * span);
  for (size_t i = 0; i < x.size(); ++i) x[i] = from_float<T>(static_cast<float>(i % 63));
  TensorMapSpec spec{.dtype = kDtype<T>,
                     .rank = 2,
                     .sizes = {columns, rows},
                     .strides_bytes = {0, columns * static_cast<int64_t>(sizeof(T))},
                     .box = {span, box_rows},
                     .swizzle = swizzle};
  TensorMap from, to;
  spec.base = x.data();
  expect_ok(make_tensor_map(from, spec));
  spec.base = y.data();
  expect_ok(make_tensor_map(to, spec));
  under_every_seed([&] {
    for (size_t i = 0; i < y.size(); ++i) y[i] = from_float<T>(100.0f);
    const int bytes = box_rows * span * static_cast<int>(sizeof(T));
    const LaunchConfig config{.block = 32, .dynamic_shared_bytes = static_cast<size_t>(bytes)};
    expect_ok(launch(copy_box<T>, config, nullptr, from, to, row, column, bytes, add, raw.data()));
    std::vector<double> expected(y.size(), 100.0), expected_raw(raw.size());
    int64_t inside = 0;
    for (int r = 0; r < box_rows; ++r)
      for (int c = 0; c < span; ++c) {
        const bool in = r + row >= 0 && r + row < rows && c + column >= 0 && c + column < columns;
        const auto i = static_cast<size_t>((r + row) * columns + c + column);
        const double v = in ? static_cast<double>(to_float(x[i])) : 0;
        if (in) expected[i] = v + (add ? 100 : 0);
        inside += in;
        const auto at = static_cast<uint32_t>((r * span + c) * static_cast<int>(sizeof(T)));
        expected_raw[device::swizzled(swizzle, at) / sizeof(T)] = v;
      }
    expect_close("destination", y, expected, {});
    expect_close("shared memory", raw, expected_raw, {});
    expect_bytes(
        {.read = inside * static_cast<int64_t>(sizeof(T)), .written = inside * static_cast<int64_t>(sizeof(T))});
  });
}

RANDOM_TEST(tensor_copies_of_boxes) {
  NEEDS_SM90_CODE;
  const Swizzle swizzle = random.choice({Swizzle::none, Swizzle::bytes32, Swizzle::bytes64, Swizzle::bytes128});
  switch (random.integer(0, 2)) {
    case 0: box_is_copied<float>(random, swizzle); break;
    case 1: box_is_copied<float16>(random, swizzle); break;
    default: box_is_copied<bfloat16>(random, swizzle); break;
  }
}

__global__ void copy_five_dimensions(const __grid_constant__ TensorMap from, float* out) {
  WARPSMITH_DYNAMIC_SHARED(buffer);
  WARPSMITH_SHARED(Mbarrier, full, 1);
  if (threadIdx.x) return;
  device::mbarrier_init(full, 1);
  device::mbarrier_init_fence();
  device::mbarrier_arrive_expect(full, 4 * 2 * 2 * 2 * 2 * 4);
  device::tensor_load(buffer, &from, full, {4, 1, 0, 1, 1});
  device::mbarrier_wait(full, 0);
  for (int i = 0; i < 64; ++i) out[i] = reinterpret_cast<const float*>(buffer)[i];
}

TEST(tensor_load_of_five_dimensions) {
  NEEDS_SM90_CODE;
  Buffer<float> x(8 * 3 * 2 * 3 * 2), out(64);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i);
  TensorMapSpec spec{.base = x.data(),
                     .dtype = Dtype::float32,
                     .rank = 5,
                     .sizes = {8, 3, 2, 3, 2},
                     .strides_bytes = {0, 32, 96, 192, 576},
                     .box = {4, 2, 2, 2, 2}};
  TensorMap map;
  expect_ok(make_tensor_map(map, spec));
  std::vector<double> expected;
  for (int e = 1; e < 3; ++e)
    for (int d = 1; d < 3; ++d)
      for (int c = 0; c < 2; ++c)
        for (int b = 1; b < 3; ++b)
          for (int a = 4; a < 8; ++a) expected.push_back(e < 2 ? a + 8 * b + 24 * c + 48 * d + 144 * e : 0);
  under_every_seed([&] {
    out.poison();
    expect_ok(launch(copy_five_dimensions, {.block = 32, .dynamic_shared_bytes = 256}, nullptr, map, out.data()));
    expect_close("box", out, expected, {});
  });
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
  refused([](auto& s) { s.swizzle = Swizzle::bytes128; }, "swizzle's span");
  refused([](auto& s) { s.sizes[0] = 0; }, "sizes[0]");
}

}  // namespace
}  // namespace warpsmith::test
