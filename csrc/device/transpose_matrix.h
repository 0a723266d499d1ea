#pragma once
#include <cstdint>

#include "device/platform.h"

namespace warpsmith::device {

// Transposes an 8 x 8 matrix of 16-bit elements in registers. The whole warp, converged. Lane l gives row l / 4,
// columns 2 (l % 4) and the next, and receives row 2 (l % 4) and the next of column l / 4: the layout of load_matrix
// and of wgmma's accumulators. PTX ISA 9.7.14.5.17 "movmatrix".
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t two) {
#ifdef WARPSMITH_SIM
  const int lane = static_cast<int>(threadIdx.x % 32), half = lane / 4 % 2 * 16;
  const int from = lane % 4 * 8 + lane / 8;  // has row 2 (lane % 4), column lane / 4
  const uint32_t low = __shfl_sync(0xffffffffu, two, from) >> half & 0xffff;
  return low | (__shfl_sync(0xffffffffu, two, from + 4) >> half & 0xffff) << 16;
#else
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(two));
  return result;
#endif
}

}  // namespace warpsmith::device
