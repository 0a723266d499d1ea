#pragma once
#include "device/wgmma_instruction.h"

// The wgmma instruction with accumulators that are outputs only, in inline PTX: only included by device/wgmma.h, on the
// device. With an `accumulate` of false the general form still reads its accumulators as far as ptxas knows, so that
// their registers stay occupied since their last use.
namespace warpsmith::device::detail {

#define WARPSMITH_O4(d, i) "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3])
#define WARPSMITH_O8(d, i) WARPSMITH_O4(d, i), WARPSMITH_O4(d, i + 4)
#define WARPSMITH_O16(d, i) WARPSMITH_O8(d, i), WARPSMITH_O8(d, i + 8)
#define WARPSMITH_O32(d, i) WARPSMITH_O16(d, i), WARPSMITH_O16(d, i + 16)
#define WARPSMITH_O64(d, i) WARPSMITH_O32(d, i), WARPSMITH_O32(d, i + 32)

#define WARPSMITH_WGMMA_OVERWRITE(n, types, registers, outputs, a, b, a_major, b_major)                   \
  asm volatile("{.reg .pred p; setp.ne.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n" n "k16.f32." types \
               " {" registers "}, " a ", " b ", p, 1, 1, " a_major ", " b_major ";}"                      \
               : outputs                                                                                  \
               : "l"(a_descriptor), "l"(b_descriptor), "n"(AMajor), "n"(BMajor))

template <bool kBfloat16, int N, int AMajor, int BMajor>
__device__ __forceinline__ void wgmma_overwrite(float (&d)[N / 2], uint64_t a_descriptor, uint64_t b_descriptor) {
  if constexpr (N == 32 && kBfloat16)
    WARPSMITH_WGMMA_OVERWRITE("32", "bf16.bf16", WARPSMITH_D16, WARPSMITH_O16(d, 0), "%16", "%17", "%18", "%19");
  else if constexpr (N == 64 && kBfloat16)
    WARPSMITH_WGMMA_OVERWRITE("64", "bf16.bf16", WARPSMITH_D32, WARPSMITH_O32(d, 0), "%32", "%33", "%34", "%35");
  else if constexpr (N == 128 && kBfloat16)
    WARPSMITH_WGMMA_OVERWRITE("128", "bf16.bf16", WARPSMITH_D64, WARPSMITH_O64(d, 0), "%64", "%65", "%66", "%67");
  else if constexpr (N == 32)
    WARPSMITH_WGMMA_OVERWRITE("32", "f16.f16", WARPSMITH_D16, WARPSMITH_O16(d, 0), "%16", "%17", "%18", "%19");
  else if constexpr (N == 64)
    WARPSMITH_WGMMA_OVERWRITE("64", "f16.f16", WARPSMITH_D32, WARPSMITH_O32(d, 0), "%32", "%33", "%34", "%35");
  else if constexpr (N == 128)
    WARPSMITH_WGMMA_OVERWRITE("128", "f16.f16", WARPSMITH_D64, WARPSMITH_O64(d, 0), "%64", "%65", "%66", "%67");
}

#undef WARPSMITH_WGMMA_OVERWRITE
#undef WARPSMITH_O4
#undef WARPSMITH_O8
#undef WARPSMITH_O16
#undef WARPSMITH_O32
#undef WARPSMITH_O64

}  // namespace warpsmith::device::detail
