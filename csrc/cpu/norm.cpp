#include "kernels/norm/norm.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <type_traits>

#include "common/half_host.h"
#include "common/vectorize.h"
#include "cpu/dropout_lanes.h"

// The CPU's body of the norm family. All arithmetic is in M, float or double: rows of a 16-bit dtype are widened into
// scratch memory first, others are read and written where they lie.
namespace warpsmith {
namespace {

constexpr int kLanes = 16;                  // independent partial sums: one AVX-512 register of floats
constexpr int kSeries = 4;                  // of them, where a step is so short that it would wait for the one before
constexpr int64_t kGrainElems = 16 * 1024;  // a thread takes at least these: below, it costs more than it saves
// Row chunks of dweight and dbias, whatever the number of threads: of this many rows at least, since each costs a row
// of partial sums.
constexpr int64_t kMaxPartialRows = 64, kChunkRows = 8;
// Columns that are worked on in one go: they stay in the first cache from step to step, and a long row's sum is one of
// pieces, because rounding errors grow with the terms of a lane.
constexpr int64_t kPieceColumns = 4096;

template <class M> M add_lanes(const M* lane) {
  M total = 0;
  for (int k = 0; k < kLanes; ++k) total += lane[k];
  return total;
}

// As a vector type, for a loop with two sums: g++ does not vectorise it over arrays (5 times slower).
template <class M> using Lanes __attribute__((vector_size(kLanes * sizeof(M)))) = M;
template <class M> inline __attribute__((always_inline)) void load(Lanes<M>& to, const M* from) {
  std::memcpy(&to, from, sizeof(to));
}

template <class M> inline __attribute__((always_inline)) void add_series(M* lane, const Lanes<M>* series) {
  const Lanes<M> total = (series[0] + series[1]) + (series[2] + series[3]);
  std::memcpy(lane, &total, sizeof(total));
}

// Free functions, one an arithmetic type: target_clones reaches neither lambdas nor templates.
#define WARPSMITH_NORM_LOOPS(M)                                                                                        \
  WARPSMITH_VECTORIZE M sum(const M* x, int64_t count) {                                                               \
    Lanes<M> series[kSeries] = {}, a;                                                                                  \
    int64_t c = 0;                                                                                                     \
    for (; c + kSeries * kLanes <= count; c += kSeries * kLanes)                                                       \
      for (int k = 0; k < kSeries; ++k) {                                                                              \
        load<M>(a, x + c + k * kLanes);                                                                                \
        series[k] += a;                                                                                                \
      }                                                                                                                \
    for (; c + kLanes <= count; c += kLanes) {                                                                         \
      load<M>(a, x + c);                                                                                               \
      series[0] += a;                                                                                                  \
    }                                                                                                                  \
    M lane[kLanes];                                                                                                    \
    add_series<M>(lane, series);                                                                                       \
    for (; c < count; ++c) lane[c % kLanes] += x[c];                                                                   \
    return add_lanes(lane);                                                                                            \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE M sum_of_squares(const M* x, int64_t count) {                                                    \
    Lanes<M> series[kSeries] = {}, a;                                                                                  \
    int64_t c = 0;                                                                                                     \
    for (; c + kSeries * kLanes <= count; c += kSeries * kLanes)                                                       \
      for (int k = 0; k < kSeries; ++k) {                                                                              \
        load<M>(a, x + c + k * kLanes);                                                                                \
        series[k] += a * a;                                                                                            \
      }                                                                                                                \
    for (; c + kLanes <= count; c += kLanes) {                                                                         \
      load<M>(a, x + c);                                                                                               \
      series[0] += a * a;                                                                                              \
    }                                                                                                                  \
    M lane[kLanes];                                                                                                    \
    add_series<M>(lane, series);                                                                                       \
    for (; c < count; ++c) lane[c % kLanes] += x[c] * x[c];                                                            \
    return add_lanes(lane);                                                                                            \
  }                                                                                                                    \
  /* sum of squares about `mean`, and the sum of the differences from it */                                            \
  WARPSMITH_VECTORIZE M sum_about(const M* x, int64_t count, M mean, M* differences) {                                 \
    Lanes<M> squares[kSeries] = {}, plain[kSeries] = {}, a;                                                            \
    int64_t c = 0;                                                                                                     \
    for (; c + kSeries * kLanes <= count; c += kSeries * kLanes)                                                       \
      for (int k = 0; k < kSeries; ++k) {                                                                              \
        load<M>(a, x + c + k * kLanes);                                                                                \
        a -= mean;                                                                                                     \
        squares[k] += a * a;                                                                                           \
        plain[k] += a;                                                                                                 \
      }                                                                                                                \
    for (; c + kLanes <= count; c += kLanes) {                                                                         \
      load<M>(a, x + c);                                                                                               \
      a -= mean;                                                                                                       \
      squares[0] += a * a;                                                                                             \
      plain[0] += a;                                                                                                   \
    }                                                                                                                  \
    M sums[2][kLanes];                                                                                                 \
    add_series<M>(sums[0], squares);                                                                                   \
    add_series<M>(sums[1], plain);                                                                                     \
    for (; c < count; ++c) {                                                                                           \
      const M d = x[c] - mean;                                                                                         \
      sums[0][c % kLanes] += d * d;                                                                                    \
      sums[1][c % kLanes] += d;                                                                                        \
    }                                                                                                                  \
    *differences += add_lanes(sums[1]);                                                                                \
    return add_lanes(sums[0]);                                                                                         \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void add(const M* x, const M* y, M* out, int64_t count) {                                        \
    for (int64_t c = 0; c < count; ++c) out[c] = x[c] + y[c];                                                          \
  }                                                                                                                    \
  /* add, and the sum of what it gives */                                                                              \
  WARPSMITH_VECTORIZE M add_and_sum(const M* x, const M* y, M* out, int64_t count) {                                   \
    Lanes<M> lane = {};                                                                                                \
    int64_t c = 0;                                                                                                     \
    for (; c + kLanes <= count; c += kLanes) {                                                                         \
      Lanes<M> a, b;                                                                                                   \
      load<M>(a, x + c);                                                                                               \
      load<M>(b, y + c);                                                                                               \
      a += b;                                                                                                          \
      std::memcpy(out + c, &a, sizeof(a));                                                                             \
      lane += a;                                                                                                       \
    }                                                                                                                  \
    for (; c < count; ++c) lane[c % kLanes] += out[c] = x[c] + y[c];                                                   \
    M sums[kLanes];                                                                                                    \
    std::memcpy(sums, &lane, sizeof(lane));                                                                            \
    return add_lanes(sums);                                                                                            \
  }                                                                                                                    \
  /* y plus scale * x of the elements whose lane is kept; and these alone */                                           \
  WARPSMITH_VECTORIZE void add_kept(const uint16_t* lanes, uint32_t threshold, M scale, const M* x, const M* y,        \
                                    M* out, int64_t count) {                                                           \
    for (int64_t c = 0; c < count; ++c) {                                                                              \
      const M sum = x[c] * scale + y[c];                                                                               \
      out[c] = lanes[c] >= threshold ? sum : y[c];                                                                     \
    }                                                                                                                  \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void take_kept(const uint16_t* lanes, uint32_t threshold, M scale, const M* x, M* out,           \
                                     int64_t count) {                                                                  \
    for (int64_t c = 0; c < count; ++c) {                                                                              \
      const M kept = x[c] * scale;                                                                                     \
      out[c] = lanes[c] >= threshold ? kept : M(0);                                                                    \
    }                                                                                                                  \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void scale(const M* s, const M* weight, M* y, int64_t count, M rstd) {                           \
    for (int64_t c = 0; c < count; ++c) y[c] = s[c] * rstd * weight[c];                                                \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void scale_and_shift(const M* s, const M* weight, const M* bias, M* y, int64_t count, M mean,    \
                                           M rstd) {                                                                   \
    for (int64_t c = 0; c < count; ++c) y[c] = (s[c] - mean) * rstd * weight[c] + bias[c];                             \
  }                                                                                                                    \
  /* g = dy * weight: sums of g * s_hat and of g */                                                                    \
  WARPSMITH_VECTORIZE void gradient_sums(const M* dy, const M* weight, const M* s, int64_t count, M mean, M rstd,      \
                                         M* with_s_hat, M* alone) {                                                    \
    Lanes<M> lane = {}, plain = {};                                                                                    \
    int64_t c = 0;                                                                                                     \
    for (; c + kLanes <= count; c += kLanes) {                                                                         \
      Lanes<M> g, w, s_hat;                                                                                            \
      load<M>(g, dy + c);                                                                                              \
      load<M>(w, weight + c);                                                                                          \
      load<M>(s_hat, s + c);                                                                                           \
      g *= w;                                                                                                          \
      s_hat = (s_hat - mean) * rstd;                                                                                   \
      lane += g * s_hat;                                                                                               \
      plain += g;                                                                                                      \
    }                                                                                                                  \
    for (; c < count; ++c) {                                                                                           \
      const M g = dy[c] * weight[c];                                                                                   \
      lane[c % kLanes] += g * ((s[c] - mean) * rstd);                                                                  \
      plain[c % kLanes] += g;                                                                                          \
    }                                                                                                                  \
    M sums[2][kLanes];                                                                                                 \
    std::memcpy(sums[0], &lane, sizeof(lane));                                                                         \
    std::memcpy(sums[1], &plain, sizeof(plain));                                                                       \
    *with_s_hat += add_lanes(sums[0]);                                                                                 \
    *alone += add_lanes(sums[1]);                                                                                      \
  }                                                                                                                    \
  /* gradient_sums, and the gradients of weight and bias in the same pass */                                           \
  WARPSMITH_VECTORIZE void gradient_sums_and_gradients(const M* dy, const M* weight, const M* s, M* dweight, M* dbias, \
                                                       int64_t count, M mean, M rstd, M* with_s_hat, M* alone) {       \
    Lanes<M> lane = {}, plain = {};                                                                                    \
    int64_t c = 0;                                                                                                     \
    for (; c + kLanes <= count; c += kLanes) {                                                                         \
      Lanes<M> d, w, s_hat, dw, db;                                                                                    \
      load<M>(d, dy + c);                                                                                              \
      load<M>(w, weight + c);                                                                                          \
      load<M>(s_hat, s + c);                                                                                           \
      load<M>(dw, dweight + c);                                                                                        \
      load<M>(db, dbias + c);                                                                                          \
      s_hat = (s_hat - mean) * rstd;                                                                                   \
      dw += d * s_hat;                                                                                                 \
      db += d;                                                                                                         \
      std::memcpy(dweight + c, &dw, sizeof(dw));                                                                       \
      std::memcpy(dbias + c, &db, sizeof(db));                                                                         \
      d *= w;                                                                                                          \
      lane += d * s_hat;                                                                                               \
      plain += d;                                                                                                      \
    }                                                                                                                  \
    for (; c < count; ++c) {                                                                                           \
      const M s_hat = (s[c] - mean) * rstd, g = dy[c] * weight[c];                                                     \
      dweight[c] += dy[c] * s_hat;                                                                                     \
      dbias[c] += dy[c];                                                                                               \
      lane[c % kLanes] += g * s_hat;                                                                                   \
      plain[c % kLanes] += g;                                                                                          \
    }                                                                                                                  \
    M sums[2][kLanes];                                                                                                 \
    std::memcpy(sums[0], &lane, sizeof(lane));                                                                         \
    std::memcpy(sums[1], &plain, sizeof(plain));                                                                       \
    *with_s_hat += add_lanes(sums[0]);                                                                                 \
    *alone += add_lanes(sums[1]);                                                                                      \
  }                                                                                                                    \
  /* rstd * (g - s_hat * a - b): of terms that cancel, none is larger than it must be */                               \
  WARPSMITH_VECTORIZE void input_gradient(const M* dy, const M* weight, const M* s, M* ds, int64_t count, M mean,      \
                                          M rstd, M a, M b) {                                                          \
    for (int64_t c = 0; c < count; ++c) ds[c] = rstd * (dy[c] * weight[c] - (s[c] - mean) * rstd * a - b);             \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void add_weight_gradient(const M* dy, const M* s, M* dweight, int64_t count, M mean, M rstd) {   \
    for (int64_t c = 0; c < count; ++c) dweight[c] += dy[c] * ((s[c] - mean) * rstd);                                  \
  }
WARPSMITH_NORM_LOOPS(float)
WARPSMITH_NORM_LOOPS(double)
#undef WARPSMITH_NORM_LOOPS

#define WARPSMITH_NORM_CONVERSIONS(T)                                        \
  WARPSMITH_VECTORIZE void widen(const T* from, float* to, int64_t count) {  \
    for (int64_t c = 0; c < count; ++c) to[c] = to_float(from[c]);           \
  }                                                                          \
  WARPSMITH_VECTORIZE void narrow(const float* from, T* to, int64_t count) { \
    for (int64_t c = 0; c < count; ++c) to[c] = from_float<T>(from[c]);      \
  }
WARPSMITH_NORM_CONVERSIONS(float16)
WARPSMITH_NORM_CONVERSIONS(bfloat16)
#undef WARPSMITH_NORM_CONVERSIONS

// A tensor of M itself, which is used where it lies, or of a 16-bit dtype beside M = float, which goes through scratch.
template <class M> bool in_place(Dtype dtype) { return size_bytes(dtype) == sizeof(M); }

template <class M> const M* read(const void* base, Dtype dtype, int64_t at, int64_t count, M* scratch) {
  if (in_place<M>(dtype)) return static_cast<const M*>(base) + at;
  if constexpr (std::is_same_v<M, float>) {
    if (dtype == Dtype::float16)
      widen(static_cast<const float16*>(base) + at, scratch, count);
    else
      widen(static_cast<const bfloat16*>(base) + at, scratch, count);
  }
  return scratch;
}

template <class M> M* destination(void* base, Dtype dtype, int64_t at, M* scratch) {
  return in_place<M>(dtype) ? static_cast<M*>(base) + at : scratch;
}

// Stores what lies in scratch; values that lie at their destination stay.
template <class M> void write(const M* values, void* base, Dtype dtype, int64_t at, int64_t count) {
  if (in_place<M>(dtype)) {
    M* to = static_cast<M*>(base) + at;
    if (to != values) std::copy_n(values, count, to);
  } else if constexpr (std::is_same_v<M, float>) {
    if (dtype == Dtype::float16)
      narrow(values, static_cast<float16*>(base) + at, count);
    else
      narrow(values, static_cast<bfloat16*>(base) + at, count);
  }
}

// A weight or bias in M, plus `added`; `otherwise` everywhere when there is none.
template <class M> struct Columns {
  std::unique_ptr<M[]> own;
  const M* values;

  Columns(const void* base, Dtype dtype, int64_t columns, M otherwise, M added) {
    if (base && in_place<M>(dtype) && added == 0) {
      values = static_cast<const M*>(base);
      return;
    }
    own.reset(new M[columns]);
    values = own.get();
    if (!base) {
      std::fill_n(own.get(), columns, otherwise);
    } else {
      const M* wide = read<M>(base, dtype, 0, columns, own.get());
      for (int64_t c = 0; c < columns; ++c) own[c] = wide[c] + added;
    }
  }
};

template <class F> void for_pieces(int64_t columns, F&& piece) {
  for (int64_t c = 0; c < columns; c += kPieceColumns) piece(c, std::min(kPieceColumns, columns - c));
}

int64_t rows_per_task(int64_t columns) { return std::max<int64_t>(1, kGrainElems / columns); }

template <class M> using Memory = std::unique_ptr<M[]>;
template <class M> Memory<M> memory(int64_t count) { return Memory<M>(new M[count]); }

// Mean and rstd of a row whose sum or squares have left the range of float: with float's largest numbers they do though
// the results are ordinary ones. A row with an infinity or a NaN has its NaN in double too.
template <class M> void overflowed(const M* s, int64_t columns, bool layer, double eps, M* mean, M* rstd) {
  double centre = 0, squares = 0;
  for (int64_t c = 0; layer && c < columns; ++c) centre += s[c];
  centre /= static_cast<double>(columns);
  for (int64_t c = 0; c < columns; ++c) squares += (s[c] - centre) * (s[c] - centre);
  *mean = static_cast<M>(centre);
  *rstd = static_cast<M>(1 / std::sqrt(squares / static_cast<double>(columns) + eps));
}

template <class M> void forward(const NormForwardParams& p, const Parallel& parallel) {
  const bool layer = p.kind == NormKind::layer;
  const Dtype s_dtype = p.residual ? p.residual_dtype : p.dtype;
  parallel(p.rows, rows_per_task(p.columns), [&](int64_t begin, int64_t end) {
    const Columns<M> weight(p.weight, p.weight_dtype, p.columns, 1, p.weight ? M(p.weight_offset) : 0);
    const Columns<M> bias(p.bias, p.weight_dtype, layer ? p.columns : 0, 0, 0);
    const Memory<M> wide_row = memory<M>(in_place<M>(s_dtype) ? 0 : p.columns);
    const Memory<M> pieces = memory<M>(2 * kPieceColumns);
    const M kept_scale = static_cast<M>(p.dropout.scale);
    M* const first = pieces.get();
    M* const second = first + kPieceColumns;
    for (int64_t r = begin; r < end; ++r) {
      // The row that is normalised, in M: x or residual_out where they lie, or the scratch row.
      const M* s = wide_row.get();
      if (in_place<M>(s_dtype))
        s = p.residual ? static_cast<const M*>(p.residual_out) + r * p.columns
                       : static_cast<const M*>(p.x) + r * p.x_stride;
      M total = 0;
      for_pieces(p.columns, [&](int64_t c, int64_t count) {
        if (p.residual) {
          const int64_t at = r * p.columns + c;
          const M* x = read(p.x, p.dtype, r * p.x_stride + c, count, first);
          const M* residual = read(p.residual, s_dtype, r * p.residual_stride + c, count, second);
          M* added = destination(p.residual_out, s_dtype, at, first);
          if (layer && !p.dropout.seed && in_place<M>(s_dtype)) {
            total += add_and_sum(x, residual, added, count);
            return;
          }
          if (p.dropout.seed)
            cpu::for_lanes(p.dropout, at, count, [&](const uint16_t* lanes, int64_t i, int64_t n) {
              add_kept(lanes, p.dropout.threshold, kept_scale, x + i, residual + i, added + i, n);
            });
          else
            add(x, residual, added, count);
          write(added, p.residual_out, s_dtype, at, count);
          read(p.residual_out, s_dtype, at, count, wide_row.get() + c);  // what it holds, rounded
        } else {
          read(p.x, s_dtype, r * p.x_stride + c, count, wide_row.get() + c);
        }
        total += layer ? sum(s + c, count) : sum_of_squares(s + c, count);
      });
      M mean = 0;
      if (layer) {
        // The first sum's rounding errors are of the size of the mean, and show where it dwarfs the variance: what is
        // left about it corrects it, and with it the squares.
        mean = total / M(p.columns);
        M differences = 0;
        total = 0;
        for_pieces(p.columns, [&](int64_t c, int64_t count) { total += sum_about(s + c, count, mean, &differences); });
        const M correction = differences / M(p.columns);
        mean += correction;
        total = std::max(total - differences * correction, M(0));
      }
      M rstd = M(1) / std::sqrt(total / M(p.columns) + M(p.eps));
      if (!std::isfinite(total)) overflowed(s, p.columns, layer, p.eps, &mean, &rstd);
      if (p.mean) static_cast<M*>(p.mean)[r] = mean;
      if (p.rstd) static_cast<M*>(p.rstd)[r] = rstd;
      for_pieces(p.columns, [&](int64_t c, int64_t count) {
        M* y = destination(p.y, p.dtype, r * p.columns + c, first);
        if (layer)
          scale_and_shift(s + c, weight.values + c, bias.values + c, y, count, mean, rstd);
        else
          scale(s + c, weight.values + c, y, count, rstd);
        write(y, p.y, p.dtype, r * p.columns + c, count);
      });
    }
  });
}

// Adds up the partial rows of a weight's or bias's gradient, in their order.
template <class M> void add_partials(const void* partials, int64_t partial_rows, void* out, Dtype dtype,
                                     int64_t columns, const Parallel& parallel) {
  const M* rows = static_cast<const M*>(partials);
  parallel(columns, kGrainElems / kMaxPartialRows, [&](int64_t begin, int64_t end) {
    const Memory<M> scratch = memory<M>(kPieceColumns);
    for_pieces(end - begin, [&](int64_t c, int64_t count) {
      std::copy_n(rows + begin + c, count, scratch.get());
      for (int64_t r = 1; r < partial_rows; ++r)
        add(scratch.get(), rows + r * columns + begin + c, scratch.get(), count);
      write(scratch.get(), out, dtype, begin + c, count);
    });
  });
}

template <class M> void backward(const NormBackwardParams& p, const Parallel& parallel) {
  const bool layer = p.kind == NormKind::layer;
  const int64_t chunks = norm_partial_rows_cpu(p.rows);
  const bool together = (p.dx || p.dresidual) && p.dweight && p.dbias;
  parallel(chunks, 1, [&](int64_t begin, int64_t end) {
    const Columns<M> weight(p.weight, p.weight_dtype, p.columns, 1, p.weight ? M(p.weight_offset) : 0);
    const Memory<M> rows = memory<M>(in_place<M>(p.dtype) ? 0 : 2 * p.columns);
    const Memory<M> pieces = memory<M>(2 * kPieceColumns);
    const M kept_scale = static_cast<M>(p.dropout.scale);
    M* const first = pieces.get();
    M* const second = first + kPieceColumns;
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      M* const dweight = p.dweight ? static_cast<M*>(p.dweight_partials) + chunk * p.columns : nullptr;
      M* const dbias = p.dbias ? static_cast<M*>(p.dbias_partials) + chunk * p.columns : nullptr;
      if (dweight) std::fill_n(dweight, p.columns, M(0));
      if (dbias) std::fill_n(dbias, p.columns, M(0));
      for (int64_t r = p.rows * chunk / chunks; r < p.rows * (chunk + 1) / chunks; ++r) {
        const M* dy = read(p.dy, p.dtype, r * p.dy_stride, p.columns, rows.get());
        const M* s = read(p.s, p.residual_dtype, r * p.s_stride, p.columns, rows.get() + p.columns);
        const M rstd = static_cast<const M*>(p.rstd)[r];
        const M mean = p.mean ? static_cast<const M*>(p.mean)[r] : M(0);
        if (p.dx || p.dresidual) {
          M with_s_hat = 0, alone = 0;
          for_pieces(p.columns, [&](int64_t c, int64_t count) {
            if (together)
              gradient_sums_and_gradients(dy + c, weight.values + c, s + c, dweight + c, dbias + c, count, mean, rstd,
                                          &with_s_hat, &alone);
            else
              gradient_sums(dy + c, weight.values + c, s + c, count, mean, rstd, &with_s_hat, &alone);
          });
          const M a = with_s_hat / M(p.columns);
          // Where a sum is infinite the layer's differences mean nothing: NaN in the whole row, as their formula has
          // it.
          const M b = layer ? alone / M(p.columns) + (a - a) : M(0);
          for_pieces(p.columns, [&](int64_t c, int64_t count) {
            const int64_t at = r * p.columns + c;
            M* ds = p.dresidual ? destination(p.dresidual, p.residual_dtype, at, first)
                                : destination(p.dx, p.dtype, at, first);
            input_gradient(dy + c, weight.values + c, s + c, ds, count, mean, rstd, a, b);
            if (p.dresidual_out) {
              const int64_t from = r * p.dresidual_out_stride + c;
              add(ds, read(p.dresidual_out, p.residual_dtype, from, count, second), ds, count);
            }
            if (p.dresidual) write(ds, p.dresidual, p.residual_dtype, at, count);
            if (!p.dx) return;
            if (p.dropout.seed) {
              M* dx = destination(p.dx, p.dtype, at, second);
              cpu::for_lanes(p.dropout, at, count, [&](const uint16_t* lanes, int64_t i, int64_t n) {
                take_kept(lanes, p.dropout.threshold, kept_scale, ds + i, dx + i, n);
              });
              ds = dx;
            }
            write(ds, p.dx, p.dtype, at, count);
          });
        }
        if (together) continue;
        if (dweight) add_weight_gradient(dy, s, dweight, p.columns, mean, rstd);
        if (dbias) add(dbias, dy, dbias, p.columns);
      }
    }
  });
  if (p.dweight) add_partials<M>(p.dweight_partials, chunks, p.dweight, p.weight_dtype, p.columns, parallel);
  if (p.dbias) add_partials<M>(p.dbias_partials, chunks, p.dbias, p.weight_dtype, p.columns, parallel);
}

}  // namespace

int64_t norm_partial_rows_cpu(int64_t rows) { return std::min((rows + kChunkRows - 1) / kChunkRows, kMaxPartialRows); }

Status norm_forward_cpu(const NormForwardParams& p, const Parallel& parallel) {
  p.dtype == Dtype::float64 ? forward<double>(p, parallel) : forward<float>(p, parallel);
  return {};
}

Status norm_backward_cpu(const NormBackwardParams& p, const Parallel& parallel) {
  p.dtype == Dtype::float64 ? backward<double>(p, parallel) : backward<float>(p, parallel);
  return {};
}

}  // namespace warpsmith
