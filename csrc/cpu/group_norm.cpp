#include "kernels/group_norm/group_norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/elementwise.h"

// Sums over slices of a sample's pixels whose number does not depend on the threads, then over the slices in order, all
// in double. M is the type of the other arithmetic, float or double.
namespace warpsmith {
namespace {

constexpr int64_t kMaxSlices = 64;          // of a sample
constexpr int64_t kGrainElems = 16 * 1024;  // least elements per thread

// Free functions, one per dtype: target_clones reaches neither lambdas nor templates. One row of channels each.
#define WARPSMITH_LOOPS(T, M)                                                                                         \
  WARPSMITH_VECTORIZE void add_squares(const T* x, int64_t channels, const double* shift, double* sum,                \
                                       double* square) {                                                              \
    for (int64_t c = 0; c < channels; ++c) {                                                                          \
      const double d = to_float(x[c]) - shift[c];                                                                     \
      sum[c] += d;                                                                                                    \
      square[c] += d * d;                                                                                             \
    }                                                                                                                 \
  }                                                                                                                   \
  WARPSMITH_VECTORIZE void normalize_row(const T* x, int64_t channels, const M* mean, const M* rstd, const M* weight, \
                                         const M* bias, T* y) {                                                       \
    for (int64_t c = 0; c < channels; ++c)                                                                            \
      y[c] = from_float<T>((to_float(x[c]) - mean[c]) * rstd[c] * weight[c] + bias[c]);                               \
  }                                                                                                                   \
  WARPSMITH_VECTORIZE void normalize_silu_row(const T* x, int64_t channels, const M* mean, const M* rstd,             \
                                              const M* weight, const M* bias, T* y) {                                 \
    using Silu = activation::Silu<cpu::HostMath<M>>;                                                                  \
    for (int64_t c = 0; c < channels; ++c)                                                                            \
      y[c] = from_float<T>(Silu((to_float(x[c]) - mean[c]) * rstd[c] * weight[c] + bias[c]).value());                 \
  }                                                                                                                   \
  WARPSMITH_VECTORIZE void gradient_row(const T* dy, int64_t channels, M* g) {                                        \
    for (int64_t c = 0; c < channels; ++c) g[c] = to_float(dy[c]);                                                    \
  }                                                                                                                   \
  WARPSMITH_VECTORIZE void gradient_silu_row(const T* dy, const T* x, int64_t channels, const M* mean, const M* rstd, \
                                             const M* weight, const M* bias, M* g) {                                  \
    using Silu = activation::Silu<cpu::HostMath<M>>;                                                                  \
    for (int64_t c = 0; c < channels; ++c)                                                                            \
      g[c] = Silu((to_float(x[c]) - mean[c]) * rstd[c] * weight[c] + bias[c]).times_derivative(to_float(dy[c]));      \
  }                                                                                                                   \
  WARPSMITH_VECTORIZE void add_gradients(const M* g, const T* x, int64_t channels, const M* mean, const M* rstd,      \
                                         double* sum, double* product) {                                              \
    for (int64_t c = 0; c < channels; ++c) {                                                                          \
      sum[c] += g[c];                                                                                                 \
      product[c] += static_cast<double>(g[c]) * ((to_float(x[c]) - static_cast<double>(mean[c])) * rstd[c]);          \
    }                                                                                                                 \
  }                                                                                                                   \
  WARPSMITH_VECTORIZE void input_gradient_row(const M* g, const T* x, int64_t channels, const M* mean, const M* rstd, \
                                              const M* weight, const M* mean_sum, const M* mean_product, T* dx) {     \
    for (int64_t c = 0; c < channels; ++c)                                                                            \
      dx[c] = from_float<T>(                                                                                          \
          (g[c] * weight[c] - mean_sum[c] - (to_float(x[c]) - mean[c]) * rstd[c] * mean_product[c]) * rstd[c]);       \
  }
WARPSMITH_LOOPS(float, float)
WARPSMITH_LOOPS(float16, float)
WARPSMITH_LOOPS(bfloat16, float)
WARPSMITH_LOOPS(double, double)
#undef WARPSMITH_LOOPS

int64_t pixels_a_slice(const GroupNormShape& p) {
  return std::max({int64_t{1}, kGrainElems / std::max<int64_t>(1, p.channels), ceil_div(p.pixels, kMaxSlices)});
}
int64_t slices_a_sample(const GroupNormShape& p) { return ceil_div(p.pixels, pixels_a_slice(p)); }

template <class M> std::vector<M> channels_of(const void* base, Dtype dtype, int64_t count, M otherwise) {
  std::vector<M> values(static_cast<size_t>(count), otherwise);
  if (!base) return values;
  (void)visit_cpu_dtype(dtype, [&]<class W>() {
    for (int64_t c = 0; c < count; ++c) values[c] = static_cast<M>(to_float(static_cast<const W*>(base)[c]));
  });
  return values;
}

// What all loops take of a sample's channels: the statistics of their groups, and the parameters.
template <class M> struct Channels {
  std::vector<M> mean, rstd;
  Channels(const GroupNormShape& p, const M* means, const M* rstds, int64_t sample)
      : mean(static_cast<size_t>(p.channels)), rstd(mean) {
    for (int64_t c = 0; c < p.channels; ++c) {
      mean[c] = means[sample * p.groups + c / p.group()];
      rstd[c] = rstds[sample * p.groups + c / p.group()];
    }
  }
};

// Runs work(sample, first row, end, slice) over slices of samples.
template <class F> void for_slices(const GroupNormShape& p, const Parallel& parallel, F&& work) {
  const int64_t each = pixels_a_slice(p), slices = slices_a_sample(p);
  parallel(p.samples * slices, 1, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      const int64_t first = s % slices * each, row = s / slices * p.pixels;
      work(s / slices, row + first, row + std::min(first + each, p.pixels), s);
    }
  });
}

template <class T> void forward(const GroupNormForwardParams& p, const Parallel& parallel) {
  using M = Arithmetic<T>;
  const int64_t channels = p.channels, slices = slices_a_sample(p), group = p.group();
  const T* const x = static_cast<const T*>(p.x);
  M *const mean = static_cast<M*>(p.mean), *const rstd = static_cast<M*>(p.rstd);
  std::vector<double> sums(static_cast<size_t>(2 * p.samples * slices * channels), 0.0);
  const auto shift_of = [&](int64_t sample, int64_t g) {  // sums of squares about 0 would cancel
    const double first = to_float(x[sample * p.pixels * p.x_stride + g * group]);
    return std::isfinite(first) ? first : 0.0;
  };
  for_slices(p, parallel, [&](int64_t sample, int64_t begin, int64_t end, int64_t slice) {
    std::vector<double> shift(static_cast<size_t>(channels));
    for (int64_t c = 0; c < channels; ++c) shift[c] = shift_of(sample, c / group);
    double* const sum = sums.data() + 2 * slice * channels;
    for (int64_t r = begin; r < end; ++r) add_squares(x + r * p.x_stride, channels, shift.data(), sum, sum + channels);
  });
  const double values = static_cast<double>(p.pixels) * static_cast<double>(group);
  for (int64_t i = 0; i < p.samples * p.groups; ++i) {
    const int64_t sample = i / p.groups, first = i % p.groups * group;
    double sum = 0, square = 0;
    for (int64_t s = sample * slices; s < (sample + 1) * slices; ++s)
      for (int64_t c = first; c < first + group; ++c) {
        sum += sums[2 * s * channels + c];
        square += sums[(2 * s + 1) * channels + c];
      }
    const double apart = sum / values;
    double var = (square - sum * apart) / values;
    if (var < 0) var = 0;  // NaN stays
    mean[i] = static_cast<M>(shift_of(sample, i % p.groups) + apart);
    rstd[i] = static_cast<M>(1 / std::sqrt(var + p.eps));
  }
  const std::vector<M> weight = channels_of<M>(p.weight, p.weight_dtype, channels, 1);
  const std::vector<M> bias = channels_of<M>(p.bias, p.weight_dtype, channels, 0);
  for_slices(p, parallel, [&](int64_t sample, int64_t begin, int64_t end, int64_t) {
    const Channels<M> of(p, mean, rstd, sample);
    const auto normalize = [&](auto* loop) {
      for (int64_t r = begin; r < end; ++r)
        loop(x + r * p.x_stride, channels, of.mean.data(), of.rstd.data(), weight.data(), bias.data(),
             static_cast<T*>(p.y) + r * channels);
    };
    using Loop = void(const T*, int64_t, const M*, const M*, const M*, const M*, T*);
    p.silu ? normalize(static_cast<Loop*>(normalize_silu_row)) : normalize(static_cast<Loop*>(normalize_row));
  });
}

template <class T> void backward(const GroupNormBackwardParams& p, const Parallel& parallel) {
  using M = Arithmetic<T>;
  const int64_t channels = p.channels, slices = slices_a_sample(p), all = p.samples * slices, group = p.group();
  const T *const x = static_cast<const T*>(p.x), *const dy = static_cast<const T*>(p.dy);
  const M *const mean = static_cast<const M*>(p.mean), *const rstd = static_cast<const M*>(p.rstd);
  const std::vector<M> weight = channels_of<M>(p.weight, p.weight_dtype, channels, 1);
  const std::vector<M> bias = channels_of<M>(p.bias, p.weight_dtype, channels, 0);
  double *const products = static_cast<double*>(p.partials), *const sums = products + all * channels;
  const auto gradient = [&](int64_t r, const Channels<M>& of, M* g) {
    if (!p.silu) return gradient_row(dy + r * p.dy_stride, channels, g);
    gradient_silu_row(dy + r * p.dy_stride, x + r * p.x_stride, channels, of.mean.data(), of.rstd.data(), weight.data(),
                      bias.data(), g);
  };
  for_slices(p, parallel, [&](int64_t sample, int64_t begin, int64_t end, int64_t slice) {
    const Channels<M> of(p, mean, rstd, sample);
    std::vector<M> g(static_cast<size_t>(channels));
    std::fill_n(sums + slice * channels, channels, 0.0);
    std::fill_n(products + slice * channels, channels, 0.0);
    for (int64_t r = begin; r < end; ++r) {
      gradient(r, of, g.data());
      add_gradients(g.data(), x + r * p.x_stride, channels, of.mean.data(), of.rstd.data(), sums + slice * channels,
                    products + slice * channels);
    }
  });
  const auto total = [&](const double* of, void* to) {
    if (!to) return;
    (void)visit_cpu_dtype(p.weight_dtype, [&]<class W>() {
      for (int64_t c = 0; c < channels; ++c) {
        double sum = 0;
        for (int64_t s = 0; s < all; ++s) sum += of[s * channels + c];
        static_cast<W*>(to)[c] = from_float<W>(static_cast<Arithmetic<W>>(sum));
      }
    });
  };
  total(products, p.dweight);
  total(sums, p.dbias);
  if (!p.dx) return;
  const double values = static_cast<double>(p.pixels) * static_cast<double>(group);
  for_slices(p, parallel, [&](int64_t sample, int64_t begin, int64_t end, int64_t) {
    const Channels<M> of(p, mean, rstd, sample);
    std::vector<M> g(static_cast<size_t>(channels)), mean_sum(g), mean_product(g);
    for (int64_t first = 0; first < channels; first += group) {
      double sum = 0, product = 0;
      for (int64_t s = sample * slices; s < (sample + 1) * slices; ++s)
        for (int64_t c = first; c < first + group; ++c) {
          sum += weight[c] * sums[s * channels + c];
          product += weight[c] * products[s * channels + c];
        }
      const double undefined =
          (sum - sum) + (product - product);  // 0, or NaN where a sum is infinite: so is all dx then
      std::fill_n(mean_sum.data() + first, group, static_cast<M>(sum / values + undefined));
      std::fill_n(mean_product.data() + first, group, static_cast<M>(product / values + undefined));
    }
    for (int64_t r = begin; r < end; ++r) {
      gradient(r, of, g.data());
      input_gradient_row(g.data(), x + r * p.x_stride, channels, of.mean.data(), of.rstd.data(), weight.data(),
                         mean_sum.data(), mean_product.data(), static_cast<T*>(p.dx) + r * channels);
    }
  });
}

}  // namespace

int64_t group_norm_slices_cpu(const GroupNormShape& p) { return p.samples * slices_a_sample(p); }

Status group_norm_forward_cpu(const GroupNormForwardParams& p, const Parallel& parallel) {
  return visit_cpu_dtype(p.dtype, [&]<class T>() { forward<T>(p, parallel); });
}

Status group_norm_backward_cpu(const GroupNormBackwardParams& p, const Parallel& parallel) {
  return visit_cpu_dtype(p.dtype, [&]<class T>() { backward<T>(p, parallel); });
}

}  // namespace warpsmith
