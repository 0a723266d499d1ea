#pragma once
#include <cstdint>
#include <type_traits>

#include "common/half.h"
#include "device/platform.h"
#ifdef WARPSMITH_SIM
#include "device/host_hooks_sm90.h"
#endif

// Warp matrix multiply-accumulate for 16-bit inputs (sm_80 and newer). PTX ISA 9.7.14.5.8 "mma.m16n8k16".
namespace warpsmith::device {

// d[16 x 8] += a[16 x 16] * b[16 x 8], fp32 accumulation. The whole warp, converged. With g = lane / 4 and t = lane %
// 4, pairs of elements share a register, the even one in the low half:
//   a[0]: row g, columns 2t, 2t+1    a[1]: row g+8    a[2]: columns 2t+8, 2t+9    a[3]: row g+8 and columns 2t+8, 2t+9
//   b[0]: rows 2t, 2t+1, column g    b[1]: rows 2t+8, 2t+9
//   d[0], d[1]: row g, columns 2t, 2t+1    d[2], d[3]: row g+8
template <class T> __device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4],
                                                                const uint32_t (&b)[2] WARPSMITH_SITE) {
  static_assert(std::is_same_v<T, float16> || std::is_same_v<T, bfloat16>);
#ifdef WARPSMITH_SIM
  sim::mma(d, a, b, sim::kOperand<T>, sim::kOperand<T>, site);
#else
  if constexpr (std::is_same_v<T, bfloat16>)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

}  // namespace warpsmith::device
