#pragma once
#include <cstdint>

#include "common/float8.h"
#include "common/half.h"

// The wgmma instruction in inline PTX: only included by device/wgmma.h, on the device. The text of an instruction names
// its N / 2 accumulators, hence the lists below.
namespace warpsmith::device::detail {

#define WARPSMITH_D4 "%0,%1,%2,%3"
#define WARPSMITH_D8 WARPSMITH_D4 ",%4,%5,%6,%7"
#define WARPSMITH_D16 WARPSMITH_D8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define WARPSMITH_D32 WARPSMITH_D16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define WARPSMITH_D40 WARPSMITH_D32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define WARPSMITH_D48 WARPSMITH_D32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define WARPSMITH_D64 WARPSMITH_D48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WARPSMITH_D72 WARPSMITH_D64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define WARPSMITH_D80 WARPSMITH_D72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define WARPSMITH_D88 WARPSMITH_D80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define WARPSMITH_D96                                                                         \
  WARPSMITH_D64                                                                               \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85," \
  "%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define WARPSMITH_D128                                                                      \
  WARPSMITH_D96                                                                             \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113," \
  "%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// how: "+", or "=" for accumulators that are outputs only.
#define WARPSMITH_F4(how, d, i) how "f"(d[i]), how "f"(d[i + 1]), how "f"(d[i + 2]), how "f"(d[i + 3])
#define WARPSMITH_F8(how, d, i) WARPSMITH_F4(how, d, i), WARPSMITH_F4(how, d, i + 4)
#define WARPSMITH_F16(how, d, i) WARPSMITH_F8(how, d, i), WARPSMITH_F8(how, d, i + 8)
#define WARPSMITH_F32(how, d, i) WARPSMITH_F16(how, d, i), WARPSMITH_F16(how, d, i + 16)
#define WARPSMITH_F40(how, d, i) WARPSMITH_F32(how, d, i), WARPSMITH_F8(how, d, i + 32)
#define WARPSMITH_F48(how, d, i) WARPSMITH_F32(how, d, i), WARPSMITH_F16(how, d, i + 32)
#define WARPSMITH_F64(how, d, i) WARPSMITH_F32(how, d, i), WARPSMITH_F32(how, d, i + 32)
#define WARPSMITH_F72(how, d, i) WARPSMITH_F64(how, d, i), WARPSMITH_F8(how, d, i + 64)
#define WARPSMITH_F80(how, d, i) WARPSMITH_F64(how, d, i), WARPSMITH_F16(how, d, i + 64)
#define WARPSMITH_F88(how, d, i) WARPSMITH_F80(how, d, i), WARPSMITH_F8(how, d, i + 80)
#define WARPSMITH_F96(how, d, i) WARPSMITH_F64(how, d, i), WARPSMITH_F32(how, d, i + 64)
#define WARPSMITH_F128(how, d, i) WARPSMITH_F64(how, d, i), WARPSMITH_F64(how, d, i + 64)

// Every N in use, a row each: ROW(kind, N, names of the accumulators, their operands, names of the operands after
// them).
#define WARPSMITH_WGMMA_SHAPES(ROW, kind)                                                          \
  ROW(kind, 8, WARPSMITH_D4, WARPSMITH_F4, "%4", "%5", "%6", "%7", "%8", "%9", "%10")              \
  ROW(kind, 16, WARPSMITH_D8, WARPSMITH_F8, "%8", "%9", "%10", "%11", "%12", "%13", "%14")         \
  ROW(kind, 32, WARPSMITH_D16, WARPSMITH_F16, "%16", "%17", "%18", "%19", "%20", "%21", "%22")     \
  ROW(kind, 64, WARPSMITH_D32, WARPSMITH_F32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")     \
  ROW(kind, 80, WARPSMITH_D40, WARPSMITH_F40, "%40", "%41", "%42", "%43", "%44", "%45", "%46")     \
  ROW(kind, 96, WARPSMITH_D48, WARPSMITH_F48, "%48", "%49", "%50", "%51", "%52", "%53", "%54")     \
  ROW(kind, 128, WARPSMITH_D64, WARPSMITH_F64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")    \
  ROW(kind, 144, WARPSMITH_D72, WARPSMITH_F72, "%72", "%73", "%74", "%75", "%76", "%77", "%78")    \
  ROW(kind, 160, WARPSMITH_D80, WARPSMITH_F80, "%80", "%81", "%82", "%83", "%84", "%85", "%86")    \
  ROW(kind, 176, WARPSMITH_D88, WARPSMITH_F88, "%88", "%89", "%90", "%91", "%92", "%93", "%94")    \
  ROW(kind, 192, WARPSMITH_D96, WARPSMITH_F96, "%96", "%97", "%98", "%99", "%100", "%101", "%102") \
  ROW(kind, 256, WARPSMITH_D128, WARPSMITH_F128, "%128", "%129", "%130", "%131", "%132", "%133", "%134")

// The predicate p says whether d is added to. Inputs have scale +1.
#define WARPSMITH_WGMMA_TEXT(kind, n, names, a, b, add, majors)                                                   \
  "{.reg .pred p; setp.ne.b32 p, " add ", 0; wgmma.mma_async.sync.aligned.m64n" #n kind " {" names "}, " a ", " b \
  ", p, 1, 1" majors ";}"

// Both operands in shared memory; a in registers; accumulators that are outputs only. With an `accumulate` of false the
// first still reads its accumulators as far as ptxas knows, so that their registers stay occupied since their last use.
#define WARPSMITH_WGMMA_SS(kind, n, names, F, x0, x1, x2, x3, x4, x5, x6)          \
  if constexpr (N == n)                                                            \
    asm volatile(WARPSMITH_WGMMA_TEXT(kind, n, names, x0, x1, x2, ", " x3 ", " x4) \
                 : F("+", d, 0)                                                    \
                 : "l"(a), "l"(b), "r"(accumulate), "n"(AMajor), "n"(BMajor));
#define WARPSMITH_WGMMA_RS(kind, n, names, F, x0, x1, x2, x3, x4, x5, x6)                               \
  if constexpr (N == n)                                                                                 \
    asm volatile(WARPSMITH_WGMMA_TEXT(kind, n, names, "{" x0 "," x1 "," x2 "," x3 "}", x4, x5, ", " x6) \
                 : F("+", d, 0)                                                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(BMajor));
#define WARPSMITH_WGMMA_OVERWRITE(kind, n, names, F, x0, x1, x2, x3, x4, x5, x6)    \
  if constexpr (N == n)                                                             \
    asm volatile(WARPSMITH_WGMMA_TEXT(kind, n, names, x0, x1, "0", ", " x2 ", " x3) \
                 : F("=", d, 0)                                                     \
                 : "l"(a), "l"(b), "n"(AMajor), "n"(BMajor));
// 8-bit floats have no transposed operands.
#define WARPSMITH_WGMMA_FLOAT8_SS(kind, n, names, F, x0, x1, x2, x3, x4, x5, x6) \
  if constexpr (N == n)                                                          \
    asm volatile(WARPSMITH_WGMMA_TEXT(kind, n, names, x0, x1, x2, "") : F("+", d, 0) : "l"(a), "l"(b), "r"(accumulate));
#define WARPSMITH_WGMMA_FLOAT8_RS(kind, n, names, F, x0, x1, x2, x3, x4, x5, x6)                   \
  if constexpr (N == n)                                                                            \
    asm volatile(WARPSMITH_WGMMA_TEXT(kind, n, names, "{" x0 "," x1 "," x2 "," x3 "}", x4, x5, "") \
                 : F("+", d, 0)                                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));

template <class A, class B> struct Wgmma;

#define WARPSMITH_WGMMA(T, kind)                                                                                       \
  template <> struct Wgmma<T, T> {                                                                                     \
    template <int N, int AMajor, int BMajor>                                                                           \
    __device__ __forceinline__ static void run(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {            \
      WARPSMITH_WGMMA_SHAPES(WARPSMITH_WGMMA_SS, kind)                                                                 \
    }                                                                                                                  \
    template <int N, int BMajor> __device__ __forceinline__ static void run(float (&d)[N / 2], const uint32_t (&a)[4], \
                                                                            uint64_t b, int accumulate) {              \
      WARPSMITH_WGMMA_SHAPES(WARPSMITH_WGMMA_RS, kind)                                                                 \
    }                                                                                                                  \
    template <int N, int AMajor, int BMajor>                                                                           \
    __device__ __forceinline__ static void overwrite(float (&d)[N / 2], uint64_t a, uint64_t b) {                      \
      WARPSMITH_WGMMA_SHAPES(WARPSMITH_WGMMA_OVERWRITE, kind)                                                          \
    }                                                                                                                  \
  }
WARPSMITH_WGMMA(bfloat16, "k16.f32.bf16.bf16");
WARPSMITH_WGMMA(float16, "k16.f32.f16.f16");

#define WARPSMITH_WGMMA_FLOAT8(A, B, kind)                                                                             \
  template <> struct Wgmma<A, B> {                                                                                     \
    template <int N>                                                                                                   \
    __device__ __forceinline__ static void run(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {            \
      WARPSMITH_WGMMA_SHAPES(WARPSMITH_WGMMA_FLOAT8_SS, kind)                                                          \
    }                                                                                                                  \
    template <int N> __device__ __forceinline__ static void run(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, \
                                                                int accumulate) {                                      \
      WARPSMITH_WGMMA_SHAPES(WARPSMITH_WGMMA_FLOAT8_RS, kind)                                                          \
    }                                                                                                                  \
  }
WARPSMITH_WGMMA_FLOAT8(float8_e4m3, float8_e4m3, "k32.f32.e4m3.e4m3");
WARPSMITH_WGMMA_FLOAT8(float8_e4m3, float8_e5m2, "k32.f32.e4m3.e5m2");
WARPSMITH_WGMMA_FLOAT8(float8_e5m2, float8_e4m3, "k32.f32.e5m2.e4m3");
WARPSMITH_WGMMA_FLOAT8(float8_e5m2, float8_e5m2, "k32.f32.e5m2.e5m2");

}  // namespace warpsmith::device::detail
