#include "kernels/softmax/softmax.h"

#include <cmath>
#include <type_traits>
#include <vector>

#include "common/visit_dtype.h"
#include "cpu/softmax_loops.h"

namespace warpsmith {
namespace {

// Sums in lanes, in a fixed order.
#define WARPSMITH_SUM(name, term)                                                                          \
  template <class Math>                                                                                    \
  __attribute__((always_inline)) inline double name##_body(const Math* y, const Math* dy, int64_t count) { \
    Math lane[kLanes] = {};                                                                                \
    double sum = 0;                                                                                        \
    int64_t j = 0;                                                                                         \
    for (; j + kLanes <= count; j += kLanes)                                                               \
      for (int k = 0; k < kLanes; ++k) lane[k] += term(j + k);                                             \
    for (; j < count; ++j) lane[0] += term(j);                                                             \
    for (int k = 0; k < kLanes; ++k) sum += lane[k];                                                       \
    return sum;                                                                                            \
  }                                                                                                        \
  WARPSMITH_VECTORIZE double name(const float* y, const float* dy, int64_t count) {                        \
    return name##_body(y, dy, count);                                                                      \
  }                                                                                                        \
  WARPSMITH_VECTORIZE double name(const double* y, const double* dy, int64_t count) {                      \
    return name##_body(y, dy, count);                                                                      \
  }
#define WARPSMITH_PRODUCT(j) y[j] * dy[j]
#define WARPSMITH_GRADIENT(j) (static_cast<void>(y), dy[j])
WARPSMITH_SUM(sum_products, WARPSMITH_PRODUCT)
WARPSMITH_SUM(sum_gradients, WARPSMITH_GRADIENT)

#define WARPSMITH_RESULTS(T, Math)                                                                        \
  WARPSMITH_VECTORIZE void quotients(const Math* e, T* y, int64_t count, Math sum) {                      \
    for (int64_t j = 0; j < count; ++j) y[j] = from_float<T>(e[j] / sum);                                 \
  }                                                                                                       \
  WARPSMITH_VECTORIZE void log_forward(const Math* z, T* y, int64_t count, Math m, Math rest) {           \
    for (int64_t j = 0; j < count; ++j) y[j] = from_float<T>(z[j] - m - rest);                            \
  }                                                                                                       \
  WARPSMITH_VECTORIZE void backward(const Math* y, const Math* dy, T* dx, int64_t count, Math sum) {      \
    for (int64_t j = 0; j < count; ++j) dx[j] = from_float<T>(y[j] * (dy[j] - sum));                      \
  }                                                                                                       \
  WARPSMITH_VECTORIZE void log_backward(const Math* y, const Math* dy, T* dx, int64_t count, Math sum) {  \
    for (int64_t j = 0; j < count; ++j) dx[j] = from_float<T>(dy[j] - math::exp_nonpositive(y[j]) * sum); \
  }
WARPSMITH_RESULTS(float, float)
WARPSMITH_RESULTS(double, double)
WARPSMITH_RESULTS(float16, float)
WARPSMITH_RESULTS(bfloat16, float)

// One row, with its thread's scratch memory. T: storage type of what is read; O: of the result.
template <class T, class O> struct RowWork {
  using Math = Arithmetic<T>;
  const SoftmaxParams& p;
  std::vector<Math> of_x = {}, of_dy = {};  // rows as Math; of_x: the exponentials, too

  const Math* widened(const void* tensor, int64_t offset, std::vector<Math>& room) const {
    const T* from = static_cast<const T*>(tensor) + offset;
    if constexpr (std::is_same_v<T, Math>) return from;
    room.resize(static_cast<size_t>(p.columns));  // allocates once: all rows have one length
    widen(from, room.data(), p.columns, Math(0));
    return room.data();
  }

  void forward(const Math* z, O* y) {
    constexpr Math kInfinity = std::numeric_limits<Math>::infinity();
    const Math m = max_of(z, p.columns), reference = m == -kInfinity ? Math(0) : m;
    Math* e = nullptr;
    if (!p.log) {
      of_x.resize(static_cast<size_t>(p.columns));
      e = of_x.data();
      if constexpr (std::is_same_v<O, Math>) e = y;
    }
    const Math sum = sum_of_pieces<Math>(
        p.columns, [&](int64_t c, int64_t count) { return sum_exp(z + c, e ? e + c : nullptr, count, reference); });
    if (p.log)
      log_forward(z, y, p.columns, m, std::log(sum));
    else
      quotients(e, y, p.columns, sum);
  }

  void run(int64_t r) {
    const Math* x = widened(p.x, r * p.x_stride, of_x);
    O* const result = static_cast<O*>(p.result) + r * p.columns;
    if (!p.dy) return forward(x, result);
    const Math* dy = widened(p.dy, r * p.dy_stride, of_dy);
    const Math sum = sum_of_pieces<Math>(p.columns, [&](int64_t c, int64_t count) {
      return p.log ? sum_gradients(x + c, dy + c, count) : sum_products(x + c, dy + c, count);
    });
    if (p.log)
      log_backward(x, dy, result, p.columns, sum);
    else
      backward(x, dy, result, p.columns, sum);
  }
};

}  // namespace

Status softmax_cpu(const SoftmaxParams& p, const Parallel& parallel) {
  return visit_cpu_dtype(p.dtype, [&]<class T>() {
    return visit_cpu_dtype(p.result_dtype, [&]<class O>() {
      if constexpr (std::is_same_v<Arithmetic<T>, Arithmetic<O>>)
        parallel(p.rows, rows_per_task(p.columns), [&](int64_t begin, int64_t end) {
          RowWork<T, O> work{p};
          for (int64_t r = begin; r < end; ++r) work.run(r);
        });
    });
  });
}

}  // namespace warpsmith
