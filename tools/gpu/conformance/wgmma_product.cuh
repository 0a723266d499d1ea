#pragma once
#include "device/fence.h"
#include "device/launch.h"
#include "device/wgmma.h"

// One product through wgmma in every form: d[64 x N] = a[64 x 64] b[N x 64]^T with operand tiles in any major and
// swizzle, or a in registers, in two groups of two instructions. The kernel of the conformance cases.
namespace warpsmith::wgmma_product {

using device::Major;
using device::Swizzle;

constexpr int kDepth = 64;  // K of the whole product: four instructions

// Where element (row, k) of a tile of `rows` x kDepth lies, for the descriptor that describe() makes.
__device__ inline uint32_t place(Swizzle swizzle, bool mn_major, int rows, int row, int k) {
  const int span = device::swizzle_span_bytes(swizzle) / 2;  // elements
  const int major = mn_major ? row : k, minor = mn_major ? k : row, minor_count = mn_major ? kDepth : rows;
  // Panels of `span` elements, each `minor_count` rows of `span` elements.
  const auto offset = static_cast<uint32_t>((major / span * minor_count + minor) * span + major % span) * 2;
  return device::swizzled(swizzle, offset);
}

// The descriptor of the instruction that covers k .. k + 15.
__device__ inline uint64_t describe(Swizzle swizzle, bool mn_major, int rows, const unsigned char* tile, int k) {
  const int span_bytes = device::swizzle_span_bytes(swizzle), span = span_bytes / 2;
  const auto group = static_cast<uint32_t>(8 * span_bytes);
  if (mn_major) {
    const auto panel = static_cast<uint32_t>(kDepth * span_bytes);  // between panels along M or N
    const uint64_t d = swizzle == Swizzle::none ? device::wgmma_descriptor(swizzle, tile, group, panel)
                                                : device::wgmma_descriptor(swizzle, tile, panel, group);
    return device::advance(d, static_cast<uint32_t>(k * span_bytes));
  }
  const auto panel = static_cast<uint32_t>(rows * span_bytes);  // between panels along K
  const uint64_t d = device::wgmma_descriptor(swizzle, tile, swizzle == Swizzle::none ? panel : 16, group);
  return device::advance(d, static_cast<uint32_t>(k / span) * panel + static_cast<uint32_t>(k % span) * 2);
}

template <class T>
__device__ inline void fill_tile(unsigned char* tile, const T* source, Swizzle swizzle, bool mn_major, int rows) {
  for (int i = threadIdx.x; i < rows * kDepth; i += blockDim.x)
    *reinterpret_cast<T*>(tile + place(swizzle, mn_major, rows, i / kDepth, i % kDepth)) = source[i];
}

template <class T, int N, Swizzle kSwizzle, Major AMajor, Major BMajor, bool ARegisters>
__global__ void __launch_bounds__(128) product(const T* a, const T* b, float* d) {
  WARPSMITH_DYNAMIC_SHARED(memory);
  unsigned char *tile_a = memory, *tile_b = memory + 64 * kDepth * 2;
  const int t = threadIdx.x, lane = t % 32, row0 = t / 32 * 16 + lane / 4;
  fill_tile(tile_a, a, kSwizzle, AMajor == Major::mn, 64);
  fill_tile(tile_b, b, kSwizzle, BMajor == Major::mn, N);
  device::fence_async_shared();
  __syncthreads();
  uint32_t fragments[kDepth / 16][4];
  for (int k = 0; k < kDepth; k += 16)
    for (int i = 0; i < 4; ++i) {
      const T* at = a + (row0 + 8 * (i & 1)) * kDepth + k + 2 * (lane % 4) + 8 * (i >> 1);
      fragments[k / 16][i] = at[0].bits | static_cast<uint32_t>(at[1].bits) << 16;
    }
  float acc[N / 2];
  for (float& x : acc) x = 100.0f;  // overwritten by the first instruction
  // Two groups in flight, the second one accumulating on the first.
  for (int k = 0; k < kDepth; k += 16) {
    if (k == 0 || k == 32) device::wgmma_fence();
    const uint64_t db = describe(kSwizzle, BMajor == Major::mn, N, tile_b, k);
    if constexpr (ARegisters)
      device::wgmma<T, N, BMajor>(acc, fragments[k / 16], db, k > 0);
    else
      device::wgmma<T, N, AMajor, BMajor>(acc, describe(kSwizzle, AMajor == Major::mn, 64, tile_a, k), db, k > 0);
    if (k == 16 || k == 48) device::wgmma_commit();
  }
  device::wgmma_wait<1>();
  device::wgmma_wait<0>();
  device::hold(acc);
  for (int j = 0; j < N / 2; ++j) d[(row0 + 8 * (j >> 1 & 1)) * N + 8 * (j >> 2) + 2 * (lane % 4) + (j & 1)] = acc[j];
}

}  // namespace warpsmith::wgmma_product
