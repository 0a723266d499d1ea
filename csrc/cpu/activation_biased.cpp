#include <vector>

#include "common/activation_functions.h"
#include "cpu/elementwise.h"
#include "cpu/partial_sums.h"
#include "kernels/activation/activation.h"

// The CPU body of the biased activations.
namespace warpsmith {
namespace cpu {
namespace {

// Loops over one row: free functions, because target_clones reaches neither lambdas nor templates.
#define WARPSMITH_LOOPS_OF(name, F, T, W)                                                                           \
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

// Defines the struct `name` with the loops for all storage types.
#define WARPSMITH_LOOPS(name, F)                                                                         \
  WARPSMITH_LOOPS_OF(name, F, float, float)                                                              \
  WARPSMITH_LOOPS_OF(name, F, double, double)                                                            \
  WARPSMITH_LOOPS_OF(name, F, float16, float16)                                                          \
  WARPSMITH_LOOPS_OF(name, F, float16, float)                                                            \
  WARPSMITH_LOOPS_OF(name, F, bfloat16, bfloat16)                                                        \
  WARPSMITH_LOOPS_OF(name, F, bfloat16, float)                                                           \
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

#define WARPSMITH_USE(op, F) WARPSMITH_LOOPS(op##_##F, F)
#define WARPSMITH_ROW(op, F, flag) WARPSMITH_EACH_##flag(op, F, WARPSMITH_USE)
WARPSMITH_BIASED_OPS(WARPSMITH_ROW)
#undef WARPSMITH_USE
#undef WARPSMITH_ROW

// The bias, or zeros in its place.
template <class W> class BiasRow {
 public:
  BiasRow(const void* bias, int64_t columns)
      : zeros_(bias ? 0 : static_cast<size_t>(columns)), data_(bias ? static_cast<const W*>(bias) : zeros_.data()) {}
  const W* data() const { return data_; }

 private:
  std::vector<W> zeros_;
  const W* data_;
};

template <class Loops> Status biased_forward(const BiasedFwdParams& p, const Parallel& parallel) {
  return visit_cpu_dtypes(p.dtype, p.bias_dtype, [&]<class T, class W>() {
    const T* x = static_cast<const T*>(p.x);
    T* y = static_cast<T*>(p.y);
    const BiasRow<W> bias(p.bias, p.columns);
    parallel(p.rows, std::max<int64_t>(1, kElementwiseGrain / p.columns), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        Loops::forward(x + r * p.x_stride, bias.data(), y + r * p.columns, p.columns);
    });
    return Status();
  });
}

template <class Loops> Status biased_backward(const BiasedBwdParams& p, const Parallel& parallel) {
  return visit_cpu_dtypes(p.dtype, p.bias_dtype, [&]<class T, class W>() {
    using Math = Arithmetic<T>;
    const T *dy = static_cast<const T*>(p.dy), *x = static_cast<const T*>(p.x);
    T* dx = static_cast<T*>(p.dx);
    const BiasRow<W> bias(p.bias, p.columns);
    Math* partials = static_cast<Math*>(p.partials);
    const int64_t chunks = biased_partial_rows_cpu(p.rows, p.columns);  // independent of the number of threads
    parallel(chunks, 1, [&](int64_t begin, int64_t end) {
      // dx is computed even if it is not wanted: a separate loop for dbias alone would contract other additions and so
      // give other bits.
      std::vector<T> unwanted(dx ? 0 : static_cast<size_t>(p.columns));
      RowSums<Math> sums(p.columns);
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        const int64_t first = p.rows * chunk / chunks, last = p.rows * (chunk + 1) / chunks;
        sums.begin(partials ? partials + chunk * p.columns : nullptr, last - first);
        for (int64_t r = first; r < last; ++r)
          Loops::backward(dy + r * p.dy_stride, x + r * p.x_stride, bias.data(),
                          dx ? dx + r * p.columns : unwanted.data(), sums.next(), p.columns);
        sums.end();
      }
    });
    if (partials)
      add_partials(partials, chunks, p.columns, static_cast<W*>(p.dbias), kElementwiseGrain / chunks, parallel);
    return Status();
  });
}

}  // namespace
}  // namespace cpu

Status biased_forward_cpu(Biased op, const BiasedFwdParams& p, const Parallel& parallel) {
#define WARPSMITH_USE(op, F) cpu::biased_forward<cpu::op##_##F>(p, parallel)
#define WARPSMITH_CASE(op, F, flag) \
  case Biased::op: return WARPSMITH_SELECT_##flag(op, F, p.tanh, WARPSMITH_USE);
  switch (op) { WARPSMITH_BIASED_OPS(WARPSMITH_CASE) }
#undef WARPSMITH_USE
  return Status::unsupported("no such biased op");
}

Status biased_backward_cpu(Biased op, const BiasedBwdParams& p, const Parallel& parallel) {
#define WARPSMITH_USE(op, F) cpu::biased_backward<cpu::op##_##F>(p, parallel)
  switch (op) { WARPSMITH_BIASED_OPS(WARPSMITH_CASE) }
  return Status::unsupported("no such biased op");
}

}  // namespace warpsmith
