#include "kernels/norm/rms_norm.h"

#include <algorithm>
#include <cmath>

#include "common/half_host.h"
#include "common/vectorize.h"
#include "cpu/partial_sums.h"

namespace warpsmith {
namespace {

constexpr int kLanes = 16;  // independent partial sums: one AVX-512 register of floats
constexpr int64_t kGrainElems =
    16 * 1024;  // elements a thread takes at least: below this a thread costs more than it saves

// Columns that are summed in one go: a row is a sum of pieces, because rounding errors grow with the terms of a lane;
// where all columns are equal they all have one sign.
constexpr int64_t kPieceColumns = 256;

template <class Math, class Piece> Math sum_of_pieces(int64_t columns, Piece&& piece) {
  double total = 0;
  for (int64_t c = 0; c < columns; c += kPieceColumns) total += piece(c, std::min(kPieceColumns, columns - c));
  return static_cast<Math>(total);
}

template <class Math> inline __attribute__((always_inline)) Math add_lanes(Math* lane) {
  for (int count = kLanes / 2; count > 0; count /= 2)
    for (int k = 0; k < count; ++k) lane[k] += lane[k + count];
  return lane[0];
}

// Free functions, one a dtype: target_clones reaches neither lambdas nor templates. T, W: storage of x and of the
// weight.
#define WARPSMITH_RMS_NORM(T, W, Math)                                                                                 \
  WARPSMITH_VECTORIZE Math sum_of_squares(const T* x, const W*, int64_t columns) {                                     \
    Math lane[kLanes] = {};                                                                                            \
    int64_t c = 0;                                                                                                     \
    for (; c + kLanes <= columns; c += kLanes)                                                                         \
      for (int k = 0; k < kLanes; ++k) lane[k] += Math(to_float(x[c + k])) * Math(to_float(x[c + k]));                 \
    for (; c < columns; ++c) lane[c % kLanes] += Math(to_float(x[c])) * Math(to_float(x[c]));                          \
    return add_lanes(lane);                                                                                            \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void scale(const T* x, const W* weight, T* y, int64_t columns, Math rstd, Math offset) {         \
    if (weight)                                                                                                        \
      for (int64_t c = 0; c < columns; ++c)                                                                            \
        y[c] = from_float<T>(to_float(x[c]) * rstd * (Math(to_float(weight[c])) + offset));                            \
    else                                                                                                               \
      for (int64_t c = 0; c < columns; ++c) y[c] = from_float<T>(to_float(x[c]) * rstd);                               \
  }                                                                                                                    \
  /* sum of g * x_hat, g = dy * (weight + offset) */                                                                   \
  WARPSMITH_VECTORIZE Math dot(const T* dy, const T* x, const W* weight, int64_t columns, Math rstd, Math offset) {    \
    Math lane[kLanes] = {};                                                                                            \
    int64_t c = 0;                                                                                                     \
    if (weight) {                                                                                                      \
      for (; c + kLanes <= columns; c += kLanes)                                                                       \
        for (int k = 0; k < kLanes; ++k)                                                                               \
          lane[k] += Math(to_float(dy[c + k])) * (Math(to_float(weight[c + k])) + offset) *                            \
                     (Math(to_float(x[c + k])) * rstd);                                                                \
      for (; c < columns; ++c)                                                                                         \
        lane[c % kLanes] +=                                                                                            \
            Math(to_float(dy[c])) * (Math(to_float(weight[c])) + offset) * (Math(to_float(x[c])) * rstd);              \
    } else {                                                                                                           \
      for (; c + kLanes <= columns; c += kLanes)                                                                       \
        for (int k = 0; k < kLanes; ++k) lane[k] += Math(to_float(dy[c + k])) * (Math(to_float(x[c + k])) * rstd);     \
      for (; c < columns; ++c) lane[c % kLanes] += Math(to_float(dy[c])) * (Math(to_float(x[c])) * rstd);              \
    }                                                                                                                  \
    return add_lanes(lane);                                                                                            \
  }                                                                                                                    \
  /* dx = rstd * (g - x_hat * mean), g = dy * (weight + offset): of terms that cancel, none is larger than it must be  \
   */                                                                                                                  \
  WARPSMITH_VECTORIZE void input_gradient(const T* dy, const T* x, const W* weight, T* dx, int64_t columns, Math rstd, \
                                          Math mean, Math offset) {                                                    \
    if (weight)                                                                                                        \
      for (int64_t c = 0; c < columns; ++c)                                                                            \
        dx[c] = from_float<T>(rstd * (Math(to_float(dy[c])) * (Math(to_float(weight[c])) + offset) -                   \
                                      Math(to_float(x[c])) * rstd * mean));                                            \
    else                                                                                                               \
      for (int64_t c = 0; c < columns; ++c)                                                                            \
        dx[c] = from_float<T>(rstd * (Math(to_float(dy[c])) - Math(to_float(x[c])) * rstd * mean));                    \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void add_weight_gradient(const T* dy, const T* x, const W*, Math* partial, int64_t columns,      \
                                               Math rstd) {                                                            \
    for (int64_t c = 0; c < columns; ++c) partial[c] += Math(to_float(dy[c])) * (Math(to_float(x[c])) * rstd);         \
  }
WARPSMITH_RMS_NORM(float, float, float)
WARPSMITH_RMS_NORM(double, double, double)
WARPSMITH_RMS_NORM(float16, float16, float)
WARPSMITH_RMS_NORM(float16, float, float)
WARPSMITH_RMS_NORM(bfloat16, bfloat16, float)
WARPSMITH_RMS_NORM(bfloat16, float, float)
#undef WARPSMITH_RMS_NORM

int64_t rows_per_task(int64_t columns) { return std::max<int64_t>(1, kGrainElems / columns); }

template <class T, class W, class Math> void forward(const NormForwardParams& p, const Parallel& parallel) {
  const T* x = static_cast<const T*>(p.x);
  const W* weight = static_cast<const W*>(p.weight);
  T* y = static_cast<T*>(p.y);
  Math* rstd = static_cast<Math*>(p.rstd);
  parallel(p.rows, rows_per_task(p.columns), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* row = x + r * p.x_stride;
      const Math sum = sum_of_pieces<Math>(
          p.columns, [&](int64_t c, int64_t count) { return sum_of_squares(row + c, weight, count); });
      const Math mean = sum / Math(p.columns);
      const Math s = Math(1) / std::sqrt(mean + Math(p.eps));
      if (rstd) rstd[r] = s;
      scale(row, weight, y + r * p.columns, p.columns, s, Math(p.weight_offset));
    }
  });
}

template <class T, class W, class Math> void backward(const NormBackwardParams& p, const Parallel& parallel) {
  const T* dy = static_cast<const T*>(p.dy);
  const T* x = static_cast<const T*>(p.s);
  const W* weight = static_cast<const W*>(p.weight);
  const Math* rstd = static_cast<const Math*>(p.rstd);
  T* dx = static_cast<T*>(p.dx);
  Math* partials = static_cast<Math*>(p.dweight_partials);
  const int64_t chunks = norm_partial_rows_cpu(p.rows, p.columns);
  parallel(chunks, 1, [&](int64_t begin, int64_t end) {
    cpu::RowSums<Math> sums(p.columns);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t first = p.rows * chunk / chunks, last = p.rows * (chunk + 1) / chunks;
      sums.begin(partials ? partials + chunk * p.columns : nullptr, last - first);
      for (int64_t r = first; r < last; ++r) {
        const T* dy_row = dy + r * p.dy_stride;
        const T* x_row = x + r * p.s_stride;
        if (dx) {
          const Math sum = sum_of_pieces<Math>(p.columns, [&](int64_t c, int64_t count) {
            return dot(dy_row + c, x_row + c, weight ? weight + c : nullptr, count, rstd[r], Math(p.weight_offset));
          });
          const Math mean = sum / Math(p.columns);
          input_gradient(dy_row, x_row, weight, dx + r * p.columns, p.columns, rstd[r], mean, Math(p.weight_offset));
        }
        if (partials) add_weight_gradient(dy_row, x_row, weight, sums.next(), p.columns, rstd[r]);
      }
      sums.end();
    }
  });
  if (partials)
    cpu::add_partials(partials, chunks, p.columns, static_cast<W*>(p.dweight), kGrainElems / chunks, parallel);
}

// Calls `visit` with the storage types of the activation and the weight, and the type of the arithmetic.
template <class Visit> Status dispatch(Dtype dtype, Dtype weight_dtype, Visit&& visit) {
  const bool fp32_weight = weight_dtype == Dtype::float32;
  switch (dtype) {
    case Dtype::float32: visit(float{}, float{}, float{}); return {};
    case Dtype::float64: visit(double{}, double{}, double{}); return {};
    case Dtype::float16:
      fp32_weight ? visit(float16{}, float{}, float{}) : visit(float16{}, float16{}, float{});
      return {};
    case Dtype::bfloat16:
      fp32_weight ? visit(bfloat16{}, float{}, float{}) : visit(bfloat16{}, bfloat16{}, float{});
      return {};
  }
  return Status::unsupported("no CPU kernel for this dtype");
}

}  // namespace

Status rms_norm_forward_cpu(const NormForwardParams& p, const Parallel& parallel) {
  return dispatch(p.dtype, p.weight_dtype,
                  [&]<class T, class W, class Math>(T, W, Math) { forward<T, W, Math>(p, parallel); });
}

Status rms_norm_backward_cpu(const NormBackwardParams& p, const Parallel& parallel) {
  return dispatch(p.dtype, p.weight_dtype,
                  [&]<class T, class W, class Math>(T, W, Math) { backward<T, W, Math>(p, parallel); });
}

}  // namespace warpsmith
