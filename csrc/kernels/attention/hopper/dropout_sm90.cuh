#pragma once
#include "common/dtype.h"
#include "device/halves.h"
#include "device/vector.h"
#include "device/wide_product.h"
#include "kernels/attention/attention_dropout.h"

// The dropout mask on the accumulators of the Hopper kernels. Instructions: docs/design/attention.md.
//
// In the forward, a thread makes one Philox call for its 16 elements of each 16 queries x 32 keys. It turns the bytes
// into gates of packed pairs (device/halves.h), by which it multiplies packed probabilities.
//
// In the backward, it makes half of a call for its 8 elements of each 16 keys x 16 queries. It turns the bytes into
// masks of packed pairs. They take more instructions than gates, but the products with gates spill registers there.
namespace warpsmith::attention {

struct DropoutParams {
  const int64_t* seed;  // {seed, offset}; null: none
  uint32_t threshold;   // as byte_gates() takes it
  device::BytesThreshold bytes;
  float scale;  // of a product of gated probabilities; contains the inverse of the gate
  AttentionDropoutCounters counters;
};

// What a probability of the dtype is multiplied by if its gate is open.
inline double gate_of(Dtype dtype) {
  return dtype == Dtype::bfloat16 ? device::kGate<bfloat16> : device::kGate<float16>;
}

inline DropoutParams dropout_params(const AttentionProblem& a) {
  const Dropout& d = a.dropout;
  return {d.seed, device::byte_threshold(d.threshold), device::bytes_threshold(d.threshold),
          static_cast<float>(d.scale / gate_of(a.dtype)), attention_dropout_counters(a)};
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

// The gates of packed pair `i` of 16 queries x 16 keys, an A operand of wgmma whose rows are queries. `half`: of the 32
// keys of the call. Bit 0 of i: row + 8; bit 1: key + 8.
__device__ __forceinline__ uint32_t pair_gates(const PhiloxCounter& call, int half, int i, uint32_t threshold) {
  return device::byte_gates(call.word[2 * half + i / 2], i % 2, threshold);
}
// Applies the same gates to unpacked accumulators.
template <class T>
__device__ __forceinline__ void drop(const PhiloxCounter& call, int half, uint32_t threshold, float* accumulators) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t gates = pair_gates(call, half, i, threshold);
    accumulators[2 * i] *= device::low_half<T>(gates);
    accumulators[2 * i + 1] *= device::high_half<T>(gates);
  }
}

// Calls of one block of 16 keys, for accumulators whose rows are keys: counter word 0 is fixed, word 1 differs from
// call to call. Of a call, only the two words for these keys are made.
//
// The queries 2 t and 2 t + 1 of lane 4 g + t belong to two calls. The lanes of keys g and g ^ 1 make one call each and
// swap one word.
struct KeyDropout {
  uint64_t key;        // key of the fourth round
  uint32_t known[5];   // the parts of the first three rounds that do not depend on word 1
  bool last;           // the last 16 of the 32 keys of a call
  uint32_t selectors;  // low half: the bytes that the lane keeps; high half: the queries 2 t and 2 t + 1 of key g

  KeyDropout() = default;
  __device__ __forceinline__ KeyDropout(const DropoutParams& p, int first_key, int lane)
      : last(first_key / 16 % 2 != 0) {
    const bool odd = lane / 4 % 2 != 0;
    const auto seed = static_cast<uint64_t>(device::load(p.seed)),
               offset = static_cast<uint64_t>(device::load(p.seed + 1));
    const auto key0 = __reduce_or_sync(0xffffffffu, static_cast<uint32_t>(seed)),
               key1 = __reduce_or_sync(0xffffffffu, high_word(seed));
    const uint32_t word0 =
        attention_dropout_word0(p.counters, first_key / kAttentionDropoutKeys * kAttentionDropoutKeys) +
        static_cast<uint32_t>(8 * (lane % 4) + (odd ? 4 : 0) + lane / 8);
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
    selectors = odd ? 0x15047531 : 0x51406420;
  }
  // Words 2 and 3, or 0 and 1, of the call for the queries with counter word 1 = `row`.
  __device__ __forceinline__ uint64_t call(uint32_t row) const {
    constexpr int kWhole = kAttentionPhiloxRounds - 4;
    const uint64_t q0 = device::wide_product(kPhiloxFactor0, known[0] ^ row);
    const uint64_t r1 = device::wide_product(kPhiloxFactor2, high_word(q0) ^ known[1]);
    const PhiloxCounter c = philox_rounds<kWhole>(
        {{high_word(r1) ^ known[2], static_cast<uint32_t>(r1), known[3] ^ static_cast<uint32_t>(q0), known[4]}}, key);
    const uint64_t product = device::wide_product(last ? kPhiloxFactor0 : kPhiloxFactor2, last ? c.word[0] : c.word[2]);
    const uint32_t of_key =
        last ? high_word(key) + kWhole * kPhiloxKeyStep1 : static_cast<uint32_t>(key) + kWhole * kPhiloxKeyStep0;
    const uint32_t first = high_word(product) ^ (last ? c.word[3] : c.word[1]) ^ of_key;
    return product << 32 | first;
  }
  // Masks of the four packed pairs of 16 keys x 16 queries, an A operand of wgmma. Called by the whole warp.
  __device__ __forceinline__ void pair_masks(uint32_t row, const device::BytesThreshold& threshold,
                                             uint32_t (&masks)[4]) const {
    const uint64_t words = call(row);  // of keys g, and of keys g + 8
    const auto first = static_cast<uint32_t>(words), second = high_word(words);
    const uint32_t kept = __byte_perm(first, second, selectors & 0xffffu);
    const uint32_t given = __shfl_xor_sync(0xffffffffu, __byte_perm(first, second, (selectors & 0xffffu) ^ 0x1111u), 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {  // key + 8 r
      const uint32_t of_key = device::bytes_reach(
          __byte_perm(kept, given, (selectors >> 16) + 0x2222u * static_cast<uint32_t>(r)), threshold);
#pragma unroll
      for (int w = 0; w < 2; ++w)  // query + 8 w
        masks[2 * w + r] = device::spread_signs(of_key, 0, device::spread_selector(2 * w, 2 * w + 1));
    }
  }
};

}  // namespace warpsmith::attention
