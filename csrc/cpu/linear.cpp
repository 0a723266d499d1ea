#include <algorithm>

#include "common/alignment.h"
#include "common/half_host.h"
#include "common/vectorize.h"
#include "common/visit_dtype.h"
#include "kernels/linear/linear.h"

namespace warpsmith {
namespace {

// Free functions, one per dtype: target_clones reaches neither lambdas nor templates.
#define WARPSMITH_LOOPS(T)                                                                                          \
  WARPSMITH_VECTORIZE void add_row(const T* x, Arithmetic<T>* sums, int64_t columns) {                              \
    for (int64_t c = 0; c < columns; ++c) sums[c] += to_float(x[c]);                                                \
  }                                                                                                                 \
  /* Pairs, then pairs of pairs, as the CUDA kernel adds them. */                                                   \
  WARPSMITH_VECTORIZE void add_piece(const T* x, int64_t stride, Arithmetic<T>* sums, int64_t columns) {            \
    for (int64_t c = 0; c < columns; ++c) {                                                                         \
      const auto pair = [&](int64_t r) { return to_float(x[r * stride + c]) + to_float(x[(r + 1) * stride + c]); }; \
      sums[c] += (pair(0) + pair(2)) + (pair(4) + pair(6));                                                         \
    }                                                                                                               \
  }
WARPSMITH_LOOPS(float)
WARPSMITH_LOOPS(float16)
WARPSMITH_LOOPS(bfloat16)
WARPSMITH_LOOPS(double)
#undef WARPSMITH_LOOPS

constexpr int64_t kMirrorSide = 32;    // rows and columns of a tile that stay in the first-level cache
constexpr int64_t kTileColumns = 512;  // sums of a tile stay in the first-level cache over all rows
// A long column is a sum of groups, and a group a sum of pieces: rounding errors grow with the number of terms of one
// chain. With pieces of 32 rows alone, 40 rows of float32 were off by 4 ulp, torch's sum by less than one.
constexpr int64_t kPieceRows = 8, kGroupRows = 64;

}  // namespace

// Threads divide the columns, so each sum has the order of the rows.
Status column_sums_cpu(const ColumnSumsParams& p, const Parallel& parallel) {
  return visit_cpu_dtypes(p.dtype, p.sums_dtype, [&]<class T, class W>() {
    using Math = Arithmetic<T>;
    const T* x = static_cast<const T*>(p.x);
    W* sums = static_cast<W*>(p.sums);
    parallel(ceil_div(p.columns, kTileColumns), 1, [&](int64_t begin, int64_t end) {
      for (int64_t tile = begin; tile < end; ++tile) {
        const int64_t first = tile * kTileColumns, columns = std::min(kTileColumns, p.columns - first);
        Math total[kTileColumns] = {};
        for (int64_t c = 0; p.add && c < columns; ++c) total[c] = to_float(sums[first + c]);
        for (int64_t g = 0; g < p.rows; g += kGroupRows) {
          Math group[kTileColumns] = {};
          const int64_t end_of_group = std::min(p.rows, g + kGroupRows);
          for (int64_t r = g; r < end_of_group; r += kPieceRows) {
            const T* rows = x + r * p.x_stride + first;
            if (end_of_group - r >= kPieceRows) {
              add_piece(rows, p.x_stride, group, columns);
              continue;
            }
            Math piece[kTileColumns] = {};
            for (int64_t row = r; row < end_of_group; ++row, rows += p.x_stride) add_row(rows, piece, columns);
            for (int64_t c = 0; c < columns; ++c) group[c] += piece[c];
          }
          for (int64_t c = 0; c < columns; ++c) total[c] += group[c];
        }
        for (int64_t c = 0; c < columns; ++c) sums[first + c] = from_float<W>(total[c]);
      }
    });
    return Status();
  });
}

// Threads divide the tile rows that are written.
Status mirror_cpu(const MirrorParams& p, const Parallel& parallel) {
  const int64_t sides = ceil_div(p.n, kMirrorSide);
  return visit_cpu_dtype(p.dtype, [&]<class T>() {
    parallel(p.batches * sides, 1, [&](int64_t begin, int64_t end) {
      for (int64_t tile = begin; tile < end; ++tile) {
        T* x = static_cast<T*>(p.x) + tile / sides * p.n * p.n;
        const int64_t first = tile % sides * kMirrorSide, last = std::min(p.n, first + kMirrorSide);
        for (int64_t c = 0; c < last; c += kMirrorSide)
          for (int64_t i = first; i < last; ++i)
            for (int64_t j = c; j < std::min(i, c + kMirrorSide); ++j) x[i * p.n + j] = x[j * p.n + i];
      }
    });
  });
}

}  // namespace warpsmith
