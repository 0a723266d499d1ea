#pragma once
#include "device/halves.h"
#include "device/vector.h"
#include "device/wide_product.h"
#include "kernels/attention/attention_dropout.h"

// The dropout mask on the accumulators of the Hopper kernels. A thread makes one Philox call for its 8 elements of each
// 16 x 16, and turns the words into masks of packed pairs. Instructions: 25 for the call (parts of its first rounds
// that do not change are computed once), 16 for the masks, 4 to apply them (docs/design/2026-11-22-attention-sm90.md).
namespace warpsmith::attention {

struct DropoutParams {
  const int64_t* seed;  // {seed, offset}; null: none
  device::HalvesThreshold threshold;
  float scale;
};

inline DropoutParams dropout_params(const Dropout& d) {
  return {d.seed, device::halves_threshold(d.threshold), static_cast<float>(d.scale)};
}

__device__ __forceinline__ uint32_t high_word(uint64_t x) { return static_cast<uint32_t>(x >> 32); }

// The rounds of common/philox.h, repeated here because a call starts at its third or fourth round.
constexpr uint32_t kPhiloxFactor0 = 0xd2511f53, kPhiloxFactor2 = 0xcd9e8d57;
constexpr uint32_t kPhiloxKeyStep0 = 0x9e3779b9, kPhiloxKeyStep1 = 0xbb67ae85;

template <int rounds> __device__ __forceinline__ PhiloxCounter philox_rounds(PhiloxCounter c, uint64_t key) {
  uint32_t key0 = static_cast<uint32_t>(key), key1 = high_word(key);
#pragma unroll
  for (int round = 0; round < rounds; ++round) {
    const uint64_t p0 = device::wide_product(kPhiloxFactor0, c.word[0]);
    const uint64_t p1 = device::wide_product(kPhiloxFactor2, c.word[2]);
    c = {{high_word(p1) ^ c.word[1] ^ key0, static_cast<uint32_t>(p1), high_word(p0) ^ c.word[3] ^ key1,
          static_cast<uint32_t>(p0)}};
    key0 += kPhiloxKeyStep0;
    key1 += kPhiloxKeyStep1;
  }
  return c;
}

// Calls of one row of blocks: counter word 1 is fixed, word 0 differs from call to call.
struct RowDropout {
  uint64_t key;       // key of the third round
  uint32_t known[4];  // the parts of the first two rounds that do not depend on word 0

  RowDropout() = default;
  __device__ __forceinline__ RowDropout(const DropoutParams& p, uint32_t row) {
    const auto seed = static_cast<uint64_t>(device::load(p.seed)),
               offset = static_cast<uint64_t>(device::load(p.seed + 1));
    const auto key0 = __reduce_or_sync(0xffffffffu, static_cast<uint32_t>(seed)),
               key1 = __reduce_or_sync(0xffffffffu, high_word(seed));
    const uint64_t first = device::wide_product(kPhiloxFactor2, static_cast<uint32_t>(offset));
    const uint64_t second = device::wide_product(kPhiloxFactor0, high_word(first) ^ row ^ key0);
    known[0] = high_word(offset) ^ key1;
    known[1] = static_cast<uint32_t>(first) ^ (key0 + kPhiloxKeyStep0);
    known[2] = high_word(second) ^ (key1 + kPhiloxKeyStep1);
    known[3] = static_cast<uint32_t>(second);
    key = uint64_t{key1 + 2 * kPhiloxKeyStep1} << 32 | (key0 + 2 * kPhiloxKeyStep0);
  }
  // attention_dropout_lanes() for counter word 0 = `word0`.
  __device__ __forceinline__ PhiloxCounter call(uint32_t word0) const {
    const uint64_t first = device::wide_product(kPhiloxFactor0, word0);
    const uint64_t second = device::wide_product(kPhiloxFactor2, high_word(first) ^ known[0]);
    return philox_rounds<kAttentionPhiloxRounds - 2>({{high_word(second) ^ known[1], static_cast<uint32_t>(second),
                                                       known[2] ^ static_cast<uint32_t>(first), known[3]}},
                                                     key);
  }
};

// Sets the highest bit of each half of the call's words to 1 if its element is kept.
__device__ __forceinline__ void kept_halves(PhiloxCounter& c, const device::HalvesThreshold& threshold) {
#pragma unroll
  for (uint32_t& word : c.word) word = device::halves_reach(word, threshold);
}

// Masks of the four packed pairs of 16 queries x 16 keys, an A operand of wgmma whose rows are queries.
__device__ __forceinline__ void pair_masks(const PhiloxCounter& kept, uint32_t (&masks)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i)  // bit 0: row + 8; bit 1: key + 8
    masks[i] = device::spread_signs(kept.word[i % 2], kept.word[2 + i % 2],
                                    i < 2 ? device::spread_selector(0, 2) : device::spread_selector(1, 3));
}
// Applies the same mask to unpacked accumulators.
__device__ __forceinline__ void drop(const PhiloxCounter& kept, float* accumulators) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {  // bit 2: key + 8; bit 1: row + 8; bit 0: key + 1
    const uint32_t word = kept.word[i % 2 * 2 + i / 2 % 2];
    if (static_cast<int32_t>(i < 4 ? word << 16 : word) >= 0) accumulators[i] = 0.0f;
  }
}

// Calls of one block of 16 keys, for accumulators whose rows are keys: counter word 0 is fixed, word 1 differs from
// call to call.
//
// The queries 2 t and 2 t + 1 of lane 4 g + t belong to two calls. The lanes of keys g and g ^ 1 make one call each and
// swap words.
struct KeyDropout {
  uint64_t key;       // key of the fourth round
  uint32_t known[5];  // the parts of the first three rounds that do not depend on word 1
  bool odd;
  uint32_t selectors[2];  // for keys g, and for keys g + 8

  KeyDropout() = default;
  __device__ __forceinline__ KeyDropout(const DropoutParams& p, int first_key, int lane) : odd(lane / 4 % 2 != 0) {
    const auto seed = static_cast<uint64_t>(device::load(p.seed)),
               offset = static_cast<uint64_t>(device::load(p.seed + 1));
    const auto key0 = __reduce_or_sync(0xffffffffu, static_cast<uint32_t>(seed)),
               key1 = __reduce_or_sync(0xffffffffu, high_word(seed));
    const auto word0 = static_cast<uint32_t>(2 * first_key + 8 * (lane % 4) + (odd ? 4 : 0) + lane / 8);
    const uint64_t p0 = device::wide_product(kPhiloxFactor0, word0);
    const uint64_t p1 = device::wide_product(kPhiloxFactor2, static_cast<uint32_t>(offset));
    const uint64_t q1 = device::wide_product(kPhiloxFactor2, high_word(p0) ^ high_word(offset) ^ key1);
    const uint64_t r0 =
        device::wide_product(kPhiloxFactor0, high_word(q1) ^ static_cast<uint32_t>(p1) ^ (key0 + kPhiloxKeyStep0));
    known[0] = high_word(p1) ^ key0;
    known[1] = static_cast<uint32_t>(p0) ^ (key1 + kPhiloxKeyStep1);
    known[2] = static_cast<uint32_t>(q1) ^ (key0 + 2 * kPhiloxKeyStep0);
    known[3] = high_word(r0) ^ (key1 + 2 * kPhiloxKeyStep1);
    known[4] = static_cast<uint32_t>(r0);
    key = uint64_t{key1 + 3 * kPhiloxKeyStep1} << 32 | (key0 + 3 * kPhiloxKeyStep0);
    selectors[0] = odd ? device::spread_selector(2, 0) : device::spread_selector(0, 2);
    selectors[1] = odd ? device::spread_selector(3, 1) : device::spread_selector(1, 3);
  }
  // The call for the queries with counter word 1 = `row`.
  __device__ __forceinline__ PhiloxCounter call(uint32_t row) const {
    const uint64_t q0 = device::wide_product(kPhiloxFactor0, known[0] ^ row);
    const uint64_t r1 = device::wide_product(kPhiloxFactor2, high_word(q0) ^ known[1]);
    return philox_rounds<kAttentionPhiloxRounds - 3>(
        {{high_word(r1) ^ known[2], static_cast<uint32_t>(r1), known[3] ^ static_cast<uint32_t>(q0), known[4]}}, key);
  }
  // Masks of the four packed pairs of 16 keys x 16 queries, an A operand of wgmma. Called by the whole warp.
  __device__ __forceinline__ void pair_masks(uint32_t row, const device::HalvesThreshold& threshold,
                                             uint32_t (&masks)[4]) const {
    PhiloxCounter halves = call(row);
    kept_halves(halves, threshold);
#pragma unroll
    for (int w = 0; w < 2; ++w) {  // query + 8 w
      const uint32_t own = odd ? halves.word[2 + w] : halves.word[w];
      const uint32_t given = __shfl_xor_sync(0xffffffffu, odd ? halves.word[w] : halves.word[2 + w], 4);
#pragma unroll
      for (int r = 0; r < 2; ++r) masks[2 * w + r] = device::spread_signs(own, given, selectors[r]);
    }
  }
};

}  // namespace warpsmith::attention
