#pragma once
#include <algorithm>
#include <cstdint>

#include "common/alignment.h"

// How a linear loss cuts its rows into chunks. Only the logits of one chunk are in memory at a time. Pure functions of
// the problem, printable through warpsmith.plan(op, ...).
namespace warpsmith {

struct LinearLossProblem {
  int64_t rows = 0;
  int64_t classes = 1;
  int element_bytes = 2;
  int64_t max_chunk_bytes = 0;  // 0: the default of the device
  bool cuda = true;
  int64_t hidden_size = 0;  // these for the memory that a linear cross-entropy takes
  bool float16 = false;
  int64_t max_bytes = 0;
};

struct LinearLossChunks {
  int64_t chunk_rows = 1;  // of every chunk but the last
  int64_t chunks = 0;
  int64_t logits_stride = 1;  // elements from row to row: whole 16-byte vectors
  int64_t logits_bytes = 0;   // of one chunk
  const char* why = "";
};

// On a GPU each chunk beyond the first reads and writes the weight gradient once more (8 bytes an element in float32),
// and matrix products of few rows run below the card's rate: as few chunks as 1 GiB of logits allows. On a CPU smaller
// chunks stay closer to the size of the caches.
constexpr int64_t kDefaultChunkBytesCuda = int64_t{1} << 30;
constexpr int64_t kDefaultChunkBytesCpu = int64_t{1} << 26;

// Rows of a chunk are rounded up to whole tiles of a matrix product where the limit leaves room for that.
constexpr int64_t kChunkTileRows = 128;

constexpr LinearLossChunks choose_linear_loss_chunks(const LinearLossProblem& p) {
  LinearLossChunks c;
  const int64_t vector_elems = std::max(1, 16 / p.element_bytes);
  c.logits_stride = ceil_div(p.classes, vector_elems) * vector_elems;
  const int64_t row_bytes = c.logits_stride * p.element_bytes;
  const int64_t limit = p.max_chunk_bytes > 0 ? p.max_chunk_bytes
                        : p.cuda              ? kDefaultChunkBytesCuda
                                              : kDefaultChunkBytesCpu;
  const int64_t most = std::max<int64_t>(1, limit / row_bytes);
  c.why = "all rows at once: their logits fit the limit";
  c.chunk_rows = std::max<int64_t>(1, p.rows);
  if (p.rows > most) {
    const int64_t even = ceil_div(p.rows, ceil_div(p.rows, most));
    const int64_t tiles = ceil_div(even, kChunkTileRows) * kChunkTileRows;
    c.chunk_rows = tiles <= most ? tiles : even;
    c.why = row_bytes > limit ? "one row at a time: a single row exceeds the limit"
            : tiles <= most   ? "as few chunks as the limit allows, of equal size in whole tiles of 128 rows"
                              : "as few chunks as the limit allows, of equal size";
  }
  c.chunks = ceil_div(p.rows, c.chunk_rows);
  c.logits_bytes = std::min(c.chunk_rows, p.rows) * row_bytes;
  return c;
}

constexpr int64_t kLinearLossSumBytes = 4;  // an element of a float32 sum

constexpr bool sums_wider(const LinearLossProblem& p, bool float32_sums) {
  return float32_sums && p.element_bytes < kLinearLossSumBytes;
}

// Bytes of a row of a chunk: its logits. On a CPU also the factors of the weight gradient in float32, because CPU
// matrix products of 16-bit factors do not add up in float32.
constexpr int64_t linear_loss_row_bytes(const LinearLossProblem& p, int64_t logits_stride, bool float32_sums) {
  const bool copies = !p.cuda && sums_wider(p, float32_sums);
  return logits_stride * p.element_bytes + (copies ? (p.classes + p.hidden_size) * kLinearLossSumBytes : 0);
}

// Bytes that stay until the end: the gradients of hidden and weight, losses, statistics and column sums.
constexpr int64_t linear_loss_lasting_bytes(const LinearLossProblem& p, bool float32_sums) {
  const int64_t weight = p.classes * p.hidden_size;
  const int64_t sums = weight * (sums_wider(p, float32_sums) ? kLinearLossSumBytes : p.element_bytes);
  constexpr int64_t kStatistics = 32, kBias = 16, kPartials = int64_t{1} << 16;
  return p.rows * p.hidden_size * p.element_bytes + sums + kStatistics * p.rows + kBias * p.classes + kPartials;
}

// The peak of a linear cross-entropy beyond its inputs, forward and backward together: the bytes that stay, plus the
// larger of one chunk and of the 16-bit weight gradient beside its float32 sum.
constexpr int64_t linear_loss_peak_bytes(const LinearLossProblem& p, const LinearLossChunks& c, bool float32_sums) {
  const int64_t chunk = std::min(c.chunk_rows, p.rows) * linear_loss_row_bytes(p, c.logits_stride, float32_sums);
  const int64_t rounded = sums_wider(p, float32_sums) ? p.classes * p.hidden_size * p.element_bytes : 0;
  return linear_loss_lasting_bytes(p, float32_sums) + std::max(chunk, rounded);
}

// Chunks and the dtype of the weight's sum, for a bound on all that a linear cross-entropy takes.
struct LinearLossBudget {
  bool fits = false;
  bool float32_sums = false;
  LinearLossChunks chunks;
  int64_t peak_bytes = 0;  // of this choice; if no choice keeps the bound, the smallest possible
  const char* why = "";
};

constexpr LinearLossBudget linear_loss_within(LinearLossProblem p, bool float32_sums) {
  LinearLossBudget b;
  b.float32_sums = float32_sums;
  const int64_t stride = choose_linear_loss_chunks(p).logits_stride;
  const int64_t rows = (p.max_bytes - linear_loss_lasting_bytes(p, float32_sums)) /
                       std::max<int64_t>(1, linear_loss_row_bytes(p, stride, float32_sums));
  p.max_chunk_bytes = std::max<int64_t>(1, rows) * stride * p.element_bytes;
  b.chunks = choose_linear_loss_chunks(p);
  b.peak_bytes = linear_loss_peak_bytes(p, b.chunks, float32_sums);
  b.fits = b.peak_bytes <= p.max_bytes;
  return b;
}

constexpr LinearLossBudget choose_linear_loss_budget(const LinearLossProblem& p) {
  LinearLossBudget own = linear_loss_within(p, false), wide = linear_loss_within(p, true);
  if (p.float16) {  // whose sums would overflow
    wide.why = "float16: sums of the weight's gradient are float32";
    return wide;
  }
  own.why = "all rows at once: the weight's gradient is rounded once in its own dtype";
  wide.why = "several chunks: the weight's gradient is summed in float32 and rounded once";
  if (own.fits && own.chunks.chunks <= 1) return own;
  if (wide.fits) return wide;
  own.why = "float32 sums of the weight's gradient do not fit: it is rounded once a chunk";
  return own;
}

}  // namespace warpsmith
