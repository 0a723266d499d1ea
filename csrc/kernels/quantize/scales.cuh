#pragma once
#include "kernels/quantize/cast.cuh"

// Scales of largest magnitudes, float32. Reads 4 bytes an item, writes 4.
namespace warpsmith::quantize {

struct Magnitudes {
  const float* from;  // null: nothing has them, and the scales are 1
  float* to;
  int64_t items;
  Float8Limits limits;
  bool power_of_two;
};

constexpr int kScaleThreads = 256;

static __global__ void __launch_bounds__(kScaleThreads) make_scales(Magnitudes p) {
  const int64_t item = int64_t{blockIdx.x} * kScaleThreads + threadIdx.x;
  if (item >= p.items) return;
  const float most = p.from ? device::load(p.from + item) : 0.0f;
  device::store(p.to + item, scale_of_amax(most, p.limits, p.power_of_two));
}

}  // namespace warpsmith::quantize
