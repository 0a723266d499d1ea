#pragma once
#include <bit>
#include <cstdint>
#include <cstring>

#include "common/dropout.h"
#include "common/vectorize.h"
#if defined(WARPSMITH_CLONES) && !defined(__clang__)
#include <immintrin.h>
#endif

// The lanes of the dropout mask as vectors: replaces dropout_lanes() in CPU kernels.
namespace warpsmith::cpu {

constexpr int64_t kLaneCalls = 32, kLaneCount = kLaneCalls * kDropoutLanes;  // per fill
constexpr int kPhiloxRounds = 10;

// What the calls of one mask share. The round keys are in memory, because one instruction broadcasts a key from there.
// Computed in place they would be in integer registers and take an instruction each to broadcast.
struct LaneCalls {
  uint64_t key[kPhiloxRounds][2];
  uint64_t offset;

  LaneCalls(uint64_t seed, uint64_t mask_offset) : offset(mask_offset) {
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (auto& k : key) {
      k[0] = k0;
      k[1] = k1;
      k0 += 0x9e3779b9u;
      k1 += 0xbb67ae85u;
    }
  }
};

// lanes[i] is the lane of element 8 * call + i. Philox on 32-bit words held in 64-bit lanes: the product of two words
// is then one instruction without shuffles. V is a vector of lanes, or one lane. The bits above a word do not matter:
// MULTIPLY does not read them, and they are dropped at the end. kTogether vectors at a time hide a round's latency.
// STORE(low, high, i) receives both halves of the calls from i on.
#define WARPSMITH_FILL_LANES(V, kTogether, MULTIPLY, STORE)                                           \
  constexpr uint64_t kWord = 0xffffffff;                                                              \
  constexpr int64_t kCalls = sizeof(V) / sizeof(uint64_t);                                            \
  uint64_t counters[kLaneCalls];                                                                      \
  for (int64_t i = 0; i < kLaneCalls; ++i) counters[i] = call + static_cast<uint64_t>(i);             \
  for (int64_t i = 0; i < kLaneCalls; i += kTogether * kCalls) {                                      \
    V c0[kTogether], c1[kTogether], c2[kTogether], c3[kTogether];                                     \
    WARPSMITH_UNROLL for (int v = 0; v < kTogether; ++v) {                                            \
      std::memcpy(&c0[v], counters + i + v * kCalls, sizeof(V));                                      \
      c1[v] = c0[v] >> 32;                                                                            \
      c2[v] = V{} + (calls.offset & kWord);                                                           \
      c3[v] = V{} + (calls.offset >> 32);                                                             \
    }                                                                                                 \
    WARPSMITH_UNROLL for (int round = 0; round < kPhiloxRounds; ++round) {                            \
      const V k0 = V{} + calls.key[round][0], k1 = V{} + calls.key[round][1];                         \
      WARPSMITH_UNROLL for (int v = 0; v < kTogether; ++v) {                                          \
        const V p0 = MULTIPLY(c0[v], (V{} + 0xd2511f53u)), p1 = MULTIPLY(c2[v], (V{} + 0xcd9e8d57u)); \
        c0[v] = (p1 >> 32) ^ c1[v] ^ k0;                                                              \
        c2[v] = (p0 >> 32) ^ c3[v] ^ k1;                                                              \
        c1[v] = p1;                                                                                   \
        c3[v] = p0;                                                                                   \
      }                                                                                               \
    }                                                                                                 \
    WARPSMITH_UNROLL for (int v = 0; v < kTogether; ++v) {                                            \
      const V low = (c0[v] & kWord) | c1[v] << 32, high = (c2[v] & kWord) | c3[v] << 32;              \
      STORE(low, high, i + v * kCalls);                                                               \
    }                                                                                                 \
  }

static_assert(std::endian::native == std::endian::little, "lanes are stored as halves of words");

#if defined(WARPSMITH_CLONES) && !defined(__clang__)
#define WARPSMITH_UNROLL _Pragma("GCC unroll 16")
// g++ does not see that the factors are words, and would multiply 64 by 64 bits. Nanoseconds per element (Zen 4,
// 2026-11-22): AVX-512 0.17, AVX2 0.28, SSE2 0.56. With keys computed in place, two vectors at a time, and halves
// joined in memory: 0.26, 0.43, 0.60.
template <int bytes> using Words __attribute__((vector_size(bytes))) = uint64_t;
#define WARPSMITH_PRODUCT_512(a, b) (Words<64>)_mm512_maskz_mul_epu32(255, (__m512i)(a), (__m512i)(b))
#define WARPSMITH_PRODUCT_256(a, b) (Words<32>)_mm256_mul_epu32((__m256i)(a), (__m256i)(b))
#define WARPSMITH_PRODUCT_128(a, b) (Words<16>)_mm_mul_epu32((__m128i)(a), (__m128i)(b))
// Interleaves the two halves of each call: vectors of the first and of the last calls.
#define WARPSMITH_STORE(V, i, first, last)                                            \
  do {                                                                                \
    const V first_calls = first, last_calls = last;                                   \
    std::memcpy(lanes + (i) * kDropoutLanes, &first_calls, sizeof(V));                \
    std::memcpy(lanes + (i) * kDropoutLanes + sizeof(V) / 2, &last_calls, sizeof(V)); \
  } while (false)
#define WARPSMITH_STORE_512(low, high, i)                                                            \
  WARPSMITH_STORE(Words<64>, i, __builtin_shuffle(low, high, (Words<64>{0, 8, 1, 9, 2, 10, 3, 11})), \
                  __builtin_shuffle(low, high, (Words<64>{4, 12, 5, 13, 6, 14, 7, 15})))
#define WARPSMITH_STORE_256(low, high, i)                                              \
  WARPSMITH_STORE(Words<32>, i, __builtin_shuffle(low, high, (Words<32>{0, 4, 1, 5})), \
                  __builtin_shuffle(low, high, (Words<32>{2, 6, 3, 7})))
#define WARPSMITH_STORE_128(low, high, i)                                        \
  WARPSMITH_STORE(Words<16>, i, __builtin_shuffle(low, high, (Words<16>{0, 2})), \
                  __builtin_shuffle(low, high, (Words<16>{1, 3})))
__attribute__((target("arch=x86-64-v4"))) static void fill_lanes(const LaneCalls& calls, uint64_t call,
                                                                 uint16_t* lanes) {
  WARPSMITH_FILL_LANES(Words<64>, 4, WARPSMITH_PRODUCT_512, WARPSMITH_STORE_512)
}
__attribute__((target("arch=x86-64-v3"))) static void fill_lanes(const LaneCalls& calls, uint64_t call,
                                                                 uint16_t* lanes) {
  WARPSMITH_FILL_LANES(Words<32>, 2, WARPSMITH_PRODUCT_256, WARPSMITH_STORE_256)
}
__attribute__((target("default"))) static void fill_lanes(const LaneCalls& calls, uint64_t call, uint16_t* lanes){
    WARPSMITH_FILL_LANES(Words<16>, 2, WARPSMITH_PRODUCT_128, WARPSMITH_STORE_128)}
#undef WARPSMITH_PRODUCT_512
#undef WARPSMITH_PRODUCT_256
#undef WARPSMITH_PRODUCT_128
#undef WARPSMITH_STORE_512
#undef WARPSMITH_STORE_256
#undef WARPSMITH_STORE_128
#undef WARPSMITH_STORE
#else
#define WARPSMITH_UNROLL
#define WARPSMITH_PRODUCT(a, b) ((a) & kWord) * (b)
#define WARPSMITH_STORE(low, high, i) lows[i] = low, highs[i] = high
WARPSMITH_VECTORIZE static void fill_lanes(const LaneCalls& calls, uint64_t call, uint16_t* lanes) {
  uint64_t lows[kLaneCalls], highs[kLaneCalls];
  WARPSMITH_FILL_LANES(uint64_t, 2, WARPSMITH_PRODUCT, WARPSMITH_STORE)
  for (int64_t i = 0; i < kLaneCalls; ++i) {
    const uint64_t words[2] = {lows[i], highs[i]};
    std::memcpy(lanes + i * kDropoutLanes, words, sizeof words);
  }
}
#undef WARPSMITH_PRODUCT
#undef WARPSMITH_STORE
#endif
#undef WARPSMITH_UNROLL
#undef WARPSMITH_FILL_LANES

// Runs piece(lanes, at, n) over elements [first, first + count) in order. `at` counts from `first`; lanes[i] belongs to
// element first + at + i.
template <class Piece>
void for_lanes(const Dropout& d, int64_t first, int64_t count, Piece&& piece) {
  const LaneCalls calls(static_cast<uint64_t>(d.seed[0]), static_cast<uint64_t>(d.seed[1]));
  uint16_t lanes[kLaneCount];
  for (int64_t at = 0; at < count;) {
    const int64_t skip = (first + at) % kDropoutLanes, left = count - at;
    const int64_t n = left < kLaneCount - skip ? left : kLaneCount - skip;
    fill_lanes(calls, static_cast<uint64_t>((first + at) / kDropoutLanes), lanes);
    piece(lanes + skip, at, n);
    at += n;
  }
}

}  // namespace warpsmith::cpu
