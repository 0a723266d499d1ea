#pragma once
#include <bit>
#include <cstdint>

#include "common/half.h"
#include "common/host_device.h"
#include "common/philox.h"

// What a bfloat16 parameter keeps beyond rounding to nearest: arithmetic that the CPU and kernels share.
namespace warpsmith {

// Elements are rounded in pairs: the random words of elements 2 pair and 2 pair + 1 in one step, of N pairs in a row. A
// function of (seed, step, pair) alone, so the bits depend on no launch, thread or cut of the tensors. The last word of
// the counter keeps these words apart from those of dropout with an equal seed. Elements are counted through all
// tensors, each of which begins a pair. Seven rounds are the fewest that pass the tests of the generator's authors
// (common/philox.h).
template <int N> WARPSMITH_HOST_DEVICE void rounding_words(PhiloxCounter (&words)[N], uint64_t seed, uint32_t step,
                                                           uint64_t first_pair) {
  constexpr uint32_t kOptimizers = 0x6f707469u;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int i = 0; i < N; ++i) {
    const uint64_t pair = first_pair + static_cast<uint64_t>(i);
    words[i] = {{static_cast<uint32_t>(pair), static_cast<uint32_t>(pair >> 32), step, kOptimizers}};
  }
  philox_of_each<7>(words, seed);
}

// The pair's four words are eight numbers of 16 bits, low half first: 0 to 3 for the even element, 4 to 7 for the odd
// one. Of an element's four, number 0 rounds the parameter and number 1 + i state i.
WARPSMITH_HOST_DEVICE uint32_t rounding_bits(const PhiloxCounter& words, bool odd, int array) {
  const uint32_t word = array < 2 ? (odd ? words.word[2] : words.word[0]) : (odd ? words.word[3] : words.word[1]);
  return array % 2 ? word >> 16 : word & 0xffff;
}

// What the rounded parameter lacks of its value; exact. Zero beside an infinity or NaN, which keeps an infinity one.
WARPSMITH_HOST_DEVICE float compensation_of(float value, float rounded) {
  const float dropped = value - rounded;
  return dropped - dropped == 0.0f ? dropped : 0.0f;
}

// A float32 in two halves of 16 bits: the nearest bfloat16 (halfway cases away from zero, where exact recovery leaves
// no choice), and the remainder, a signed integer in units of the last place of the float32. Every float32 comes back
// bit by bit, but for a NaN, which becomes another one.
struct SplitFloat {
  bfloat16 rounded, remainder;
};
WARPSMITH_HOST_DEVICE SplitFloat split_float(float value) {
  const uint32_t u = std::bit_cast<uint32_t>(value);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {{0x7fc0}, {0}};
  return {{static_cast<uint16_t>((u + 0x8000u) >> 16)}, {static_cast<uint16_t>(u)}};
}
WARPSMITH_HOST_DEVICE float join_float(bfloat16 rounded, bfloat16 remainder) {
  const auto low = static_cast<uint32_t>(int32_t{static_cast<int16_t>(remainder.bits)});
  return std::bit_cast<float>((static_cast<uint32_t>(rounded.bits) << 16) + low);
}

}  // namespace warpsmith
