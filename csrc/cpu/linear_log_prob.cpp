#include "kernels/linear_loss/linear_log_prob.h"

#include <algorithm>

#include "common/half_host.h"
#include "common/vectorize.h"

namespace warpsmith {
namespace {

constexpr int64_t kTileColumns = 512;  // sums of a tile stay in the first-level cache over all rows

#define WARPSMITH_ADD_ROW(T, Math)                                            \
  WARPSMITH_VECTORIZE void add_row(const T* x, Math* sums, int64_t columns) { \
    for (int64_t c = 0; c < columns; ++c) sums[c] += Math(to_float(x[c]));    \
  }
WARPSMITH_ADD_ROW(float, float)
WARPSMITH_ADD_ROW(float16, float)
WARPSMITH_ADD_ROW(bfloat16, float)
WARPSMITH_ADD_ROW(double, double)
#undef WARPSMITH_ADD_ROW

// Threads take columns, so that each sum has the order of the rows. A long column is a sum of pieces: rounding errors
// grow with the number of terms.
constexpr int64_t kPieceRows = 32;

template <class T, class Math> Status run(const ColumnSumsParams& p, const Parallel& parallel) {
  const T* x = static_cast<const T*>(p.x);
  Math* sums = static_cast<Math*>(p.sums);
  const int64_t tiles = (p.columns + kTileColumns - 1) / kTileColumns;
  parallel(tiles, 1, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t first = tile * kTileColumns, columns = std::min(kTileColumns, p.columns - first);
      if (!p.add) std::fill_n(sums + first, columns, Math(0));
      for (int64_t r = 0; r < p.rows; r += kPieceRows) {
        Math piece[kTileColumns] = {};
        const int64_t last = std::min(p.rows, r + kPieceRows);
        for (int64_t row = r; row < last; ++row) add_row(x + row * p.x_stride + first, piece, columns);
        for (int64_t c = 0; c < columns; ++c) sums[first + c] += piece[c];
      }
    }
  });
  return {};
}

}  // namespace

Status column_sums_cpu(const ColumnSumsParams& p, const Parallel& parallel) {
  switch (p.dtype) {
    case Dtype::float32: return run<float, float>(p, parallel);
    case Dtype::float16: return run<float16, float>(p, parallel);
    case Dtype::bfloat16: return run<bfloat16, float>(p, parallel);
    case Dtype::float64: return run<double, double>(p, parallel);
  }
  return Status::unsupported("no CPU kernel for this dtype");
}

}  // namespace warpsmith
