#pragma once
#include <cstdint>

#include "device/platform.h"

// Any thread, no ordering.
namespace warpsmith::device {

// All 64 bits of a product, in one instruction. Of some products with constants the compiler makes a multiplication of
// 64 bits and an addition. PTX ISA 9.7.1 "mul".
__device__ __forceinline__ uint64_t wide_product(uint32_t a, uint32_t b) {
#ifdef WARPSMITH_SIM
  return uint64_t{a} * b;
#else
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#endif
}

}  // namespace warpsmith::device
