#pragma once
#include <cstdint>

#include "common/philox.h"
#include "device/platform.h"

// Random numbers in kernels: the shared generator, and floats from its words. Any thread, no state.
namespace warpsmith::device {

using warpsmith::philox;
using warpsmith::PhiloxCounter;

// Uniform in (0, 1]: never 0, so that its logarithm exists.
__host__ __device__ __forceinline__ float uniform(uint32_t bits) {
  return static_cast<float>((bits >> 8) + 1) * 0x1p-24f;
}

}  // namespace warpsmith::device
