#include "kernels/linear_loss/linear_loss.h"

#include <algorithm>
#include <string>

#include "common/alignment.h"
#include "common/half_host.h"
#include "common/vectorize.h"
#include "common/visit_dtype.h"

namespace warpsmith {
namespace {

constexpr int64_t kGrainElems = 16 * 1024;

// Free functions, one per pair of dtypes: target_clones reaches neither lambdas nor templates.
#define WARPSMITH_FINISH(In, Out)                                                                \
  WARPSMITH_VECTORIZE void finish(const In* x, Out* out, int64_t count, Arithmetic<In> factor) { \
    for (int64_t i = 0; i < count; ++i) out[i] = from_float<Out>(to_float(x[i]) * factor);       \
  }
#define WARPSMITH_LOOPS(T)                                                                                  \
  WARPSMITH_FINISH(T, T)                                                                                    \
  WARPSMITH_VECTORIZE void finish_into_sum(T* x, Arithmetic<T>* sum, int64_t count, Arithmetic<T> factor) { \
    for (int64_t i = 0; i < count; ++i) {                                                                   \
      sum[i] += to_float(x[i]) * factor;                                                                    \
      x[i] = from_float<T>(Arithmetic<T>(0));                                                               \
    }                                                                                                       \
  }                                                                                                         \
  WARPSMITH_VECTORIZE void add_row(const T* x, Arithmetic<T>* sums, int64_t columns) {                      \
    for (int64_t c = 0; c < columns; ++c) sums[c] += to_float(x[c]);                                        \
  }
WARPSMITH_LOOPS(float)
WARPSMITH_LOOPS(float16)
WARPSMITH_LOOPS(bfloat16)
WARPSMITH_LOOPS(double)
WARPSMITH_FINISH(float, float16)
WARPSMITH_FINISH(float, bfloat16)
#undef WARPSMITH_FINISH
#undef WARPSMITH_LOOPS

template <class In, class Out> Status run_finish(const LinearFinishParams& p, const Parallel& parallel) {
  using Math = Arithmetic<In>;
  Math factor = *static_cast<const Math*>(p.factor);
  if (p.denominator)
    if (const Math denominator = *static_cast<const Math*>(p.denominator); denominator != 0) factor /= denominator;
  if (!p.sum && p.out == p.x && factor == Math(1)) return {};
  In* x = static_cast<In*>(p.x);
  parallel(p.count, kGrainElems, [&](int64_t begin, int64_t end) {
    if (p.sum)
      finish_into_sum(x + begin, static_cast<Math*>(p.sum) + begin, end - begin, factor);
    else
      finish(x + begin, static_cast<Out*>(p.out) + begin, end - begin, factor);
  });
  return {};
}

constexpr int64_t kTileColumns = 512;  // sums of a tile stay in the first-level cache over all rows
constexpr int64_t kPieceRows = 32;  // a long column is a sum of pieces: rounding errors grow with the number of terms

}  // namespace

Status linear_finish_cpu(const LinearFinishParams& p, const Parallel& parallel) {
  const bool widened = p.dtype == Dtype::float32 && size_bytes(p.out_dtype) == 2;
  if (p.dtype != p.out_dtype && !widened)
    return Status::unsupported(std::string("no CPU kernel from ") + name(p.dtype) + " to " + name(p.out_dtype));
  return visit_cpu_dtype(p.out_dtype, [&]<class T>() {
    if constexpr (sizeof(T) == 2)
      if (widened) return run_finish<float, T>(p, parallel);
    return run_finish<T, T>(p, parallel);
  });
}

// Threads divide the columns, so each sum has the order of the rows.
Status column_sums_cpu(const ColumnSumsParams& p, const Parallel& parallel) {
  return visit_cpu_dtype(p.dtype, [&]<class T>() {
    using Math = Arithmetic<T>;
    const T* x = static_cast<const T*>(p.x);
    Math* sums = static_cast<Math*>(p.sums);
    parallel(ceil_div(p.columns, kTileColumns), 1, [&](int64_t begin, int64_t end) {
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
    return Status();
  });
}

}  // namespace warpsmith
