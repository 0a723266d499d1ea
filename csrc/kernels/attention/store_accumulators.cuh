#pragma once
#include "device/convert.h"
#include "device/vector.h"

namespace warpsmith::attention {

// Writes 64 rows of accumulators times `factor` to global memory, except rows from `rows` on and columns from `columns`
// on. A 4 x 4 transpose of words within each quad gives every lane whole 16-byte pieces. `to`: the warpgroup's first
// row; `row`: the thread's first row.
template <class T, int kRegisters>
__device__ __forceinline__ void store_accumulators(T* to, int64_t stride, const float (&x)[kRegisters], float factor,
                                                   int row, int rows, int columns, int lane) {
  const int t = lane % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    T* at = to + (row + 8 * r) * stride + t * 8;
#pragma unroll
    for (int c = 0; c < kRegisters / 16; ++c) {  // 32 columns each
      device::Vector<uint32_t, 4> w;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = (c * 4 + i) * 4 + 2 * r;
        w.at[i] = device::pack<T>(x[j] * factor, x[j + 1] * factor);
      }
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const uint32_t other = __shfl_xor_sync(0xffffffffu, t & 1 ? w.at[i] : w.at[i + 1], 1);
        if (t & 1)
          w.at[i] = other;
        else
          w.at[i + 1] = other;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t other = __shfl_xor_sync(0xffffffffu, t & 2 ? w.at[i] : w.at[i + 2], 2);
        if (t & 2)
          w.at[i] = other;
        else
          w.at[i + 2] = other;
      }
      if (row + 8 * r < rows && c * 32 + t * 8 < columns)
        device::store(reinterpret_cast<device::Vector<uint32_t, 4>*>(at + c * 32), w);
    }
  }
}

}  // namespace warpsmith::attention
