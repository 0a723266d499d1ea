#pragma once
#include <cstdint>

#include "common/philox.h"
#include "device/platform.h"

// Random numbers in kernels: the shared generator, and floats from its words. Any thread, no state.
namespace warpsmith::device {

using warpsmith::philox;
using warpsmith::PhiloxCounter;

// One instruction. The compiler makes a product of 64 bits, with an addition more, of some products with constants. PTX
// ISA 9.7.1 "mul".
struct OneWideProduct {
  __device__ __forceinline__ uint64_t operator()(uint32_t a, uint32_t b) const {
#ifdef WARPSMITH_SIM
    return uint64_t{a} * b;
#else
    uint64_t product;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
    return product;
#endif
  }
};

// Uniform in (0, 1]: never 0, so that its logarithm exists.
__host__ __device__ __forceinline__ float uniform(uint32_t bits) {
  return static_cast<float>((bits >> 8) + 1) * 0x1p-24f;
}

}  // namespace warpsmith::device
