#pragma once
#include <cstdint>

#include "common/dropout.h"
#include "common/philox.h"
#include "kernels/attention/attention.h"

// The dropout mask of attention is never stored. It is a function of the seed tensor {seed, offset} and of the position
// (sequence, head, query, key), and does not depend on the tiles of a kernel. CPU, CUDA and
// python/warpsmith/reference/attention.py compute the same bits.
//
// One Philox4x32-7 call serves 16 elements, one byte each. (Seven rounds are the fewest that pass BigCrush: Salmon et
// al., SC 2011, table 2.) The layout fits the accumulators of mma.sync and wgmma. In a block of 16 queries x 32 keys,
// lane 4 * (q % 8) + (k % 8) / 2 of a warp holds the queries q, q + 8 and the keys k, k + 1, k + 8, k + 9, k + 16,
// k + 17, k + 24, k + 25. These 16 elements are one call:
//   counter word 0: (k / 32) * 32 + 4 * (q % 8) + (k % 8) / 2
//   counter word 1: (row block + q / 16) * heads + head
//   counter words 2 and 3: offset;  key: seed
//   element: byte 2 * ((q / 8) % 2) + k % 2 of word (k / 8) % 4 of the result.
// In a transposed accumulator, whose rows are 16 keys, lanes l and l ^ 4 hold elements of the same two calls. Each lane
// makes one of the calls, and the two lanes swap one word. The other half of a call belongs to another warp, which
// makes the call again.
//
// `row block` numbers the blocks of 16 queries of all sequences: the first block of a sequence is sequence *
// ceil(queries / 16), or cu_seqlens_q[sequence] / 16 + sequence if sequences are packed. q and k are positions within
// the sequence. An element is kept if its byte >= threshold; a kept element is multiplied by scale.
//
// head, q, k, heads and queries count in the call, or in the larger call of which it is a part (AttentionDropoutPlace).
// A part begins at whole blocks of 16 queries x 32 keys. So its elements lie in the same lanes as without a place, and
// a place only adds to the counter words.
namespace warpsmith {

constexpr int kAttentionDropoutQueries = 16, kAttentionDropoutKeys = 32;  // of a block of 32 calls
constexpr int kAttentionPhiloxRounds = 7;

// The threshold is 256 p, rounded. It is 1 to 255 if 0 < p < 1: some weights are dropped, and some are kept. The scale
// is the exact inverse of the share that is kept, which leaves the expectation as it is.
inline Dropout make_attention_dropout(const int64_t* seed, double p) {
  if (p <= 0) return {seed, 0, 1.0};
  if (p >= 1) return {seed, 256, 0.0};
  const auto rounded = static_cast<uint32_t>(p * 256 + 0.5);
  const uint32_t threshold = rounded < 1 ? 1 : rounded > 255 ? 255 : rounded;
  return {seed, threshold, 256.0 / (256 - threshold)};
}

// What the place of a call makes of its counter words.
struct AttentionDropoutCounters {
  int64_t queries;     // of each sequence in the whole
  uint32_t heads;      // in the whole: word 1 of the next 16 queries is larger by it
  uint32_t first_row;  // word 1 of the first queries of the first head
  uint32_t first_key;  // word 0 of the first keys in lane 0
};

WARPSMITH_HOST_DEVICE AttentionDropoutCounters attention_dropout_counters(const AttentionProblem& p) {
  const AttentionDropoutPlace& at = p.dropout_place;
  const auto heads = static_cast<uint32_t>(at.heads > 0 ? at.heads : p.heads_q);
  return {
      at.queries > 0 ? at.queries : p.seqlen_q, heads,
      static_cast<uint32_t>(at.first_query / kAttentionDropoutQueries) * heads + static_cast<uint32_t>(at.first_head),
      static_cast<uint32_t>(at.first_key)};
}

WARPSMITH_HOST_DEVICE int64_t attention_row_block(const AttentionDropoutCounters& counters, const int32_t* cu_seqlens_q,
                                                  int64_t sequence) {
  return cu_seqlens_q != nullptr
             ? cu_seqlens_q[sequence] / kAttentionDropoutQueries + sequence
             : sequence * ((counters.queries + kAttentionDropoutQueries - 1) / kAttentionDropoutQueries);
}

// Counter word 1 of the 16 queries of block `q_block` (q / 16 of the call).
WARPSMITH_HOST_DEVICE uint32_t attention_dropout_row(const AttentionDropoutCounters& counters, int64_t row_block,
                                                     int64_t q_block, int64_t head) {
  return counters.first_row + static_cast<uint32_t>(row_block + q_block) * counters.heads + static_cast<uint32_t>(head);
}

// Counter word 0 of lane 0 for the 32 keys of the call from `block_key` on, a multiple of 32.
WARPSMITH_HOST_DEVICE uint32_t attention_dropout_word0(const AttentionDropoutCounters& counters, int64_t block_key) {
  return counters.first_key + static_cast<uint32_t>(block_key);
}

// The Philox call of `lane` (0 to 31). word0: of lane 0.
WARPSMITH_HOST_DEVICE PhiloxCounter attention_dropout_lanes(uint64_t seed, uint64_t offset, uint32_t row,
                                                            uint32_t word0, uint32_t lane) {
  return philox<kAttentionPhiloxRounds>(
      {{word0 + lane, row, static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32)}}, seed);
}

}  // namespace warpsmith
