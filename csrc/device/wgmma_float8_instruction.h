#pragma once
#include <cstdint>

#include "common/float8.h"
#include "device/wgmma_instruction.h"

// The wgmma instruction for 8-bit floats, in inline PTX: only included by device/wgmma.h, on the device. The lists of
// accumulators are those of device/wgmma_instruction.h.
namespace warpsmith::device::detail {

template <class A, class B> struct WgmmaFloat8;

#define WARPSMITH_FLOAT8_SS(types, n, registers, outputs, a, b, add)                                            \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " add ", 0; wgmma.mma_async.sync.aligned.m64n" n "k32.f32." types \
               " {" registers "}, " a ", " b ", p, 1, 1;}"                                                      \
               : outputs                                                                                        \
               : "l"(a_descriptor), "l"(b_descriptor), "r"(accumulate))
#define WARPSMITH_FLOAT8_RS(types, n, registers, outputs, a0, a1, a2, a3, b, add)                               \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " add ", 0; wgmma.mma_async.sync.aligned.m64n" n "k32.f32." types \
               " {" registers "}, {" a0 "," a1 "," a2 "," a3 "}, " b ", p, 1, 1;}"                              \
               : outputs                                                                                        \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_descriptor), "r"(accumulate))

#define WARPSMITH_FLOAT8(A, B, types)                                                                               \
  template <> struct WgmmaFloat8<A, B> {                                                                            \
    template <int N> __device__ __forceinline__ static void run(float (&d)[N / 2], uint64_t a_descriptor,           \
                                                                uint64_t b_descriptor, int accumulate) {            \
      static_assert(N == 8 || N == 16 || N == 32 || N == 64 || N == 96 || N == 128 || N == 192 || N == 256,         \
                    "add this N to device/wgmma_float8_instruction.h");                                             \
      if constexpr (N == 8)                                                                                         \
        WARPSMITH_FLOAT8_SS(types, "8", WARPSMITH_D4, WARPSMITH_F4(d, 0), "%4", "%5", "%6");                        \
      else if constexpr (N == 16)                                                                                   \
        WARPSMITH_FLOAT8_SS(types, "16", WARPSMITH_D8, WARPSMITH_F8(d, 0), "%8", "%9", "%10");                      \
      else if constexpr (N == 32)                                                                                   \
        WARPSMITH_FLOAT8_SS(types, "32", WARPSMITH_D16, WARPSMITH_F16(d, 0), "%16", "%17", "%18");                  \
      else if constexpr (N == 64)                                                                                   \
        WARPSMITH_FLOAT8_SS(types, "64", WARPSMITH_D32, WARPSMITH_F32(d, 0), "%32", "%33", "%34");                  \
      else if constexpr (N == 96)                                                                                   \
        WARPSMITH_FLOAT8_SS(types, "96", WARPSMITH_D48, WARPSMITH_F48(d, 0), "%48", "%49", "%50");                  \
      else if constexpr (N == 128)                                                                                  \
        WARPSMITH_FLOAT8_SS(types, "128", WARPSMITH_D64, WARPSMITH_F64(d, 0), "%64", "%65", "%66");                 \
      else if constexpr (N == 192)                                                                                  \
        WARPSMITH_FLOAT8_SS(types, "192", WARPSMITH_D96, WARPSMITH_F96(d, 0), "%96", "%97", "%98");                 \
      else if constexpr (N == 256)                                                                                  \
        WARPSMITH_FLOAT8_SS(types, "256", WARPSMITH_D128, WARPSMITH_F128(d, 0), "%128", "%129", "%130");            \
    }                                                                                                               \
    template <int N> __device__ __forceinline__ static void run(float (&d)[N / 2], const uint32_t (&a)[4],          \
                                                                uint64_t b_descriptor, int accumulate) {            \
      static_assert(N == 8 || N == 16 || N == 32 || N == 64 || N == 96 || N == 128 || N == 192 || N == 256,         \
                    "add this N to device/wgmma_float8_instruction.h");                                             \
      if constexpr (N == 8)                                                                                         \
        WARPSMITH_FLOAT8_RS(types, "8", WARPSMITH_D4, WARPSMITH_F4(d, 0), "%4", "%5", "%6", "%7", "%8", "%9");      \
      else if constexpr (N == 16)                                                                                   \
        WARPSMITH_FLOAT8_RS(types, "16", WARPSMITH_D8, WARPSMITH_F8(d, 0), "%8", "%9", "%10", "%11", "%12", "%13"); \
      else if constexpr (N == 32)                                                                                   \
        WARPSMITH_FLOAT8_RS(types, "32", WARPSMITH_D16, WARPSMITH_F16(d, 0), "%16", "%17", "%18", "%19", "%20",     \
                            "%21");                                                                                 \
      else if constexpr (N == 64)                                                                                   \
        WARPSMITH_FLOAT8_RS(types, "64", WARPSMITH_D32, WARPSMITH_F32(d, 0), "%32", "%33", "%34", "%35", "%36",     \
                            "%37");                                                                                 \
      else if constexpr (N == 96)                                                                                   \
        WARPSMITH_FLOAT8_RS(types, "96", WARPSMITH_D48, WARPSMITH_F48(d, 0), "%48", "%49", "%50", "%51", "%52",     \
                            "%53");                                                                                 \
      else if constexpr (N == 128)                                                                                  \
        WARPSMITH_FLOAT8_RS(types, "128", WARPSMITH_D64, WARPSMITH_F64(d, 0), "%64", "%65", "%66", "%67", "%68",    \
                            "%69");                                                                                 \
      else if constexpr (N == 192)                                                                                  \
        WARPSMITH_FLOAT8_RS(types, "192", WARPSMITH_D96, WARPSMITH_F96(d, 0), "%96", "%97", "%98", "%99", "%100",   \
                            "%101");                                                                                \
      else if constexpr (N == 256)                                                                                  \
        WARPSMITH_FLOAT8_RS(types, "256", WARPSMITH_D128, WARPSMITH_F128(d, 0), "%128", "%129", "%130", "%131",     \
                            "%132", "%133");                                                                        \
    }                                                                                                               \
  }

WARPSMITH_FLOAT8(float8_e4m3, float8_e4m3, "e4m3.e4m3");
WARPSMITH_FLOAT8(float8_e4m3, float8_e5m2, "e4m3.e5m2");
WARPSMITH_FLOAT8(float8_e5m2, float8_e4m3, "e5m2.e4m3");
WARPSMITH_FLOAT8(float8_e5m2, float8_e5m2, "e5m2.e5m2");

}  // namespace warpsmith::device::detail
