#include "kernels/batch_norm/batch_norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "common/half_host.h"
#include "common/vectorize.h"
#include "common/visit_dtype.h"

// Sums over slices of rows whose number does not depend on the threads, then over the slices in order, all in double,
// as torch's on the CPU. M is the type of the other arithmetic, float or double.
namespace warpsmith {
namespace {

constexpr int64_t kMaxSlices = 64;
constexpr int64_t kPiece = 256;  // channels whose sums stay in the first-level cache
constexpr int64_t kGrainElems = 16 * 1024;

// Free functions, one per dtype: target_clones reaches neither lambdas nor templates.
#define WARPSMITH_LOOPS(T, M)                                                                                          \
  WARPSMITH_VECTORIZE void add_squares(const T* x, int64_t stride, int64_t rows, int64_t columns, const double* shift, \
                                       double* sum, double* square) {                                                  \
    int64_t r = 0;                                                                                                     \
    for (; r + 4 <= rows; r += 4, x += 4 * stride)                                                                     \
      for (int64_t c = 0; c < columns; ++c) {                                                                          \
        const double k = shift[c], d0 = to_float(x[c]) - k, d1 = to_float(x[c + stride]) - k,                          \
                     d2 = to_float(x[c + 2 * stride]) - k, d3 = to_float(x[c + 3 * stride]) - k;                       \
        sum[c] += (d0 + d1) + (d2 + d3);                                                                               \
        square[c] += (d0 * d0 + d1 * d1) + (d2 * d2 + d3 * d3);                                                        \
      }                                                                                                                \
    for (; r < rows; ++r, x += stride)                                                                                 \
      for (int64_t c = 0; c < columns; ++c) {                                                                          \
        const double d = to_float(x[c]) - shift[c];                                                                    \
        sum[c] += d;                                                                                                   \
        square[c] += d * d;                                                                                            \
      }                                                                                                                \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void normalize_row(const T* x, const M* mean, const M* scale, const M* bias, M* v,               \
                                         int64_t columns) {                                                            \
    for (int64_t c = 0; c < columns; ++c) v[c] = (to_float(x[c]) - mean[c]) * scale[c] + bias[c];                      \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void add_row(const T* x, M* v, int64_t columns) {                                                \
    for (int64_t c = 0; c < columns; ++c) v[c] += to_float(x[c]);                                                      \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void store_row(const M* v, T* y, int64_t columns) {                                              \
    for (int64_t c = 0; c < columns; ++c) y[c] = from_float<T>(v[c]);                                                  \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void store_relu(const M* v, T* y, int64_t columns) {                                             \
    for (int64_t c = 0; c < columns; ++c) y[c] = from_float<T>(v[c] <= 0 ? M(0) : v[c]);                               \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void load_row(const T* x, M* v, int64_t columns) {                                               \
    for (int64_t c = 0; c < columns; ++c) v[c] = to_float(x[c]);                                                       \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void cut_row(const T* dy, const M* v, M* g, int64_t columns) {                                   \
    for (int64_t c = 0; c < columns; ++c) g[c] = v[c] <= 0 ? M(0) : to_float(dy[c]);                                   \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void add_gradients(const M* g, const T* x, const M* mean, double* sum, double* product,          \
                                         int64_t columns) {                                                            \
    for (int64_t c = 0; c < columns; ++c) {                                                                            \
      const double gradient = g[c];                                                                                    \
      sum[c] += gradient;                                                                                              \
      product[c] += gradient * (to_float(x[c]) - static_cast<double>(mean[c]));                                        \
    }                                                                                                                  \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void gradient_row(const M* g, const T* x, const M* mean, const M* scale, const M* mean_sum,      \
                                        const M* mean_product, T* dx, int64_t columns) {                               \
    for (int64_t c = 0; c < columns; ++c)                                                                              \
      dx[c] = from_float<T>(scale[c] * (g[c] - mean_sum[c] - (to_float(x[c]) - mean[c]) * mean_product[c]));           \
  }
WARPSMITH_LOOPS(float, float)
WARPSMITH_LOOPS(float16, float)
WARPSMITH_LOOPS(bfloat16, float)
WARPSMITH_LOOPS(double, double)
#undef WARPSMITH_LOOPS

WARPSMITH_VECTORIZE void fold(double* __restrict__ into, const double* __restrict__ from, int64_t columns) {
  for (int64_t c = 0; c < columns; ++c) into[c] += from[c];
}

int64_t rows_a_slice(int64_t rows, int64_t columns) {
  return std::max({int64_t{4}, kGrainElems / std::max<int64_t>(1, columns), ceil_div(rows, kMaxSlices)});
}

// A column's values in M.
template <class M> std::vector<M> columns_of(const void* base, Dtype dtype, int64_t count, M otherwise) {
  std::vector<M> values(static_cast<size_t>(count), otherwise);
  if (!base) return values;
  (void)visit_cpu_dtype(dtype, [&]<class W>() {
    for (int64_t c = 0; c < count; ++c) values[c] = static_cast<M>(to_float(static_cast<const W*>(base)[c]));
  });
  return values;
}
template <class M> void store_columns(const std::vector<M>& values, void* base, Dtype dtype) {
  if (!base) return;
  (void)visit_cpu_dtype(dtype, [&]<class W>() {
    std::transform(values.begin(), values.end(), static_cast<W*>(base),
                   [](M v) { return from_float<W>(static_cast<Arithmetic<W>>(v)); });
  });
}

// A product that is rounded before it goes into a sum, whatever the compiler would make of both.
template <class M> M rounded_product(M a, M b) {
  volatile M product = a * b;
  return product;
}

// Runs work(slice, first row, rows, first column, columns) for all slices and pieces of channels.
template <class F> void for_slices(int64_t rows, int64_t columns, const Parallel& parallel, F&& work) {
  const int64_t each = rows_a_slice(rows, columns), pieces = ceil_div(columns, kPiece);
  parallel(ceil_div(rows, each) * pieces, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t slice = i / pieces, first = i % pieces * kPiece;
      work(slice, slice * each, std::min(each, rows - slice * each), first, std::min(kPiece, columns - first));
    }
  });
}

template <class T> class Forward {
  using M = Arithmetic<T>;

 public:
  Forward(const BatchNormForwardParams& p, const Parallel& parallel) : p_(p), parallel_(parallel) {
    M *const mean = static_cast<M*>(p.mean), *const rstd = static_cast<M*>(p.rstd);
    const std::vector<M> old_mean = columns_of<M>(p.running_mean, p.running_dtype, p.columns, 0);
    const std::vector<M> old_var = columns_of<M>(p.running_var, p.running_dtype, p.columns, 0);
    const double rows = static_cast<double>(p.rows);
    std::vector<double> exact(old_mean.begin(), old_mean.end()), squares(static_cast<size_t>(p.columns), 0);
    if (p.training) statistics(exact.data(), squares.data());
    for (int64_t c = 0; c < p.columns; ++c) {
      mean[c] = static_cast<M>(exact[c]);
      rstd[c] = static_cast<M>(1 / std::sqrt((p.training ? squares[c] / rows : old_var[c]) + p.eps));
    }
    if (p.new_mean) {
      const M keep = static_cast<M>(1 - p.momentum), momentum = static_cast<M>(p.momentum);
      std::vector<M> next(static_cast<size_t>(p.columns));
      for (int64_t c = 0; c < p.columns; ++c)
        next[c] = rounded_product(keep, old_mean[c]) + rounded_product(momentum, mean[c]);
      store_columns(next, p.new_mean, p.running_dtype);
      for (int64_t c = 0; c < p.columns; ++c)
        next[c] =
            rounded_product(keep, old_var[c]) + rounded_product(momentum, static_cast<M>(squares[c] / (rows - 1)));
      store_columns(next, p.new_var, p.running_dtype);
    }
    normalize(mean, rstd);
  }

 private:
  // Of differences from the first row: sums of squares about 0 would cancel.
  void statistics(double* mean, double* square) const {
    const int64_t columns = p_.columns, slices = batch_norm_slices_cpu(p_.rows, columns);
    const T* const x = static_cast<const T*>(p_.x);
    std::vector<double> shift(static_cast<size_t>(columns));
    for (int64_t c = 0; c < columns; ++c) shift[c] = std::isfinite(to_float(x[c])) ? to_float(x[c]) : 0;
    double *const sums = static_cast<double*>(p_.partials), *const squares = sums + slices * columns;
    for_slices(p_.rows, columns, parallel_, [&](int64_t slice, int64_t row, int64_t rows, int64_t c, int64_t count) {
      double *const to_sum = sums + slice * columns + c, *const to_square = squares + slice * columns + c;
      std::fill_n(to_sum, count, 0.0);
      std::fill_n(to_square, count, 0.0);
      add_squares(x + row * p_.x_stride + c, p_.x_stride, rows, count, shift.data() + c, to_sum, to_square);
    });
    std::fill_n(mean, columns, 0.0);
    for (int64_t s = 0; s < slices; ++s) {
      fold(mean, sums + s * columns, columns);
      fold(square, squares + s * columns, columns);
    }
    for (int64_t c = 0; c < columns; ++c) {
      const double apart = mean[c] / static_cast<double>(p_.rows);
      square[c] -= mean[c] * apart;
      if (square[c] < 0) square[c] = 0;  // NaN stays
      mean[c] = shift[c] + apart;
    }
  }

  void normalize(const M* mean, const M* rstd) const {
    const int64_t columns = p_.columns, vector = batch_norm_vector(columns, sizeof(T));
    std::vector<M> scale = columns_of<M>(p_.weight, p_.weight_dtype, columns, 1);
    const std::vector<M> bias = columns_of<M>(p_.bias, p_.weight_dtype, columns, 0);
    for (int64_t c = 0; c < columns; ++c) scale[c] *= rstd[c];
    parallel_(p_.rows, std::max<int64_t>(1, kGrainElems / columns), [&](int64_t begin, int64_t end) {
      std::vector<M> v(static_cast<size_t>(columns));
      for (int64_t r = begin; r < end; ++r) {
        normalize_row(static_cast<const T*>(p_.x) + r * p_.x_stride, mean, scale.data(), bias.data(), v.data(),
                      columns);
        if (p_.residual) add_row(static_cast<const T*>(p_.residual) + r * p_.residual_stride, v.data(), columns);
        T* const y = static_cast<T*>(p_.y) + r * columns;
        p_.relu ? store_relu(v.data(), y, columns) : store_row(v.data(), y, columns);
        if (!p_.mask) continue;
        uint8_t* const mask = p_.mask + r * (columns / vector);
        for (int64_t c = 0; c < columns; c += vector) {
          unsigned kept = 0;
          for (int64_t k = 0; k < vector; ++k) kept |= static_cast<unsigned>(!(v[c + k] <= 0)) << k;
          mask[c / vector] = static_cast<uint8_t>(kept);
        }
      }
    });
  }

  const BatchNormForwardParams& p_;
  const Parallel& parallel_;
};

template <class T> class Backward {
  using M = Arithmetic<T>;

 public:
  Backward(const BatchNormBackwardParams& p, const Parallel& parallel)
      : p_(p),
        parallel_(parallel),
        mean_(static_cast<const M*>(p.mean)),
        scale_(columns_of<M>(p.weight, p.weight_dtype, p.columns, 1)),
        bias_(columns_of<M>(p.bias, p.weight_dtype, p.columns, 0)),
        mean_sum_(static_cast<size_t>(p.columns), 0),
        mean_product_(mean_sum_) {
    const M* const rstd = static_cast<const M*>(p.rstd);
    for (int64_t c = 0; c < p.columns; ++c) scale_[c] *= rstd[c];
    if (p.needs_sums()) {
      std::vector<double> sum(static_cast<size_t>(p.columns), 0), product(sum);
      sums(sum.data(), product.data());
      const double rows = static_cast<double>(p.rows);
      for (int64_t c = 0; c < p.columns; ++c) {
        product[c] *= rstd[c];
        if (p.training) mean_sum_[c] = static_cast<M>(sum[c] / rows);
        if (p.training) mean_product_[c] = static_cast<M>(product[c] * rstd[c] / rows);
      }
      store_columns(sum, p.dbias, p.weight_dtype);
      store_columns(product, p.dweight, p.weight_dtype);
    }
    if (p.dx || p.dresidual) gradients();
  }

 private:
  const T* x_at(int64_t row, int64_t column) const { return static_cast<const T*>(p_.x) + row * p_.x_stride + column; }

  // g of a part of a row.
  void gradient(int64_t row, int64_t first, int64_t count, M* g) const {
    const T* dy = static_cast<const T*>(p_.dy) + row * p_.dy_stride + first;
    if (!p_.relu) return load_row(dy, g, count);
    if (!p_.mask) {
      M v[kPiece];
      normalize_row(x_at(row, first), mean_ + first, scale_.data() + first, bias_.data() + first, v, count);
      return cut_row(dy, v, g, count);
    }
    load_row(dy, g, count);
    const int64_t vector = batch_norm_vector(p_.columns, sizeof(T));
    const uint8_t* const mask = p_.mask + (row * p_.columns + first) / vector;
    for (int64_t c = 0; c < count; c += vector)
      for (int64_t k = 0; k < vector; ++k)
        if (!(mask[c / vector] >> k & 1)) g[c + k] = 0;
  }

  void sums(double* sum, double* product) const {
    const int64_t columns = p_.columns, slices = batch_norm_slices_cpu(p_.rows, columns);
    double *const sums = static_cast<double*>(p_.partials), *const products = sums + slices * columns;
    for_slices(p_.rows, columns, parallel_, [&](int64_t slice, int64_t row, int64_t rows, int64_t c, int64_t count) {
      M g[kPiece];
      double *const to_sum = sums + slice * columns + c, *const to_product = products + slice * columns + c;
      std::fill_n(to_sum, count, 0.0);
      std::fill_n(to_product, count, 0.0);
      for (int64_t r = row; r < row + rows; ++r) {
        gradient(r, c, count, g);
        add_gradients(g, x_at(r, c), mean_ + c, to_sum, to_product, count);
      }
    });
    for (int64_t s = 0; s < slices; ++s) {
      fold(sum, sums + s * columns, columns);
      fold(product, products + s * columns, columns);
    }
  }

  void gradients() const {
    const int64_t columns = p_.columns;
    parallel_(p_.rows, std::max<int64_t>(1, kGrainElems / columns), [&](int64_t begin, int64_t end) {
      M g[kPiece];
      for (int64_t r = begin; r < end; ++r)
        for (int64_t c = 0; c < columns; c += kPiece) {
          const int64_t count = std::min(kPiece, columns - c), at = r * columns + c;
          gradient(r, c, count, g);
          if (p_.dresidual) store_row(g, static_cast<T*>(p_.dresidual) + at, count);
          if (p_.dx)
            gradient_row(g, x_at(r, c), mean_ + c, scale_.data() + c, mean_sum_.data() + c, mean_product_.data() + c,
                         static_cast<T*>(p_.dx) + at, count);
        }
    });
  }

  const BatchNormBackwardParams& p_;
  const Parallel& parallel_;
  const M* mean_;
  std::vector<M> scale_, bias_, mean_sum_, mean_product_;
};

}  // namespace

int64_t batch_norm_slices_cpu(int64_t rows, int64_t columns) { return ceil_div(rows, rows_a_slice(rows, columns)); }

Status batch_norm_forward_cpu(const BatchNormForwardParams& p, const Parallel& parallel) {
  return visit_cpu_dtype(p.dtype, [&]<class T>() { Forward<T>(p, parallel); });
}

Status batch_norm_backward_cpu(const BatchNormBackwardParams& p, const Parallel& parallel) {
  return visit_cpu_dtype(p.dtype, [&]<class T>() { Backward<T>(p, parallel); });
}

}  // namespace warpsmith
