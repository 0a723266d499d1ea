#pragma once
#include <cstdint>

// The wgmma instruction for every N in use, in inline PTX: only included by device/wgmma.h, on the device. The text of
// an instruction names its N / 2 accumulators, hence the lists below.
namespace warpsmith::device::detail {

#define WARPSMITH_D4 "%0,%1,%2,%3"
#define WARPSMITH_D8 \
  WARPSMITH_D4       \
  ","                \
  "%4,%5,%6,%7"
#define WARPSMITH_D16 \
  WARPSMITH_D8        \
  ","                 \
  "%8,%9,%10,%11,%12,%13,%14,%15"
#define WARPSMITH_D32 \
  WARPSMITH_D16       \
  ","                 \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define WARPSMITH_D40 \
  WARPSMITH_D32       \
  ","                 \
  "%32,%33,%34,%35,%36,%37,%38,%39"
#define WARPSMITH_D48 \
  WARPSMITH_D32       \
  ","                 \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define WARPSMITH_D64 \
  WARPSMITH_D48       \
  ","                 \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WARPSMITH_D72 \
  WARPSMITH_D64       \
  ","                 \
  "%64,%65,%66,%67,%68,%69,%70,%71"
#define WARPSMITH_D80 \
  WARPSMITH_D72       \
  ","                 \
  "%72,%73,%74,%75,%76,%77,%78,%79"
#define WARPSMITH_D88 \
  WARPSMITH_D80       \
  ","                 \
  "%80,%81,%82,%83,%84,%85,%86,%87"
#define WARPSMITH_D96                                                                        \
  WARPSMITH_D64                                                                              \
  ","                                                                                        \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85," \
  "%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define WARPSMITH_D128                                                                     \
  WARPSMITH_D96                                                                            \
  ","                                                                                      \
  "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113," \
  "%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

#define WARPSMITH_F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WARPSMITH_F8(d, i) WARPSMITH_F4(d, i), WARPSMITH_F4(d, i + 4)
#define WARPSMITH_F16(d, i) WARPSMITH_F8(d, i), WARPSMITH_F8(d, i + 8)
#define WARPSMITH_F32(d, i) WARPSMITH_F16(d, i), WARPSMITH_F16(d, i + 16)
#define WARPSMITH_F40(d, i) WARPSMITH_F32(d, i), WARPSMITH_F8(d, i + 32)
#define WARPSMITH_F48(d, i) WARPSMITH_F32(d, i), WARPSMITH_F16(d, i + 32)
#define WARPSMITH_F64(d, i) WARPSMITH_F32(d, i), WARPSMITH_F32(d, i + 32)
#define WARPSMITH_F72(d, i) WARPSMITH_F64(d, i), WARPSMITH_F8(d, i + 64)
#define WARPSMITH_F80(d, i) WARPSMITH_F64(d, i), WARPSMITH_F16(d, i + 64)
#define WARPSMITH_F88(d, i) WARPSMITH_F80(d, i), WARPSMITH_F8(d, i + 80)
#define WARPSMITH_F96(d, i) WARPSMITH_F64(d, i), WARPSMITH_F32(d, i + 64)
#define WARPSMITH_F128(d, i) WARPSMITH_F64(d, i), WARPSMITH_F64(d, i + 64)

// The predicate p says whether d is added to. Inputs have scale +1.
#define WARPSMITH_WGMMA_SS(n, registers, outputs, a, b, add, a_major, b_major)                                  \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " add ", 0; wgmma.mma_async.sync.aligned.m64n" n                  \
               "k16.f32." WARPSMITH_TYPES " {" registers "}, " a ", " b ", p, 1, 1, " a_major ", " b_major ";}" \
               : outputs                                                                                        \
               : "l"(a_descriptor), "l"(b_descriptor), "r"(accumulate), "n"(AMajor), "n"(BMajor))
#define WARPSMITH_WGMMA_RS(n, registers, outputs, a0, a1, a2, a3, b, add, b_major)                                    \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " add ", 0; wgmma.mma_async.sync.aligned.m64n" n                        \
               "k16.f32." WARPSMITH_TYPES " {" registers "}, {" a0 "," a1 "," a2 "," a3 "}, " b ", p, 1, 1, " b_major \
               ";}"                                                                                                   \
               : outputs                                                                                              \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_descriptor), "r"(accumulate), "n"(BMajor))

#define WARPSMITH_TYPES "bf16.bf16"
template <int N, int AMajor, int BMajor>
__device__ __forceinline__ void wgmma_bf16(float (&d)[N / 2], uint64_t a_descriptor, uint64_t b_descriptor,
                                           int accumulate) {
  if constexpr (N == 8)
    WARPSMITH_WGMMA_SS("8", WARPSMITH_D4, WARPSMITH_F4(d, 0), "%4", "%5", "%6", "%7", "%8");
  else if constexpr (N == 16)
    WARPSMITH_WGMMA_SS("16", WARPSMITH_D8, WARPSMITH_F8(d, 0), "%8", "%9", "%10", "%11", "%12");
  else if constexpr (N == 32)
    WARPSMITH_WGMMA_SS("32", WARPSMITH_D16, WARPSMITH_F16(d, 0), "%16", "%17", "%18", "%19", "%20");
  else if constexpr (N == 64)
    WARPSMITH_WGMMA_SS("64", WARPSMITH_D32, WARPSMITH_F32(d, 0), "%32", "%33", "%34", "%35", "%36");
  else if constexpr (N == 80)
    WARPSMITH_WGMMA_SS("80", WARPSMITH_D40, WARPSMITH_F40(d, 0), "%40", "%41", "%42", "%43", "%44");
  else if constexpr (N == 96)
    WARPSMITH_WGMMA_SS("96", WARPSMITH_D48, WARPSMITH_F48(d, 0), "%48", "%49", "%50", "%51", "%52");
  else if constexpr (N == 128)
    WARPSMITH_WGMMA_SS("128", WARPSMITH_D64, WARPSMITH_F64(d, 0), "%64", "%65", "%66", "%67", "%68");
  else if constexpr (N == 144)
    WARPSMITH_WGMMA_SS("144", WARPSMITH_D72, WARPSMITH_F72(d, 0), "%72", "%73", "%74", "%75", "%76");
  else if constexpr (N == 160)
    WARPSMITH_WGMMA_SS("160", WARPSMITH_D80, WARPSMITH_F80(d, 0), "%80", "%81", "%82", "%83", "%84");
  else if constexpr (N == 176)
    WARPSMITH_WGMMA_SS("176", WARPSMITH_D88, WARPSMITH_F88(d, 0), "%88", "%89", "%90", "%91", "%92");
  else if constexpr (N == 192)
    WARPSMITH_WGMMA_SS("192", WARPSMITH_D96, WARPSMITH_F96(d, 0), "%96", "%97", "%98", "%99", "%100");
  else if constexpr (N == 256)
    WARPSMITH_WGMMA_SS("256", WARPSMITH_D128, WARPSMITH_F128(d, 0), "%128", "%129", "%130", "%131", "%132");
}
template <int N, int BMajor> __device__ __forceinline__ void wgmma_bf16(float (&d)[N / 2], const uint32_t (&a)[4],
                                                                        uint64_t b_descriptor, int accumulate) {
  if constexpr (N == 8)
    WARPSMITH_WGMMA_RS("8", WARPSMITH_D4, WARPSMITH_F4(d, 0), "%4", "%5", "%6", "%7", "%8", "%9", "%10");
  else if constexpr (N == 16)
    WARPSMITH_WGMMA_RS("16", WARPSMITH_D8, WARPSMITH_F8(d, 0), "%8", "%9", "%10", "%11", "%12", "%13", "%14");
  else if constexpr (N == 32)
    WARPSMITH_WGMMA_RS("32", WARPSMITH_D16, WARPSMITH_F16(d, 0), "%16", "%17", "%18", "%19", "%20", "%21", "%22");
  else if constexpr (N == 64)
    WARPSMITH_WGMMA_RS("64", WARPSMITH_D32, WARPSMITH_F32(d, 0), "%32", "%33", "%34", "%35", "%36", "%37", "%38");
  else if constexpr (N == 80)
    WARPSMITH_WGMMA_RS("80", WARPSMITH_D40, WARPSMITH_F40(d, 0), "%40", "%41", "%42", "%43", "%44", "%45", "%46");
  else if constexpr (N == 96)
    WARPSMITH_WGMMA_RS("96", WARPSMITH_D48, WARPSMITH_F48(d, 0), "%48", "%49", "%50", "%51", "%52", "%53", "%54");
  else if constexpr (N == 128)
    WARPSMITH_WGMMA_RS("128", WARPSMITH_D64, WARPSMITH_F64(d, 0), "%64", "%65", "%66", "%67", "%68", "%69", "%70");
  else if constexpr (N == 144)
    WARPSMITH_WGMMA_RS("144", WARPSMITH_D72, WARPSMITH_F72(d, 0), "%72", "%73", "%74", "%75", "%76", "%77", "%78");
  else if constexpr (N == 160)
    WARPSMITH_WGMMA_RS("160", WARPSMITH_D80, WARPSMITH_F80(d, 0), "%80", "%81", "%82", "%83", "%84", "%85", "%86");
  else if constexpr (N == 176)
    WARPSMITH_WGMMA_RS("176", WARPSMITH_D88, WARPSMITH_F88(d, 0), "%88", "%89", "%90", "%91", "%92", "%93", "%94");
  else if constexpr (N == 192)
    WARPSMITH_WGMMA_RS("192", WARPSMITH_D96, WARPSMITH_F96(d, 0), "%96", "%97", "%98", "%99", "%100", "%101", "%102");
  else if constexpr (N == 256)
    WARPSMITH_WGMMA_RS("256", WARPSMITH_D128, WARPSMITH_F128(d, 0), "%128", "%129", "%130", "%131", "%132", "%133",
                       "%134");
}
#undef WARPSMITH_TYPES

#define WARPSMITH_TYPES "f16.f16"
template <int N, int AMajor, int BMajor>
__device__ __forceinline__ void wgmma_f16(float (&d)[N / 2], uint64_t a_descriptor, uint64_t b_descriptor,
                                          int accumulate) {
  if constexpr (N == 8)
    WARPSMITH_WGMMA_SS("8", WARPSMITH_D4, WARPSMITH_F4(d, 0), "%4", "%5", "%6", "%7", "%8");
  else if constexpr (N == 16)
    WARPSMITH_WGMMA_SS("16", WARPSMITH_D8, WARPSMITH_F8(d, 0), "%8", "%9", "%10", "%11", "%12");
  else if constexpr (N == 32)
    WARPSMITH_WGMMA_SS("32", WARPSMITH_D16, WARPSMITH_F16(d, 0), "%16", "%17", "%18", "%19", "%20");
  else if constexpr (N == 64)
    WARPSMITH_WGMMA_SS("64", WARPSMITH_D32, WARPSMITH_F32(d, 0), "%32", "%33", "%34", "%35", "%36");
  else if constexpr (N == 80)
    WARPSMITH_WGMMA_SS("80", WARPSMITH_D40, WARPSMITH_F40(d, 0), "%40", "%41", "%42", "%43", "%44");
  else if constexpr (N == 96)
    WARPSMITH_WGMMA_SS("96", WARPSMITH_D48, WARPSMITH_F48(d, 0), "%48", "%49", "%50", "%51", "%52");
  else if constexpr (N == 128)
    WARPSMITH_WGMMA_SS("128", WARPSMITH_D64, WARPSMITH_F64(d, 0), "%64", "%65", "%66", "%67", "%68");
  else if constexpr (N == 144)
    WARPSMITH_WGMMA_SS("144", WARPSMITH_D72, WARPSMITH_F72(d, 0), "%72", "%73", "%74", "%75", "%76");
  else if constexpr (N == 160)
    WARPSMITH_WGMMA_SS("160", WARPSMITH_D80, WARPSMITH_F80(d, 0), "%80", "%81", "%82", "%83", "%84");
  else if constexpr (N == 176)
    WARPSMITH_WGMMA_SS("176", WARPSMITH_D88, WARPSMITH_F88(d, 0), "%88", "%89", "%90", "%91", "%92");
  else if constexpr (N == 192)
    WARPSMITH_WGMMA_SS("192", WARPSMITH_D96, WARPSMITH_F96(d, 0), "%96", "%97", "%98", "%99", "%100");
  else if constexpr (N == 256)
    WARPSMITH_WGMMA_SS("256", WARPSMITH_D128, WARPSMITH_F128(d, 0), "%128", "%129", "%130", "%131", "%132");
}
template <int N, int BMajor> __device__ __forceinline__ void wgmma_f16(float (&d)[N / 2], const uint32_t (&a)[4],
                                                                       uint64_t b_descriptor, int accumulate) {
  if constexpr (N == 8)
    WARPSMITH_WGMMA_RS("8", WARPSMITH_D4, WARPSMITH_F4(d, 0), "%4", "%5", "%6", "%7", "%8", "%9", "%10");
  else if constexpr (N == 16)
    WARPSMITH_WGMMA_RS("16", WARPSMITH_D8, WARPSMITH_F8(d, 0), "%8", "%9", "%10", "%11", "%12", "%13", "%14");
  else if constexpr (N == 32)
    WARPSMITH_WGMMA_RS("32", WARPSMITH_D16, WARPSMITH_F16(d, 0), "%16", "%17", "%18", "%19", "%20", "%21", "%22");
  else if constexpr (N == 64)
    WARPSMITH_WGMMA_RS("64", WARPSMITH_D32, WARPSMITH_F32(d, 0), "%32", "%33", "%34", "%35", "%36", "%37", "%38");
  else if constexpr (N == 80)
    WARPSMITH_WGMMA_RS("80", WARPSMITH_D40, WARPSMITH_F40(d, 0), "%40", "%41", "%42", "%43", "%44", "%45", "%46");
  else if constexpr (N == 96)
    WARPSMITH_WGMMA_RS("96", WARPSMITH_D48, WARPSMITH_F48(d, 0), "%48", "%49", "%50", "%51", "%52", "%53", "%54");
  else if constexpr (N == 128)
    WARPSMITH_WGMMA_RS("128", WARPSMITH_D64, WARPSMITH_F64(d, 0), "%64", "%65", "%66", "%67", "%68", "%69", "%70");
  else if constexpr (N == 144)
    WARPSMITH_WGMMA_RS("144", WARPSMITH_D72, WARPSMITH_F72(d, 0), "%72", "%73", "%74", "%75", "%76", "%77", "%78");
  else if constexpr (N == 160)
    WARPSMITH_WGMMA_RS("160", WARPSMITH_D80, WARPSMITH_F80(d, 0), "%80", "%81", "%82", "%83", "%84", "%85", "%86");
  else if constexpr (N == 176)
    WARPSMITH_WGMMA_RS("176", WARPSMITH_D88, WARPSMITH_F88(d, 0), "%88", "%89", "%90", "%91", "%92", "%93", "%94");
  else if constexpr (N == 192)
    WARPSMITH_WGMMA_RS("192", WARPSMITH_D96, WARPSMITH_F96(d, 0), "%96", "%97", "%98", "%99", "%100", "%101", "%102");
  else if constexpr (N == 256)
    WARPSMITH_WGMMA_RS("256", WARPSMITH_D128, WARPSMITH_F128(d, 0), "%128", "%129", "%130", "%131", "%132", "%133",
                       "%134");
}
#undef WARPSMITH_TYPES

}  // namespace warpsmith::device::detail
