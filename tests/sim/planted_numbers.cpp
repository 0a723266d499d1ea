// Planted bugs of arithmetic that the host computes better than a card: approximate instructions, contracted products.
#include "device/math.h"
#include "device/vector.h"
#include "planted.h"

namespace warpsmith::test {
namespace {

template <bool bug> __global__ void inverse_roots(const float* x, float* y) {
  const float at = device::load(x + threadIdx.x), first = device::rsqrt(at);
  const float error = fmaf(-at * first, first, 1.f);
  device::store(y + threadIdx.x, bug ? first : fmaf(0.5f * first, error, first));
}
PLANTED(newton_step_dropped, "plain", "off by more than a last place") {
  Buffer<float> x(128), y(128);
  for (size_t i = 0; i < 128; ++i) x[i] = 1 + static_cast<float>(i) / 32;
  for (const uint64_t approximation : {1, 2, 3}) {
    sim::options().approximation = approximation;
    const Status status = LAUNCH_PLANTED(bug, inverse_roots, {.block = 128}, x.data(), y.data());
    if (!status.ok()) return status.what();
    for (size_t i = 0; i < 128; ++i) {
      const double want = 1 / std::sqrt(static_cast<double>(x[i]));
      if (std::fabs(y[i] - want) > std::ldexp(1.0, std::ilogb(want) - 23)) return "off by more than a last place";
    }
  }
  return "";
}

// The sum of what two equal products leave of each other.
template <bool bug> __global__ void difference(const float* x, const float* products, float* out) {
  const float a = device::load(x + threadIdx.x), b = device::load(x + 128 + threadIdx.x);
  const float before = device::load(products + threadIdx.x);
  device::store(out + threadIdx.x, before - (bug ? a * b : __fmul_rn(a, b)));
}
PLANTED(product_not_rounded_by_name, "tsan", "wrong result") {
  Buffer<float> x(256), products(128), out(128);
  for (size_t i = 0; i < 256; ++i) x[i] = 1.0f / static_cast<float>(i + 3);
  for (size_t i = 0; i < 128; ++i) products[i] = __fmul_rn(x[i], x[i + 128]);
  return outcome(LAUNCH_PLANTED(bug, difference, {.block = 128}, x.data(), products.data(), out.data()), out,
                 std::vector<int>(128));
}

}  // namespace
}  // namespace warpsmith::test
