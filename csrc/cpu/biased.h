#pragma once
#include <vector>

#include "cpu/elementwise.h"
#include "cpu/partial_sums.h"
#include "kernels/activation/biased.h"
#include "kernels/activation/functions.h"

// The CPU body of the biased activations. WARPSMITH_BIASED_CPU(name, F), inside an anonymous namespace, defines the
// struct `name`, whose biased_forward_cpu and biased_backward_cpu run it, for F of functions.h.
namespace warpsmith::cpu {

// Loops over one row: free functions, because target_clones reaches neither lambdas nor templates.
#define WARPSMITH_BIASED_LOOPS_(name, F, T, W)                                                                      \
  WARPSMITH_VECTORIZE void name##_forward(const T* x, const W* bias, T* y, int64_t count) {                         \
    using Math = HostMath<Arithmetic<T>>;                                                                           \
    for (int64_t i = 0; i < count; ++i)                                                                             \
      y[i] = from_float<T>(activation::F<Math>(to_float(x[i]) + to_float(bias[i])).value());                        \
  }                                                                                                                 \
  WARPSMITH_VECTORIZE void name##_backward(const T* dy, const T* x, const W* bias, T* dx, Arithmetic<T>* sum,       \
                                           int64_t count) {                                                         \
    using Math = HostMath<Arithmetic<T>>;                                                                           \
    for (int64_t i = 0; i < count; ++i) {                                                                           \
      const auto g = activation::F<Math>(to_float(x[i]) + to_float(bias[i])).times_derivative(to_float(dy[i]));     \
      sum[i] += g;                                                                                                  \
      dx[i] = from_float<T>(g);                                                                                     \
    }                                                                                                               \
  }                                                                                                                 \
  WARPSMITH_VECTORIZE void name##_dx(const T* dy, const T* x, const W* bias, T* dx, int64_t count) {                \
    using Math = HostMath<Arithmetic<T>>;                                                                           \
    for (int64_t i = 0; i < count; ++i)                                                                             \
      dx[i] =                                                                                                       \
          from_float<T>(activation::F<Math>(to_float(x[i]) + to_float(bias[i])).times_derivative(to_float(dy[i]))); \
  }

#define WARPSMITH_BIASED_CPU(name, F)                                                                    \
  WARPSMITH_BIASED_LOOPS_(name, F, float, float)                                                         \
  WARPSMITH_BIASED_LOOPS_(name, F, double, double)                                                       \
  WARPSMITH_BIASED_LOOPS_(name, F, float16, float16)                                                     \
  WARPSMITH_BIASED_LOOPS_(name, F, float16, float)                                                       \
  WARPSMITH_BIASED_LOOPS_(name, F, bfloat16, bfloat16)                                                   \
  WARPSMITH_BIASED_LOOPS_(name, F, bfloat16, float)                                                      \
  struct name {                                                                                          \
    template <class T, class W> static void forward(const T* x, const W* bias, T* y, int64_t n) {        \
      name##_forward(x, bias, y, n);                                                                     \
    }                                                                                                    \
    template <class T, class W>                                                                          \
    static void backward(const T* dy, const T* x, const W* bias, T* dx, Arithmetic<T>* sum, int64_t n) { \
      if (sum)                                                                                           \
        name##_backward(dy, x, bias, dx, sum, n);                                                        \
      else                                                                                               \
        name##_dx(dy, x, bias, dx, n);                                                                   \
    }                                                                                                    \
  };

// Calls visit(T, W) with the storage types of x and the bias.
template <class Visit> Status for_dtypes(Dtype dtype, Dtype bias_dtype, Visit&& visit) {
  const bool wide = bias_dtype == Dtype::float32;
  switch (dtype) {
    case Dtype::float32: visit(float{}, float{}); return {};
    case Dtype::float64: visit(double{}, double{}); return {};
    case Dtype::float16: wide ? visit(float16{}, float{}) : visit(float16{}, float16{}); return {};
    case Dtype::bfloat16: wide ? visit(bfloat16{}, float{}) : visit(bfloat16{}, bfloat16{}); return {};
  }
  return Status::unsupported("no CPU kernel for this dtype");
}

template <class Loops> Status biased_forward_cpu(const BiasedFwdParams& p, const Parallel& parallel) {
  return for_dtypes(p.dtype, p.bias_dtype, [&]<class T, class W>(T, W) {
    const T* x = static_cast<const T*>(p.x);
    T* y = static_cast<T*>(p.y);
    parallel(p.rows, std::max<int64_t>(1, kElementwiseGrain / p.columns), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        Loops::forward(x + r * p.x_stride, static_cast<const W*>(p.bias), y + r * p.columns, p.columns);
    });
  });
}

template <class Loops> Status biased_backward_cpu(const BiasedBwdParams& p, const Parallel& parallel) {
  return for_dtypes(p.dtype, p.bias_dtype, [&]<class T, class W>(T, W) {
    using Math = Arithmetic<T>;
    const T *dy = static_cast<const T*>(p.dy), *x = static_cast<const T*>(p.x);
    T* dx = static_cast<T*>(p.dx);
    Math* partials = static_cast<Math*>(p.partials);
    const int64_t chunks = biased_partial_rows_cpu(p.rows, p.columns);  // whatever the number of threads
    parallel(chunks, 1, [&](int64_t begin, int64_t end) {
      // dx is made whether wanted or not: a loop of its own for dbias alone would contract additions that this one does
      // not, and so give other bits.
      std::vector<T> unwanted(dx ? 0 : static_cast<size_t>(p.columns));
      RowSums<Math> sums(p.columns);
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        const int64_t first = p.rows * chunk / chunks, last = p.rows * (chunk + 1) / chunks;
        sums.begin(partials ? partials + chunk * p.columns : nullptr, last - first);
        for (int64_t r = first; r < last; ++r)
          Loops::backward(dy + r * p.dy_stride, x + r * p.x_stride, static_cast<const W*>(p.bias),
                          dx ? dx + r * p.columns : unwanted.data(), sums.next(), p.columns);
        sums.end();
      }
    });
    if (partials)
      add_partials(partials, chunks, p.columns, static_cast<W*>(p.dbias), kElementwiseGrain / chunks, parallel);
  });
}

}  // namespace warpsmith::cpu
