#pragma once
#include "device/fence.h"
#include "device/launch.h"
#include "device/wgmma.h"

// One product of 8-bit floats through wgmma: d[64 x N] = a[64 x 128] b[N x 128]^T with K-major operand tiles in any
// swizzle, or a in registers, in two groups of two instructions. The kernel of the conformance cases.
namespace warpsmith::float8_product {

using device::Swizzle;

constexpr int kDepth = 128;  // K of the whole product: four instructions

// Panels of one swizzle span, each `rows` rows.
template <class T> __device__ inline void fill_tile(unsigned char* tile, const T* source, Swizzle swizzle, int rows) {
  const int span = device::swizzle_span_bytes(swizzle);
  for (int i = threadIdx.x; i < rows * kDepth; i += blockDim.x) {
    const int row = i / kDepth, k = i % kDepth;
    const auto offset = static_cast<uint32_t>((k / span * rows + row) * span + k % span);
    *reinterpret_cast<T*>(tile + device::swizzled(swizzle, offset)) = source[i];
  }
}

// The descriptor of the instruction that covers k .. k + 31.
__device__ inline uint64_t describe(Swizzle swizzle, int rows, const unsigned char* tile, int k) {
  const int span = device::swizzle_span_bytes(swizzle);
  const auto panel = static_cast<uint32_t>(rows * span), group = static_cast<uint32_t>(8 * span);
  const uint64_t d = device::wgmma_descriptor(swizzle, tile, swizzle == Swizzle::none ? panel : 16, group);
  return device::advance(d, static_cast<uint32_t>(k / span) * panel + static_cast<uint32_t>(k % span));
}

template <class A, class B, int N, Swizzle kSwizzle, bool ARegisters> __global__ void __launch_bounds__(128)
    product(const A* a, const B* b, float* d) {
  WARPSMITH_DYNAMIC_SHARED(memory);
  unsigned char *tile_a = memory, *tile_b = memory + 64 * kDepth;
  const int t = threadIdx.x, lane = t % 32, row0 = t / 32 * 16 + lane / 4;
  fill_tile(tile_a, a, kSwizzle, 64);
  fill_tile(tile_b, b, kSwizzle, N);
  device::fence_async_shared();
  __syncthreads();
  uint32_t fragments[kDepth / 32][4];
  for (int k = 0; k < kDepth; k += 32)
    for (int i = 0; i < 4; ++i) {
      const A* at = a + (row0 + 8 * (i & 1)) * kDepth + k + 4 * (lane % 4) + 16 * (i >> 1);
      fragments[k / 32][i] = static_cast<uint32_t>(at[0].bits) | static_cast<uint32_t>(at[1].bits) << 8 |
                             static_cast<uint32_t>(at[2].bits) << 16 | static_cast<uint32_t>(at[3].bits) << 24;
    }
  float acc[N / 2];
  for (float& x : acc) x = 100.0f;  // overwritten by the first instruction
  for (int k = 0; k < kDepth; k += 32) {
    if (k == 0 || k == 64) device::wgmma_fence();
    const uint64_t db = describe(kSwizzle, N, tile_b, k);
    if constexpr (ARegisters)
      device::wgmma_float8<A, B, N>(acc, fragments[k / 32], db, k > 0);
    else
      device::wgmma_float8<A, B, N>(acc, describe(kSwizzle, 64, tile_a, k), db, k > 0);
    if (k == 32 || k == 96) device::wgmma_commit();
  }
  device::wgmma_wait<1>();
  device::wgmma_wait<0>();
  device::hold(acc);
  for (int j = 0; j < N / 2; ++j) d[(row0 + 8 * (j >> 1 & 1)) * N + 8 * (j >> 2) + 2 * (lane % 4) + (j & 1)] = acc[j];
}

}  // namespace warpsmith::float8_product
