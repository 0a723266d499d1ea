#pragma once
#include <bit>
#include <cstdint>

#include "common/half.h"
#include "common/host_device.h"
#include "common/philox.h"

// What a bfloat16 parameter keeps beyond rounding to nearest: arithmetic that the CPU and kernels share.
namespace warpsmith {

// The random words that round one element in one step: word 0 for the parameter, word 1 + i for state i, of which the
// low 16 bits count. A function of (seed, step, element) alone, so the bits depend on no launch, thread or cut of the
// tensors. The last word of the counter keeps these words apart from those of dropout with an equal seed. `element`:
// the index among the elements of all tensors.
WARPSMITH_HOST_DEVICE PhiloxCounter rounding_words(uint64_t seed, uint32_t step, uint64_t element) {
  constexpr uint32_t kOptimizers = 0x6f707469u;
  return philox<7>({{static_cast<uint32_t>(element), static_cast<uint32_t>(element >> 32), step, kOptimizers}}, seed);
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
