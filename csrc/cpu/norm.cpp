#include "kernels/norm/norm.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <type_traits>

#include "common/half_host.h"
#include "cpu/dropout_lanes.h"
#include "cpu/norm_loops.h"
#include "cpu/partial_sums.h"

// The CPU body of the norm family. M is the type of the arithmetic, float or double. S is the type in which the loops
// read the normalised rows, T that of the activation. Rows of M and of bfloat16 are read and written in place; rows of
// float16, and sums with a residual, go through scratch memory in M.
namespace warpsmith {
namespace {

constexpr int64_t kGrainElems = 16 * 1024;  // least elements per thread: with fewer, starting it costs more
// Row chunks of dweight and dbias, independent of the number of threads. A chunk has a thread's least work and at least
// kChunkRows rows, because it costs one row of partial sums.
constexpr int64_t kMaxPartialRows = 64, kChunkRows = 8;
// Columns processed in one go (they stay in the first-level cache between steps), and columns summed in one go:
// rounding errors grow with the number of terms per lane, and all have the same sign if all columns are equal.
constexpr int64_t kPieceColumns = 4096, kSumColumns = 512;

template <class S> constexpr bool holds(Dtype dtype) {
  return dtype == (std::is_same_v<S, double>     ? Dtype::float64
                   : std::is_same_v<S, bfloat16> ? Dtype::bfloat16
                                                 : Dtype::float32);
}

// Returns the row itself if it has type S, otherwise a converted copy in `scratch`.
template <class S> const S* read(const void* base, Dtype dtype, int64_t at, int64_t count, S* scratch) {
  if (holds<S>(dtype)) return static_cast<const S*>(base) + at;
  if constexpr (std::is_same_v<S, float>) {
    if (dtype == Dtype::float16)
      widen(static_cast<const float16*>(base) + at, scratch, count);
    else
      widen(static_cast<const bfloat16*>(base) + at, scratch, count);
  }
  return scratch;
}

template <class S> S* destination(void* base, Dtype dtype, int64_t at, S* scratch) {
  return holds<S>(dtype) ? static_cast<S*>(base) + at : scratch;
}

// Stores a row computed in scratch memory. Values that are already in place stay.
template <class S> void write(const S* values, void* base, Dtype dtype, int64_t at, int64_t count) {
  if (holds<S>(dtype)) {
    S* to = static_cast<S*>(base) + at;
    if (to != values) std::copy_n(values, count, to);
  } else if constexpr (std::is_same_v<S, float>) {
    if (dtype == Dtype::float16)
      narrow(values, static_cast<float16*>(base) + at, count);
    else
      narrow(values, static_cast<bfloat16*>(base) + at, count);
  }
}

// A weight or bias in M, plus `added`.
template <class M> struct Columns {
  std::unique_ptr<M[]> own;
  const M* values = nullptr;

  Columns(const void* base, Dtype dtype, int64_t columns, M added) {
    if (!base) return;
    if (holds<M>(dtype) && added == 0) {
      values = static_cast<const M*>(base);
      return;
    }
    own.reset(new M[columns]);
    values = own.get();
    const M* wide = read<M>(base, dtype, 0, columns, own.get());
    for (int64_t c = 0; c < columns; ++c) own[c] = wide[c] + added;
  }

  // Fills in `value` for a weight or bias that is not given.
  void or_all(M value, int64_t columns) {
    if (values) return;
    own.reset(new M[columns]);
    std::fill_n(own.get(), columns, value);
    values = own.get();
  }
};

template <int64_t kColumns = kPieceColumns, class F> void for_pieces(int64_t columns, F&& piece) {
  for (int64_t c = 0; c < columns; c += kColumns) piece(c, std::min(kColumns, columns - c));
}

int64_t rows_per_task(int64_t columns) { return std::max<int64_t>(1, kGrainElems / columns); }

template <class M> using Memory = std::unique_ptr<M[]>;
template <class M> Memory<M> memory(int64_t count) { return Memory<M>(new M[count]); }

// Mean and rstd of a row whose sum or squares overflow float: the results may still be ordinary numbers. A row with an
// infinity or NaN gives NaN in double too.
template <class M, class S> void overflowed(const S* s, int64_t columns, bool layer, double eps, M* mean, M* rstd) {
  double centre = 0, squares = 0;
  for (int64_t c = 0; layer && c < columns; ++c) centre += to_float(s[c]);
  centre /= static_cast<double>(columns);
  for (int64_t c = 0; c < columns; ++c) squares += (to_float(s[c]) - centre) * (to_float(s[c]) - centre);
  *mean = static_cast<M>(centre);
  *rstd = static_cast<M>(1 / std::sqrt(squares / static_cast<double>(columns) + eps));
}

template <class M, class S, class T> void forward(const NormForwardParams& p, const Parallel& parallel) {
  const bool layer = row_of(p.op).layer;
  const Dtype s_dtype = p.residual ? p.residual_dtype : p.dtype;
  parallel(p.rows, rows_per_task(p.columns), [&](int64_t begin, int64_t end) {
    Columns<M> weight(p.weight, p.weight_dtype, p.columns, M(p.weight_offset));
    Columns<M> bias(p.bias, p.weight_dtype, p.columns, 0);
    if (layer) weight.or_all(1, p.columns), bias.or_all(0, p.columns);
    const Memory<S> row = memory<S>(holds<S>(s_dtype) ? 0 : p.columns);
    const int64_t piece = std::min(kPieceColumns, p.columns);
    const Memory<M> pieces = memory<M>(2 * piece);
    const M kept_scale = static_cast<M>(p.dropout.scale);
    M *const first = pieces.get(), *const second = first + piece;
    const Memory<T> y_piece = memory<T>(holds<T>(p.dtype) ? 0 : piece);
    for (int64_t r = begin; r < end; ++r) {
      // The row to normalise: x or residual_out in place, or the scratch row.
      const S* s = row.get();
      if (holds<S>(s_dtype))
        s = p.residual ? static_cast<const S*>(p.residual_out) + r * p.columns
                       : static_cast<const S*>(p.x) + r * p.x_stride;
      double sums = 0;
      for_pieces(p.columns, [&](int64_t c, int64_t count) {
        if (p.residual) {
          const int64_t at = r * p.columns + c;
          const M* x = read(p.x, p.dtype, r * p.x_stride + c, count, first);
          const M* residual = read(p.residual, s_dtype, r * p.residual_stride + c, count, second);
          M* added = destination(p.residual_out, s_dtype, at, first);
          if (layer && !p.dropout.seed && holds<M>(s_dtype)) {
            sums += add_and_sum(x, residual, added, count);
            return;
          }
          if (p.dropout.seed)
            cpu::for_lanes(p.dropout, at, count, [&](const uint16_t* lanes, int64_t i, int64_t n) {
              add_kept(lanes, p.dropout.threshold, kept_scale, x + i, residual + i, added + i, n);
            });
          else
            add(x, residual, added, count);
          write(added, p.residual_out, s_dtype, at, count);
          read(p.residual_out, s_dtype, at, count, row.get() + c);  // the rounded sum, as residual_out holds it
        } else {
          read(p.x, s_dtype, r * p.x_stride + c, count, row.get() + c);
        }
        if (layer)
          sums += sum(s + c, count);
        else
          for_pieces<kSumColumns>(count, [&](int64_t i, int64_t n) { sums += sum_of_squares(s + c + i, n); });
      });
      M mean = 0, total = static_cast<M>(sums);
      if (layer) {
        // The first sum's rounding error grows with the mean, and shows if the mean dwarfs the variance. The sum of the
        // differences from the mean corrects the mean and the squares.
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
        T* y = destination(p.y, p.dtype, r * p.columns + c, y_piece.get());
        if (layer)
          scale_and_shift(s + c, weight.values + c, bias.values + c, y, count, mean, rstd);
        else
          scale(s + c, weight.values ? weight.values + c : nullptr, y, count, rstd);
        write(y, p.y, p.dtype, r * p.columns + c, count);
      });
    }
  });
}

// Adds up the partial rows of a parameter gradient in columns [begin, end).
template <class M> void add_partials(void* partials, int64_t partial_rows, void* out, Dtype dtype, int64_t columns,
                                     int64_t begin, int64_t end) {
  for_pieces(end - begin, [&](int64_t c, int64_t count) {
    M* const rows = static_cast<M*>(partials) + begin + c;
    cpu::add_rows(rows, partial_rows, columns, count);
    write(rows, out, dtype, begin + c, count);
  });
}

template <class M, class S, class T> void backward(const NormBackwardParams& p, const Parallel& parallel) {
  const bool layer = row_of(p.op).layer;
  const int64_t chunks = norm_partial_rows_cpu(p.rows, p.columns);
  const bool together = (p.dx || p.dresidual) && p.dweight && p.dbias;
  // The gradient is rounded straight to its destination.
  const bool direct = holds<T>(p.dtype) && !p.dresidual && !p.dresidual_out && !p.dropout.seed;
  parallel(chunks, 1, [&](int64_t begin, int64_t end) {
    Columns<M> weight(p.weight, p.weight_dtype, p.columns, M(p.weight_offset));
    if (layer) weight.or_all(1, p.columns);
    const auto at_column = [&](int64_t c) { return weight.values ? weight.values + c : nullptr; };
    const Memory<T> dy_row = memory<T>(holds<T>(p.dtype) ? 0 : p.columns);
    const Memory<S> s_row = memory<S>(holds<S>(p.residual_dtype) ? 0 : p.columns);
    const int64_t piece = std::min(kPieceColumns, p.columns);
    const Memory<M> pieces = memory<M>(2 * piece);
    const M kept_scale = static_cast<M>(p.dropout.scale);
    M *const first = pieces.get(), *const second = first + piece;
    cpu::RowSums<M> dweights(p.columns), dbiases(p.columns);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t first_row = p.rows * chunk / chunks, last_row = p.rows * (chunk + 1) / chunks;
      const int64_t at = chunk * p.columns, terms = last_row - first_row;
      dweights.begin(p.dweight ? static_cast<M*>(p.dweight_partials) + at : nullptr, terms);
      dbiases.begin(p.dbias ? static_cast<M*>(p.dbias_partials) + at : nullptr, terms);
      for (int64_t r = first_row; r < last_row; ++r) {
        M *const dweight = dweights.next(), *const dbias = dbiases.next();
        const T* dy = read(p.dy, p.dtype, r * p.dy_stride, p.columns, dy_row.get());
        const S* s = read(p.s, p.residual_dtype, r * p.s_stride, p.columns, s_row.get());
        const M rstd = static_cast<const M*>(p.rstd)[r];
        const M mean = p.mean ? static_cast<const M*>(p.mean)[r] : M(0);
        if (p.dx || p.dresidual) {
          double sum_with_s_hat = 0, sum_alone = 0;
          for_pieces<kSumColumns>(p.columns, [&](int64_t c, int64_t count) {
            M with_s_hat = 0, alone = 0;
            if (together)
              gradient_sums_and_gradients(dy + c, at_column(c), s + c, dweight + c, dbias + c, count, mean, rstd,
                                          &with_s_hat, &alone);
            else
              gradient_sums(layer, dy + c, at_column(c), s + c, count, mean, rstd, &with_s_hat, &alone);
            sum_with_s_hat += with_s_hat, sum_alone += alone;
          });
          const M with_s_hat = static_cast<M>(sum_with_s_hat), alone = static_cast<M>(sum_alone);
          const M a = with_s_hat / M(p.columns);
          // If a sum is infinite, layer_norm's differences mean nothing: the whole row is NaN, as in the formula.
          const M b = layer ? alone / M(p.columns) + (a - a) : M(0);
          for_pieces(p.columns, [&](int64_t c, int64_t count) {
            const int64_t at = r * p.columns + c;
            if constexpr (std::is_same_v<S, T>)
              if (direct) {
                T* dx = static_cast<T*>(p.dx) + at;
                input_gradient(layer, dy + c, at_column(c), s + c, dx, count, mean, rstd, a, b);
                return;
              }
            M* ds = p.dresidual ? destination(p.dresidual, p.residual_dtype, at, first)
                                : destination(p.dx, p.dtype, at, first);
            input_gradient(layer, dy + c, at_column(c), s + c, ds, count, mean, rstd, a, b);
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
        if (dbias) add_to(dy, dbias, p.columns);
      }
      dweights.end(), dbiases.end();
    }
  });
  if (!p.dweight && !p.dbias) return;
  // Both gradients in one parallel loop: starting threads costs more than these sums of a small tensor.
  parallel(p.columns, kGrainElems / chunks, [&](int64_t begin, int64_t end) {
    if (p.dweight) add_partials<M>(p.dweight_partials, chunks, p.dweight, p.weight_dtype, p.columns, begin, end);
    if (p.dbias) add_partials<M>(p.dbias_partials, chunks, p.dbias, p.weight_dtype, p.columns, begin, end);
  });
}

template <class Visit> void visit_types(Dtype dtype, Dtype s_dtype, Visit&& visit) {
  if (dtype == Dtype::float64)
    visit.template operator()<double, double, double>();
  else if (s_dtype == Dtype::bfloat16)
    visit.template operator()<float, bfloat16, bfloat16>();
  else if (dtype == Dtype::bfloat16)
    visit.template operator()<float, float, bfloat16>();
  else
    visit.template operator()<float, float, float>();
}

}  // namespace

int64_t norm_partial_rows_cpu(int64_t rows, int64_t columns) {
  const int64_t least = std::max(kChunkRows, kGrainElems / std::max<int64_t>(1, columns));
  return std::min((rows + least - 1) / least, kMaxPartialRows);
}

Status norm_forward_cpu(const NormForwardParams& p, const Parallel& parallel) {
  const Dtype s_dtype = p.residual ? p.residual_dtype : p.dtype;
  visit_types(p.dtype, s_dtype, [&]<class M, class S, class T>() { forward<M, S, T>(p, parallel); });
  return {};
}

Status norm_backward_cpu(const NormBackwardParams& p, const Parallel& parallel) {
  visit_types(p.dtype, p.residual_dtype, [&]<class M, class S, class T>() { backward<M, S, T>(p, parallel); });
  return {};
}

}  // namespace warpsmith
