#pragma once
#include <bit>
#include <cstdint>
#include <cstring>

#include "common/dropout.h"
#include "common/vectorize.h"

// The lanes of the dropout mask by the vector: what CPU kernels use in place of dropout_lanes().
namespace warpsmith::cpu {

constexpr int64_t kLaneCalls = 16, kLaneCount = kLaneCalls * kDropoutLanes;  // of one fill

// lanes[i]: that of element 8 * call + i. Philox on 32-bit words in 64-bit lanes: the product of two of them is then
// one instruction without shuffles, 0.29 ns an element where the words themselves take 0.55 (AVX-512).
WARPSMITH_VECTORIZE static void fill_lanes(uint64_t seed, uint64_t offset, uint64_t call, uint16_t* lanes) {
  static_assert(std::endian::native == std::endian::little, "lanes are stored as halves of words");
  constexpr uint64_t kWord = 0xffffffff;
  uint64_t low[kLaneCalls], high[kLaneCalls];
  for (int64_t i = 0; i < kLaneCalls; ++i) {
    const uint64_t counter = call + static_cast<uint64_t>(i);
    uint64_t c0 = counter & kWord, c1 = counter >> 32, c2 = offset & kWord, c3 = offset >> 32;
    uint64_t k0 = seed & kWord, k1 = seed >> 32;
    for (int round = 0; round < 10; ++round) {
      const uint64_t p0 = c0 * 0xd2511f53u, p1 = c2 * 0xcd9e8d57u;
      c0 = (p1 >> 32) ^ c1 ^ k0;
      c2 = (p0 >> 32) ^ c3 ^ k1;
      c1 = p1 & kWord;
      c3 = p0 & kWord;
      k0 = (k0 + 0x9e3779b9u) & kWord;
      k1 = (k1 + 0xbb67ae85u) & kWord;
    }
    low[i] = c0 | c1 << 32;
    high[i] = c2 | c3 << 32;
  }
  for (int64_t i = 0; i < kLaneCalls; ++i) {
    const uint64_t words[2] = {low[i], high[i]};
    std::memcpy(lanes + i * kDropoutLanes, words, sizeof words);
  }
}

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
