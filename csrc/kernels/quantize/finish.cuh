#pragma once
#include "device/reduce.h"
#include "kernels/quantize/cast.cuh"

// From partial results to sums, in a fixed order; from largest magnitudes to scales, float32. Reads every partial
// result once, writes an item of T each.
namespace warpsmith::quantize {

enum class Finish { sum, scale };  // a scale: of the only partial result

struct Partials {
  const float* from;
  void* to;
  int64_t count, items;  // of item i: from[i], from[i + items], ...
  Float8Limits limits;
  bool power_of_two;
};

constexpr int kFinishItems = 32, kFinishParts = 8;

// A thread of every item's kFinishParts takes each kFinishParts-th of its partial results.
template <Finish kFinish, class T = float> __global__ void __launch_bounds__(kFinishItems* kFinishParts)
    finish_items(Partials p) {
  WARPSMITH_SHARED(float, parts, kFinishItems* kFinishParts);
  const int part = static_cast<int>(threadIdx.x) / kFinishItems;
  const int64_t item = int64_t{blockIdx.x} * kFinishItems + threadIdx.x % kFinishItems;
  const auto combine = [](float a, float b) { return kFinish == Finish::sum ? a + b : fmaxf(a, b); };
  float mine = 0.0f;
  if (item < p.items) {
#pragma unroll 4
    for (int64_t i = part; i < p.count; i += kFinishParts)
      mine = combine(mine, device::load(p.from + i * p.items + item));
  }
  parts[threadIdx.x] = mine;
  __syncthreads();
  if (part != 0 || item >= p.items) return;
#pragma unroll
  for (int i = 1; i < kFinishParts; ++i) mine = combine(mine, parts[i * kFinishItems + threadIdx.x]);
  const float made = kFinish == Finish::scale ? scale_of_amax(mine, p.limits, p.power_of_two) : mine;
  device::store(static_cast<T*>(p.to) + item, device::from_float<T>(made));
}

}  // namespace warpsmith::quantize
