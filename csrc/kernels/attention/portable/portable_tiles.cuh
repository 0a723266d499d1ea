#pragma once
#include "device/vector.h"
#include "kernels/attention/portable/portable_grid.h"

// The rows that a block of the portable kernels owns, and the columns of the matrix of queries and keys that they meet.
// Positions within a sequence fit in 28 bits, tokens of packed tensors in 31.
namespace warpsmith::attention {

// As attention_sequence(). Sequence number `batch` is the tokens after the last sequence.
__device__ __forceinline__ AttentionSequence tokens_of(const int32_t* cu_seqlens, int64_t sequence, int64_t batch,
                                                       int64_t total, int64_t max_seqlen) {
  const auto at = [&](int64_t i) {
    const int64_t token = device::load(cu_seqlens + i);
    return token < 0 ? 0 : token > total ? total : token;
  };
  const int64_t start = at(sequence);
  if (sequence == batch) return {start, total - start};
  const int64_t length = at(sequence + 1) - start;
  return {start, length < 0 ? 0 : length > max_seqlen ? max_seqlen : length};
}

// A sequence of queries and its keys. The tokens after the last packed sequence have no keys (or no queries).
struct SequenceOfTile {
  int sequence;
  int batch;  // the batch entry in memory; 0 if sequences are packed
  int first_query, first_key;
  int queries, keys;
  int shift;
};

template <bool kKeysAreRows>
__device__ __forceinline__ SequenceOfTile sequence_of_tile(const AttentionProblem& p, int64_t sequence) {
  const int number = static_cast<int>(sequence);
  SequenceOfTile s{number, number, 0, 0, static_cast<int>(p.seqlen_q), static_cast<int>(p.seqlen_k), 0};
  if (p.cu_seqlens_q != nullptr) {
    const bool rest = sequence == p.batch;
    AttentionSequence q{}, k{};
    if (!rest || !kKeysAreRows) q = tokens_of(p.cu_seqlens_q, sequence, p.batch, p.total_q, p.seqlen_q);
    if (!rest || kKeysAreRows) k = tokens_of(p.cu_seqlens_k, sequence, p.batch, p.total_k, p.seqlen_k);
    s.batch = 0;
    s.first_query = static_cast<int>(q.start);
    s.first_key = static_cast<int>(k.start);
    s.queries = static_cast<int>(q.length);
    s.keys = static_cast<int>(k.length);
  }
  if (p.align_bottom_right) s.shift = s.keys - s.queries;
  return s;
}

// Which rows a tile of row_tiles() has.
constexpr int64_t kNoRow = int64_t{1} << 30;  // beyond every sequence

// The number of a block, so that the longest tiles start first. Under a causal window, the last queries see most keys,
// and the first keys are seen by most queries.
template <bool kOfKeys> __device__ __forceinline__ unsigned block_number(const AttentionProblem& p) {
  return !kOfKeys && p.window_right >= 0 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
}

struct RowTile {
  int64_t sequence;
  int first;  // row within the sequence
};

template <bool kOfKeys, int kRows>
__device__ __forceinline__ RowTile row_tile(const AttentionProblem& p, int64_t number) {
  const int64_t length = kOfKeys ? p.seqlen_k : p.seqlen_q;
  if (p.cu_seqlens_q == nullptr) {
    const auto tiles = static_cast<unsigned>((length + kRows - 1) / kRows), n = static_cast<unsigned>(number);
    return {n / tiles, static_cast<int>(n % tiles) * kRows};
  }
  const int32_t* cu = kOfKeys ? p.cu_seqlens_k : p.cu_seqlens_q;
  const auto first = [&](int64_t i) {
    return tokens_of(cu, i, p.batch, kOfKeys ? p.total_k : p.total_q, length).start / kRows + i;
  };
  int64_t low = 0, high = p.batch + 1;  // first(low) <= number < first(high)
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (first(middle) <= number ? low : high) = middle;
  }
  // A number before the first sequence has no rows, and neither has a number that falling offsets lead to.
  const int64_t tile = number - first(low), most = kNoRow / kRows;
  return {low, static_cast<int>(tile < 0 || tile > most ? kNoRow : tile * kRows)};
}

// The columns [begin, end) that some row of [first, last] (inclusive) sees. Exact if first == last. begin >= end: none.
struct Columns {
  int begin, end;
};

template <bool kKeysAreRows> __device__ __forceinline__ Columns columns_of_rows(const AttentionProblem& p,
                                                                                const SequenceOfTile& s, int first,
                                                                                int last) {
  if (first > last || last >= (kKeysAreRows ? s.keys : s.queries)) return {0, 0};
  // In 32 bits, to save registers. An unbounded side becomes 2^30.
  const auto side = [](int64_t bound) {
    return bound < 0 || bound > kNoRow ? static_cast<int>(kNoRow) : static_cast<int>(bound);
  };
  const int left = side(p.window_left), right = side(p.window_right);
  // Query i sees the keys from i + shift - left to i + shift + right. Key j is seen by the queries from j - shift -
  // right to j - shift + left.
  const int from = kKeysAreRows ? first - s.shift - right : first + s.shift - left;
  const int to = kKeysAreRows ? last - s.shift + left : last + s.shift + right;
  const int length = kKeysAreRows ? s.queries : s.keys;
  const int begin = min(max(from, 0), length);
  return {begin, max(begin, min(to + 1, length))};
}

// The columns that every row of [first, last] sees.
template <bool kKeysAreRows> __device__ __forceinline__ Columns columns_of_all(const AttentionProblem& p,
                                                                               const SequenceOfTile& s, int first,
                                                                               int last) {
  const Columns x = columns_of_rows<kKeysAreRows>(p, s, first, first);
  const Columns y = columns_of_rows<kKeysAreRows>(p, s, last, last);
  return {max(x.begin, y.begin), min(x.end, y.end)};
}

// The steps of kColumns columns that cover the columns c.
template <int kColumns> struct Steps {
  int begin, count;

  __device__ __forceinline__ explicit Steps(const Columns& c)
      : begin(c.begin / kColumns * kColumns),
        count(c.begin < c.end ? (c.end - c.begin / kColumns * kColumns + kColumns - 1) / kColumns : 0) {}
};

}  // namespace warpsmith::attention
