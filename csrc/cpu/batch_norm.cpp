#include "kernels/batch_norm/batch_norm.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "common/half_host.h"
#include "common/vectorize.h"
#include "common/visit_dtype.h"

// Sums over slices of rows whose number does not depend on the threads, then over the slices in order, all in double,
// as torch's on the CPU. M is the type of the other arithmetic, float or double.
namespace warpsmith {
namespace {

constexpr int64_t kMaxSlices = 64;
constexpr int64_t kGrainElems = 16 * 1024;  // least elements per thread
constexpr int64_t kBlockElems = 4096;       // of rows that go through each loop together, in the first-level cache

// Free functions, one per dtype: target_clones reaches neither lambdas nor templates. v and g are blocks of rows in M
// without holes between rows.
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
  WARPSMITH_VECTORIZE void load_rows(const T* x, int64_t stride, int64_t rows, int64_t columns, M* v) {                \
    for (int64_t r = 0; r < rows; ++r, x += stride, v += columns)                                                      \
      for (int64_t c = 0; c < columns; ++c) v[c] = to_float(x[c]);                                                     \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void add_rows(const T* x, int64_t stride, int64_t rows, int64_t columns, M* v) {                 \
    for (int64_t r = 0; r < rows; ++r, x += stride, v += columns)                                                      \
      for (int64_t c = 0; c < columns; ++c) v[c] += to_float(x[c]);                                                    \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void normalize_rows(const T* x, int64_t stride, int64_t rows, int64_t columns, const M* unit,    \
                                          const M* center, const M* factor, const M* bias, M* v) {                     \
    for (int64_t r = 0; r < rows; ++r, x += stride, v += columns)                                                      \
      for (int64_t c = 0; c < columns; ++c) v[c] = (to_float(x[c]) * unit[c] - center[c]) * factor[c] + bias[c];       \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void store_all(const M* v, T* y, int64_t count) {                                                \
    for (int64_t i = 0; i < count; ++i) y[i] = from_float<T>(v[i]);                                                    \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void store_relu(const M* v, T* y, int64_t count) {                                               \
    for (int64_t i = 0; i < count; ++i) y[i] = from_float<T>(v[i] <= 0 ? M(0) : v[i]);                                 \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void cut_again(const T* dy, int64_t dy_stride, const T* x, int64_t stride, int64_t rows,         \
                                     int64_t columns, const M* unit, const M* center, const M* factor, const M* bias,  \
                                     M* g) {                                                                           \
    for (int64_t r = 0; r < rows; ++r, x += stride, dy += dy_stride, g += columns)                                     \
      for (int64_t c = 0; c < columns; ++c)                                                                            \
        g[c] = (to_float(x[c]) * unit[c] - center[c]) * factor[c] + bias[c] <= 0 ? M(0) : to_float(dy[c]);             \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void add_gradients(const M* g, const T* x, int64_t stride, int64_t rows, int64_t columns,        \
                                         const M* mean, double* sum, double* product) {                                \
    int64_t r = 0;                                                                                                     \
    for (; r + 2 <= rows; r += 2, x += 2 * stride, g += 2 * columns)                                                   \
      for (int64_t c = 0; c < columns; ++c) {                                                                          \
        const double k = mean[c], g0 = g[c], g1 = g[c + columns];                                                      \
        sum[c] += g0 + g1;                                                                                             \
        product[c] += g0 * (to_float(x[c]) - k) + g1 * (to_float(x[c + stride]) - k);                                  \
      }                                                                                                                \
    for (; r < rows; ++r, x += stride, g += columns)                                                                   \
      for (int64_t c = 0; c < columns; ++c) {                                                                          \
        sum[c] += g[c];                                                                                                \
        product[c] += static_cast<double>(g[c]) * (to_float(x[c]) - static_cast<double>(mean[c]));                     \
      }                                                                                                                \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void gradient_rows(const M* g, const T* x, int64_t stride, int64_t rows, int64_t columns,        \
                                         const M* unit, const M* center, const M* factor, const M* mean_sum,           \
                                         const M* mean_product, T* dx) {                                               \
    for (int64_t r = 0; r < rows; ++r, x += stride, g += columns, dx += columns)                                       \
      for (int64_t c = 0; c < columns; ++c) {                                                                          \
        const M means = mean_sum[c] + (to_float(x[c]) * unit[c] - center[c]) * mean_product[c];                        \
        const M less = mean_product[c] == 0 ? mean_sum[c] : means; /* an infinite x times 0 */                         \
        dx[c] = from_float<T>((g[c] - less) * unit[c] * factor[c]);                                                    \
      }                                                                                                                \
  }
WARPSMITH_LOOPS(float, float)
WARPSMITH_LOOPS(float16, float)
WARPSMITH_LOOPS(bfloat16, float)
WARPSMITH_LOOPS(double, double)
#undef WARPSMITH_LOOPS

// The mask: bytes of V elements each, which the compiler keeps in a vector: it does not see that in a loop over them.
template <class M, class I, int V> struct Lanes {
  typedef M Values __attribute__((vector_size(V * sizeof(M))));
  typedef I Bits __attribute__((vector_size(V * sizeof(M))));
  static constexpr int kWords = V * static_cast<int>(sizeof(M)) / 8;
  static inline __attribute__((always_inline)) void bits_of(Bits& bits) {
    for (int k = 0; k < V; ++k) bits[k] = I(1) << k;
  }
};
#define WARPSMITH_MASK(M, I, V)                                                        \
  WARPSMITH_VECTORIZE void pack_mask_##V(const M* v, uint8_t* mask, int64_t bytes) {   \
    using L = Lanes<M, I, V>;                                                          \
    L::Bits bit;                                                                       \
    L::bits_of(bit);                                                                   \
    for (int64_t i = 0; i < bytes; ++i) {                                              \
      L::Values values;                                                                \
      std::memcpy(&values, v + i * V, sizeof(values));                                 \
      const L::Bits kept = bit & ~(values <= M(0));                                    \
      uint64_t words[L::kWords], all = 0;                                              \
      std::memcpy(words, &kept, sizeof(words));                                        \
      for (int k = 0; k < L::kWords; ++k) all |= words[k];                             \
      mask[i] = static_cast<uint8_t>(all | all >> 32);                                 \
    }                                                                                  \
  }                                                                                    \
  WARPSMITH_VECTORIZE void cut_by_mask_##V(const uint8_t* mask, M* g, int64_t bytes) { \
    using L = Lanes<M, I, V>;                                                          \
    L::Bits bit;                                                                       \
    L::bits_of(bit);                                                                   \
    for (int64_t i = 0; i < bytes; ++i) {                                              \
      L::Bits values, kept = bit & static_cast<I>(mask[i]);                            \
      std::memcpy(&values, g + i * V, sizeof(values));                                 \
      values &= kept != 0;                                                             \
      std::memcpy(g + i * V, &values, sizeof(values));                                 \
    }                                                                                  \
  }
WARPSMITH_MASK(float, int32_t, 8)
WARPSMITH_MASK(float, int32_t, 4)
WARPSMITH_MASK(double, int64_t, 2)
#undef WARPSMITH_MASK
#define WARPSMITH_MASK(M)                                                            \
  WARPSMITH_VECTORIZE void pack_mask_1(const M* v, uint8_t* mask, int64_t bytes) {   \
    for (int64_t i = 0; i < bytes; ++i) mask[i] = v[i] <= 0 ? 0 : 1;                 \
  }                                                                                  \
  WARPSMITH_VECTORIZE void cut_by_mask_1(const uint8_t* mask, M* g, int64_t bytes) { \
    for (int64_t i = 0; i < bytes; ++i) g[i] = mask[i] == 0 ? M(0) : g[i];           \
  }
WARPSMITH_MASK(float)
WARPSMITH_MASK(double)
#undef WARPSMITH_MASK

template <class M> void pack_mask(const M* v, uint8_t* mask, int64_t bytes, int64_t vector) {
  if (vector == 1) return pack_mask_1(v, mask, bytes);
  if constexpr (sizeof(M) == 8)
    pack_mask_2(v, mask, bytes);
  else
    vector == 8 ? pack_mask_8(v, mask, bytes) : pack_mask_4(v, mask, bytes);
}
template <class M> void cut_by_mask(const uint8_t* mask, M* g, int64_t bytes, int64_t vector) {
  if (vector == 1) return cut_by_mask_1(mask, g, bytes);
  if constexpr (sizeof(M) == 8)
    cut_by_mask_2(mask, g, bytes);
  else
    vector == 8 ? cut_by_mask_8(mask, g, bytes) : cut_by_mask_4(mask, g, bytes);
}

WARPSMITH_VECTORIZE void fold(double* __restrict__ into, const double* __restrict__ from, int64_t columns) {
  for (int64_t c = 0; c < columns; ++c) into[c] += from[c];
}

int64_t rows_a_slice(int64_t rows, int64_t columns) {
  return std::max({int64_t{4}, kGrainElems / std::max<int64_t>(1, columns), ceil_div(rows, kMaxSlices)});
}

// Runs work(first row, rows) for blocks of the rows from `begin` to `end`.
template <class F> void for_blocks(int64_t begin, int64_t end, int64_t columns, F&& work) {
  const int64_t most = std::max<int64_t>(1, kBlockElems / columns);
  for (int64_t r = begin; r < end; r += most) work(r, std::min(most, end - r));
}
int64_t block_elems(int64_t columns) { return std::max(columns, kBlockElems); }

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

// Two sums of each column in double: work(first row, end, sum, product) adds those of a slice to zeros.
template <class F> void sum_slices(int64_t rows, int64_t columns, void* partials, double* sum, double* product,
                                   const Parallel& parallel, F&& work) {
  const int64_t each = rows_a_slice(rows, columns), slices = ceil_div(rows, each);
  double *const sums = static_cast<double*>(partials), *const products = sums + slices * columns;
  parallel(slices, 1, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      std::fill_n(sums + s * columns, columns, 0.0);
      std::fill_n(products + s * columns, columns, 0.0);
      work(s * each, std::min(rows, (s + 1) * each), sums + s * columns, products + s * columns);
    }
  });
  for (int64_t s = 0; s < slices; ++s) {
    fold(sum, sums + s * columns, columns);
    fold(product, products + s * columns, columns);
  }
}

// (x - mean) rstd weight as (x unit - center) factor, of a channel each: unit is the power of two above rstd, so that
// differences of values near the largest of the dtype do not overflow, nor products with a weight near it.
template <class M> struct Affine {
  std::vector<M> unit, center, factor;
  bool is_wide = false;  // results may come near the largest value: then in double, of which one step is left

  Affine(const M* mean, const M* rstd, const std::vector<M>& weight)
      : unit(weight.size(), 1), center(weight.size()), factor(weight.size()) {
    for (size_t c = 0; c < weight.size(); ++c) {
      M fraction = rstd[c];
      if (rstd[c] > 0 && std::isfinite(rstd[c])) {
        int exponent = 0;
        fraction = std::frexp(rstd[c], &exponent);
        const int most = std::numeric_limits<M>::max_exponent - 1;
        unit[c] = std::ldexp(M(1), std::min(exponent, most));
        fraction = std::ldexp(fraction, exponent - std::min(exponent, most));
      }
      center[c] = mean[c] * unit[c];
      factor[c] = fraction * weight[c];
      is_wide = is_wide || std::abs(factor[c]) > std::ldexp(M(1), std::numeric_limits<M>::max_exponent - 32);
    }
  }

  // One row, where results are wide.
  template <class T> void apply(const T* x, const std::vector<M>& bias, M* v) const {
    for (size_t c = 0; c < unit.size(); ++c) {
      const double z = static_cast<double>(to_float(x[c])) * unit[c] - center[c];
      v[c] = static_cast<M>(z * factor[c] + bias[c]);
    }
  }
};

template <class T> class Forward {
  using M = Arithmetic<T>;

 public:
  Forward(const BatchNormForwardParams& p, const Parallel& parallel) : p_(p), parallel_(parallel) {
    M *const mean = static_cast<M*>(p.mean), *const rstd = static_cast<M*>(p.rstd);
    const std::vector<M> old_mean = columns_of<M>(p.running_mean, p.running_dtype, p.columns, 0);
    const std::vector<M> old_var = columns_of<M>(p.running_var, p.running_dtype, p.columns, 0);
    double rows = static_cast<double>(p.rows);
    std::vector<double> exact(old_mean.begin(), old_mean.end()), squares(static_cast<size_t>(p.columns), 0);
    if (p.training) statistics(exact.data(), squares.data());
    if (p.of_ranks) rows = merge_ranks(exact.data(), squares.data());
    const bool given = !p.training && !p.of_ranks;
    for (int64_t c = 0; c < p.columns; ++c) {
      mean[c] = static_cast<M>(exact[c]);
      rstd[c] = static_cast<M>(1 / std::sqrt((given ? old_var[c] : squares[c] / rows) + p.eps));
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
    for (int64_t c = 0; p.exact && c < p.columns; ++c) {
      p.exact[c] = exact[c];
      p.exact[p.columns + c] = squares[c] / rows;
      p.exact[2 * p.columns + c] = rows;
    }
    if (p.y) normalize(mean, rstd);
  }

 private:
  // Of all ranks together, in rank order; returns their rows, which are the same in every channel.
  double merge_ranks(double* mean, double* square) const {
    const auto of = [&](int64_t rank, int64_t what) { return p_.of_ranks + (3 * rank + what) * p_.columns; };
    double rows = 0;
    for (int64_t r = 0; r < p_.ranks; ++r) rows += of(r, 2)[0];
    for (int64_t c = 0; c < p_.columns; ++c) {
      mean[c] = square[c] = 0;
      for (int64_t r = 0; r < p_.ranks; ++r) mean[c] += of(r, 2)[c] * of(r, 0)[c];
      mean[c] /= rows;
      for (int64_t r = 0; r < p_.ranks; ++r) {
        const double apart = of(r, 0)[c] - mean[c];
        square[c] += of(r, 2)[c] * (of(r, 1)[c] + apart * apart);
      }
    }
    return rows;
  }

  // Of differences from the first row: sums of squares about 0 would cancel.
  void statistics(double* mean, double* square) const {
    const int64_t columns = p_.columns;
    const T* const x = static_cast<const T*>(p_.x);
    std::vector<double> shift(static_cast<size_t>(columns));
    for (int64_t c = 0; c < columns; ++c) shift[c] = std::isfinite(to_float(x[c])) ? to_float(x[c]) : 0;
    std::fill_n(mean, columns, 0.0);
    sum_slices(p_.rows, columns, p_.partials, mean, square, parallel_,
               [&](int64_t begin, int64_t end, double* sum, double* squares) {
                 add_squares(x + begin * p_.x_stride, p_.x_stride, end - begin, columns, shift.data(), sum, squares);
               });
    for (int64_t c = 0; c < columns; ++c) {
      const double apart = mean[c] / static_cast<double>(p_.rows);
      square[c] -= mean[c] * apart;
      if (square[c] < 0) square[c] = 0;  // NaN stays
      mean[c] = shift[c] + apart;
    }
  }

  void normalize(const M* mean, const M* rstd) const {
    const int64_t columns = p_.columns, vector = batch_norm_vector(columns, sizeof(T));
    const Affine<M> affine(mean, rstd, columns_of<M>(p_.weight, p_.weight_dtype, columns, 1));
    const std::vector<M> bias = columns_of<M>(p_.bias, p_.weight_dtype, columns, 0);
    parallel_(p_.rows, std::max<int64_t>(1, kGrainElems / columns), [&](int64_t begin, int64_t end) {
      std::vector<M> block(static_cast<size_t>(block_elems(columns)));
      M* const v = block.data();
      for_blocks(begin, end, columns, [&](int64_t r, int64_t rows) {
        const T* const x = static_cast<const T*>(p_.x) + r * p_.x_stride;
        if (affine.is_wide)
          for (int64_t i = 0; i < rows; ++i) affine.apply(x + i * p_.x_stride, bias, v + i * columns);
        else
          normalize_rows(x, p_.x_stride, rows, columns, affine.unit.data(), affine.center.data(), affine.factor.data(),
                         bias.data(), v);
        if (p_.residual)
          add_rows(static_cast<const T*>(p_.residual) + r * p_.residual_stride, p_.residual_stride, rows, columns, v);
        T* const y = static_cast<T*>(p_.y) + r * columns;
        p_.relu ? store_relu(v, y, rows * columns) : store_all(v, y, rows * columns);
        if (p_.mask) pack_mask(v, p_.mask + r * (columns / vector), rows * (columns / vector), vector);
      });
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
        rstd_(static_cast<const M*>(p.rstd)),
        affine_(mean_, rstd_, columns_of<M>(p.weight, p.weight_dtype, p.columns, 1)),
        bias_(columns_of<M>(p.bias, p.weight_dtype, p.columns, 0)),
        mean_sum_(static_cast<size_t>(p.columns), 0),
        mean_product_(mean_sum_) {
    if (p.needs_sums()) {
      std::vector<double> sum(static_cast<size_t>(p.columns), 0), product(sum);
      sums(sum.data(), product.data());
      const double rows = static_cast<double>(p.rows);
      for (int64_t c = 0; c < p.columns; ++c) {
        product[c] *= rstd_[c];
        if (p.training) mean_sum_[c] = static_cast<M>(sum[c] / rows);
        if (p.training) mean_product_[c] = static_cast<M>(product[c] / rows * (rstd_[c] / affine_.unit[c]));
      }
      store_columns(sum, p.dbias, p.weight_dtype);
      store_columns(product, p.dweight, p.weight_dtype);
      if (p.exact) std::copy(product.begin(), product.end(), std::copy(sum.begin(), sum.end(), p.exact));
    }
    for (int64_t c = 0; p.sums_of_ranks && c < p.columns; ++c) {
      double sum = 0, product = 0, rows = 0;
      for (int64_t r = 0; r < p.ranks; ++r) {
        sum += p.sums_of_ranks[2 * r * p.columns + c];
        product += p.sums_of_ranks[(2 * r + 1) * p.columns + c];
        rows += p.statistics_of_ranks[(3 * r + 2) * p.columns + c];
      }
      mean_sum_[c] = static_cast<M>(sum / rows);
      mean_product_[c] = static_cast<M>(product / rows) * (rstd_[c] / affine_.unit[c]);
    }
    if (p.dx || p.dresidual) gradients();
  }

 private:
  const T* x_at(int64_t row) const { return static_cast<const T*>(p_.x) + row * p_.x_stride; }

  // g of a block of rows.
  void gradient(int64_t row, int64_t rows, M* g) const {
    const int64_t columns = p_.columns, vector = batch_norm_vector(columns, sizeof(T));
    const T* dy = static_cast<const T*>(p_.dy) + row * p_.dy_stride;
    if (p_.relu && !p_.mask && affine_.is_wide) {
      for (int64_t r = 0; r < rows; ++r) {
        M* const row_g = g + r * columns;
        affine_.apply(x_at(row + r), bias_, row_g);
        for (int64_t c = 0; c < columns; ++c) row_g[c] = row_g[c] <= 0 ? M(0) : to_float(dy[r * p_.dy_stride + c]);
      }
      return;
    }
    if (p_.relu && !p_.mask)
      return cut_again(dy, p_.dy_stride, x_at(row), p_.x_stride, rows, columns, affine_.unit.data(),
                       affine_.center.data(), affine_.factor.data(), bias_.data(), g);
    load_rows(dy, p_.dy_stride, rows, columns, g);
    if (p_.mask) cut_by_mask(p_.mask + row * (columns / vector), g, rows * (columns / vector), vector);
  }

  void sums(double* sum, double* product) const {
    sum_slices(p_.rows, p_.columns, p_.partials, sum, product, parallel_,
               [&](int64_t begin, int64_t end, double* to_sum, double* to_product) {
                 std::vector<M> g(static_cast<size_t>(block_elems(p_.columns)));
                 for_blocks(begin, end, p_.columns, [&](int64_t r, int64_t rows) {
                   gradient(r, rows, g.data());
                   add_gradients(g.data(), x_at(r), p_.x_stride, rows, p_.columns, mean_, to_sum, to_product);
                 });
               });
  }

  void gradients() const {
    const int64_t columns = p_.columns;
    parallel_(p_.rows, std::max<int64_t>(1, kGrainElems / columns), [&](int64_t begin, int64_t end) {
      std::vector<M> g(static_cast<size_t>(block_elems(columns)));
      for_blocks(begin, end, columns, [&](int64_t r, int64_t rows) {
        gradient(r, rows, g.data());
        if (p_.dresidual) store_all(g.data(), static_cast<T*>(p_.dresidual) + r * columns, rows * columns);
        if (p_.dx)
          gradient_rows(g.data(), x_at(r), p_.x_stride, rows, columns, affine_.unit.data(), affine_.center.data(),
                        affine_.factor.data(), mean_sum_.data(), mean_product_.data(),
                        static_cast<T*>(p_.dx) + r * columns);
      });
    });
  }

  const BatchNormBackwardParams& p_;
  const Parallel& parallel_;
  const M *mean_, *rstd_;
  Affine<M> affine_;
  std::vector<M> bias_, mean_sum_, mean_product_;
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
