#pragma once
#include <algorithm>
#include <cstdint>

// How a linear loss cuts its rows: the logits of one chunk are all that is ever in memory. Pure functions of the
// problem, printable through warpsmith.plan("linear_cross_entropy", ...).
namespace warpsmith {

struct LinearLossProblem {
  int64_t rows = 0;
  int64_t classes = 1;
  int element_bytes = 2;
  int64_t max_chunk_bytes = 0;  // 0: the default of the device
  bool cuda = true;
};

struct LinearLossChunks {
  int64_t chunk_rows = 1;  // of every chunk but the last
  int64_t chunks = 0;
  int64_t logits_stride = 1;  // elements from row to row: whole 16-byte vectors
  int64_t logits_bytes = 0;   // of one chunk
  const char* why = "";
};

// On a GPU every chunk beyond the first reads and writes the weight's gradient once more (8 bytes an element in
// float32), and products of few rows run below the card's rate: as few chunks as 1 GiB of logits allows. On a CPU the
// logits should not leave the caches far behind.
constexpr int64_t kDefaultChunkBytesCuda = int64_t{1} << 30;
constexpr int64_t kDefaultChunkBytesCpu = int64_t{1} << 26;

// Rows of a chunk are rounded up to whole tiles of a matrix product where the limit leaves room for that.
constexpr int64_t kChunkTileRows = 128;

constexpr LinearLossChunks choose_linear_loss_chunks(const LinearLossProblem& p) {
  LinearLossChunks c;
  const int64_t vector_elems = std::max(1, 16 / p.element_bytes);
  c.logits_stride = (p.classes + vector_elems - 1) / vector_elems * vector_elems;
  const int64_t row_bytes = c.logits_stride * p.element_bytes;
  const int64_t limit = p.max_chunk_bytes > 0 ? p.max_chunk_bytes
                        : p.cuda              ? kDefaultChunkBytesCuda
                                              : kDefaultChunkBytesCpu;
  const int64_t most = std::max<int64_t>(1, limit / row_bytes);
  c.why = "all rows at once: their logits fit the limit";
  c.chunk_rows = std::max<int64_t>(1, p.rows);
  if (p.rows > most) {
    const int64_t chunks = (p.rows + most - 1) / most;
    const int64_t even = (p.rows + chunks - 1) / chunks;
    const int64_t tiles = (even + kChunkTileRows - 1) / kChunkTileRows * kChunkTileRows;
    c.chunk_rows = tiles <= most ? tiles : even;
    c.why = row_bytes > limit ? "one row at a time: a single row exceeds the limit"
            : tiles <= most   ? "as few chunks as the limit allows, of equal size in whole tiles of 128 rows"
                              : "as few chunks as the limit allows, of equal size";
  }
  c.chunks = (p.rows + c.chunk_rows - 1) / c.chunk_rows;
  c.logits_bytes = std::min(c.chunk_rows, p.rows) * row_bytes;
  return c;
}

}  // namespace warpsmith
