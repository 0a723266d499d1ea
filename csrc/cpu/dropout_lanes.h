#pragma once
#include <bit>
#include <cstdint>
#include <cstring>

#include "common/dropout.h"
#include "common/vectorize.h"
#if defined(WARPSMITH_CLONES) && !defined(__clang__)
#include <immintrin.h>
#endif

// The lanes of the dropout mask by the vector: what CPU kernels use in place of dropout_lanes().
namespace warpsmith::cpu {

constexpr int64_t kLaneCalls = 16, kLaneCount = kLaneCalls * kDropoutLanes;  // of one fill

// Stores Philox's words by the vector: lanes[i] is that of element 8 * call + i.
inline void store_lanes(const uint64_t* low, const uint64_t* high, uint16_t* lanes) {
  static_assert(std::endian::native == std::endian::little, "lanes are stored as halves of words");
  for (int64_t i = 0; i < kLaneCalls; ++i) {
    const uint64_t words[2] = {low[i], high[i]};
    std::memcpy(lanes + i * kDropoutLanes, words, sizeof words);
  }
}

// lanes[i]: that of element 8 * call + i. Philox on 32-bit words in 64-bit lanes, V, a vector of them or one: the
// product of two words is then one instruction without shuffles. What lies above a word is of no account: MULTIPLY does
// not read it, and it is dropped in the end. Two vectors at a time, for a product's latency.
#define WARPSMITH_FILL_LANES(V, MULTIPLY)                                                             \
  constexpr uint64_t kWord = 0xffffffff;                                                              \
  constexpr int64_t kCalls = sizeof(V) / sizeof(uint64_t);                                            \
  uint64_t low[kLaneCalls], high[kLaneCalls];                                                         \
  for (int64_t i = 0; i < kLaneCalls; ++i) low[i] = call + static_cast<uint64_t>(i);                  \
  for (int64_t i = 0; i < kLaneCalls; i += 2 * kCalls) {                                              \
    V c0[2], c1[2], c2[2], c3[2];                                                                     \
    for (int v = 0; v < 2; ++v) {                                                                     \
      std::memcpy(&c0[v], low + i + v * kCalls, sizeof(V));                                           \
      c1[v] = c0[v] >> 32;                                                                            \
      c2[v] = V{} + (offset & kWord);                                                                 \
      c3[v] = V{} + (offset >> 32);                                                                   \
    }                                                                                                 \
    uint64_t k0 = seed & kWord, k1 = seed >> 32;                                                      \
    for (int round = 0; round < 10; ++round) {                                                        \
      for (int v = 0; v < 2; ++v) {                                                                   \
        const V p0 = MULTIPLY(c0[v], (V{} + 0xd2511f53u)), p1 = MULTIPLY(c2[v], (V{} + 0xcd9e8d57u)); \
        c0[v] = (p1 >> 32) ^ c1[v] ^ k0;                                                              \
        c2[v] = (p0 >> 32) ^ c3[v] ^ k1;                                                              \
        c1[v] = p1;                                                                                   \
        c3[v] = p0;                                                                                   \
      }                                                                                               \
      k0 += 0x9e3779b9u;                                                                              \
      k1 += 0xbb67ae85u;                                                                              \
    }                                                                                                 \
    for (int v = 0; v < 2; ++v) {                                                                     \
      c0[v] = (c0[v] & kWord) | c1[v] << 32;                                                          \
      c2[v] = (c2[v] & kWord) | c3[v] << 32;                                                          \
      std::memcpy(low + i + v * kCalls, &c0[v], sizeof(V));                                           \
      std::memcpy(high + i + v * kCalls, &c2[v], sizeof(V));                                          \
    }                                                                                                 \
  }                                                                                                   \
  store_lanes(low, high, lanes)

#if defined(WARPSMITH_CLONES) && !defined(__clang__)
// g++ does not see that the factors are words and multiplies 64 by 64 bits. Nanoseconds an element with its products
// and with these (Zen 4, 2026-11-21): AVX-512 0.30, 0.26; AVX2 1.11, 0.42; SSE2 1.08, 0.56.
template <int bytes> using Words __attribute__((vector_size(bytes))) = uint64_t;
#define WARPSMITH_PRODUCT_512(a, b) (Words<64>)_mm512_maskz_mul_epu32(255, (__m512i)(a), (__m512i)(b))
#define WARPSMITH_PRODUCT_256(a, b) (Words<32>)_mm256_mul_epu32((__m256i)(a), (__m256i)(b))
#define WARPSMITH_PRODUCT_128(a, b) (Words<16>)_mm_mul_epu32((__m128i)(a), (__m128i)(b))
__attribute__((target("arch=x86-64-v4"))) static void fill_lanes(uint64_t seed, uint64_t offset, uint64_t call,
                                                                 uint16_t* lanes) {
  WARPSMITH_FILL_LANES(Words<64>, WARPSMITH_PRODUCT_512);
}
__attribute__((target("arch=x86-64-v3"))) static void fill_lanes(uint64_t seed, uint64_t offset, uint64_t call,
                                                                 uint16_t* lanes) {
  WARPSMITH_FILL_LANES(Words<32>, WARPSMITH_PRODUCT_256);
}
__attribute__((target("default"))) static void fill_lanes(uint64_t seed, uint64_t offset, uint64_t call,
                                                          uint16_t* lanes) {
  WARPSMITH_FILL_LANES(Words<16>, WARPSMITH_PRODUCT_128);
}
#undef WARPSMITH_PRODUCT_512
#undef WARPSMITH_PRODUCT_256
#undef WARPSMITH_PRODUCT_128
#else
#define WARPSMITH_PRODUCT(a, b) ((a) & kWord) * (b)
WARPSMITH_VECTORIZE static void fill_lanes(uint64_t seed, uint64_t offset, uint64_t call, uint16_t* lanes) {
  WARPSMITH_FILL_LANES(uint64_t, WARPSMITH_PRODUCT);
}
#undef WARPSMITH_PRODUCT
#endif
#undef WARPSMITH_FILL_LANES

// Runs piece(lanes, at, n) over elements [first, first + count) in order: `at` counts from `first`, lanes[i] is that of
// element first + at + i.
template <class Piece> void for_lanes(const Dropout& d, int64_t first, int64_t count, Piece&& piece) {
  uint16_t lanes[kLaneCount];
  for (int64_t at = 0; at < count;) {
    const int64_t skip = (first + at) % kDropoutLanes, left = count - at;
    const int64_t n = left < kLaneCount - skip ? left : kLaneCount - skip;
    fill_lanes(static_cast<uint64_t>(d.seed[0]), static_cast<uint64_t>(d.seed[1]),
               static_cast<uint64_t>((first + at) / kDropoutLanes), lanes);
    piece(lanes + skip, at, n);
    at += n;
  }
}

}  // namespace warpsmith::cpu
