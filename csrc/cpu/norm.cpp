#include "kernels/norm/norm.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <type_traits>

#include "common/half_host.h"
#include "cpu/dropout_lanes.h"
#include "cpu/norm_loops.h"
#include "cpu/partial_sums.h"

// The CPU's body of the norm family. All arithmetic is in M, float or double: rows of a 16-bit dtype are widened into
// scratch memory first, others are read and written where they lie.
namespace warpsmith {
namespace {

constexpr int64_t kGrainElems = 16 * 1024;  // a thread takes at least these: below, it costs more than it saves
// Row chunks of dweight and dbias, whatever the number of threads: of a thread's least work and this many rows at
// least, since each costs a row of partial sums.
constexpr int64_t kMaxPartialRows = 64, kChunkRows = 8;
// Columns that are worked on in one go: they stay in the first cache from step to step. And that are summed in one go:
// rounding errors grow with the terms of a lane; where all columns are equal they all have one sign.
constexpr int64_t kPieceColumns = 4096, kSumColumns = 512;

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

template <int64_t kColumns = kPieceColumns, class F> void for_pieces(int64_t columns, F&& piece) {
  for (int64_t c = 0; c < columns; c += kColumns) piece(c, std::min(kColumns, columns - c));
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
      double sums = 0;
      for_pieces(p.columns, [&](int64_t c, int64_t count) {
        if (p.residual) {
          const int64_t at = r * p.columns + c;
          const M* x = read(p.x, p.dtype, r * p.x_stride + c, count, first);
          const M* residual = read(p.residual, s_dtype, r * p.residual_stride + c, count, second);
          M* added = destination(p.residual_out, s_dtype, at, first);
          if (layer && !p.dropout.seed && in_place<M>(s_dtype)) {
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
          read(p.residual_out, s_dtype, at, count, wide_row.get() + c);  // what it holds, rounded
        } else {
          read(p.x, s_dtype, r * p.x_stride + c, count, wide_row.get() + c);
        }
        if (layer)
          sums += sum(s + c, count);
        else
          for_pieces<kSumColumns>(count, [&](int64_t i, int64_t n) { sums += sum_of_squares(s + c + i, n); });
      });
      M mean = 0, total = static_cast<M>(sums);
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

// Adds up the partial rows of a weight's or bias's gradient in columns [begin, end).
template <class M> void add_partials(void* partials, int64_t partial_rows, void* out, Dtype dtype, int64_t columns,
                                     int64_t begin, int64_t end) {
  for_pieces(end - begin, [&](int64_t c, int64_t count) {
    M* const rows = static_cast<M*>(partials) + begin + c;
    cpu::add_rows(rows, partial_rows, columns, count);
    write(rows, out, dtype, begin + c, count);
  });
}

template <class M> void backward(const NormBackwardParams& p, const Parallel& parallel) {
  const bool layer = p.kind == NormKind::layer;
  const int64_t chunks = norm_partial_rows_cpu(p.rows, p.columns);
  const bool together = (p.dx || p.dresidual) && p.dweight && p.dbias;
  parallel(chunks, 1, [&](int64_t begin, int64_t end) {
    const Columns<M> weight(p.weight, p.weight_dtype, p.columns, 1, p.weight ? M(p.weight_offset) : 0);
    const Memory<M> rows = memory<M>(in_place<M>(p.dtype) ? 0 : 2 * p.columns);
    const Memory<M> pieces = memory<M>(2 * kPieceColumns);
    const M kept_scale = static_cast<M>(p.dropout.scale);
    M* const first = pieces.get();
    M* const second = first + kPieceColumns;
    cpu::RowSums<M> dweights(p.columns), dbiases(p.columns);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t first_row = p.rows * chunk / chunks, last_row = p.rows * (chunk + 1) / chunks;
      const int64_t at = chunk * p.columns, terms = last_row - first_row;
      dweights.begin(p.dweight ? static_cast<M*>(p.dweight_partials) + at : nullptr, terms);
      dbiases.begin(p.dbias ? static_cast<M*>(p.dbias_partials) + at : nullptr, terms);
      for (int64_t r = first_row; r < last_row; ++r) {
        M *const dweight = dweights.next(), *const dbias = dbiases.next();
        const M* dy = read(p.dy, p.dtype, r * p.dy_stride, p.columns, rows.get());
        const M* s = read(p.s, p.residual_dtype, r * p.s_stride, p.columns, rows.get() + p.columns);
        const M rstd = static_cast<const M*>(p.rstd)[r];
        const M mean = p.mean ? static_cast<const M*>(p.mean)[r] : M(0);
        if (p.dx || p.dresidual) {
          double sum_with_s_hat = 0, sum_alone = 0;
          for_pieces<kSumColumns>(p.columns, [&](int64_t c, int64_t count) {
            M with_s_hat = 0, alone = 0;
            if (together)
              gradient_sums_and_gradients(dy + c, weight.values + c, s + c, dweight + c, dbias + c, count, mean, rstd,
                                          &with_s_hat, &alone);
            else
              gradient_sums(dy + c, weight.values + c, s + c, count, mean, rstd, &with_s_hat, &alone);
            sum_with_s_hat += with_s_hat, sum_alone += alone;
          });
          const M with_s_hat = static_cast<M>(sum_with_s_hat), alone = static_cast<M>(sum_alone);
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
      dweights.end(), dbiases.end();
    }
  });
  if (!p.dweight && !p.dbias) return;
  // Both in one: that threads come together costs more than these sums of a small tensor.
  parallel(p.columns, kGrainElems / chunks, [&](int64_t begin, int64_t end) {
    if (p.dweight) add_partials<M>(p.dweight_partials, chunks, p.dweight, p.weight_dtype, p.columns, begin, end);
    if (p.dbias) add_partials<M>(p.dbias_partials, chunks, p.dbias, p.weight_dtype, p.columns, begin, end);
  });
}

}  // namespace

int64_t norm_partial_rows_cpu(int64_t rows, int64_t columns) {
  const int64_t least = std::max(kChunkRows, kGrainElems / std::max<int64_t>(1, columns));
  return std::min((rows + least - 1) / least, kMaxPartialRows);
}

Status norm_forward_cpu(const NormForwardParams& p, const Parallel& parallel) {
  p.dtype == Dtype::float64 ? forward<double>(p, parallel) : forward<float>(p, parallel);
  return {};
}

Status norm_backward_cpu(const NormBackwardParams& p, const Parallel& parallel) {
  p.dtype == Dtype::float64 ? backward<double>(p, parallel) : backward<float>(p, parallel);
  return {};
}

}  // namespace warpsmith
