#include "kernels/activation/relu_squared.h"

#include "cpu/elementwise.h"

namespace warpsmith {
namespace cpu {
namespace {

// Free functions, one a dtype: target_clones reaches neither lambdas nor templates.
#define WARPSMITH_RELU_SQUARED(T)                                                               \
  WARPSMITH_VECTORIZE void forward(const T* x, T* y, int64_t count) {                           \
    using Function = activation::ReluSquared<HostMath<Arithmetic<T>>>;                          \
    for (int64_t i = 0; i < count; ++i) y[i] = from_float<T>(Function(to_float(x[i])).value()); \
  }                                                                                             \
  WARPSMITH_VECTORIZE void backward(const T* dy, const T* x, T* dx, int64_t count) {            \
    using Function = activation::ReluSquared<HostMath<Arithmetic<T>>>;                          \
    for (int64_t i = 0; i < count; ++i)                                                         \
      dx[i] = from_float<T>(Function(to_float(x[i])).times_derivative(to_float(dy[i])));        \
  }
WARPSMITH_RELU_SQUARED(float)
WARPSMITH_RELU_SQUARED(double)
WARPSMITH_RELU_SQUARED(float16)
WARPSMITH_RELU_SQUARED(bfloat16)
#undef WARPSMITH_RELU_SQUARED

}  // namespace
}  // namespace cpu

Status relu_squared_forward_cpu(const ReluSquaredFwdParams& p, const Parallel& parallel) {
  return cpu::for_dtype(p.dtype, [&]<class T>(T) {
    cpu::for_pieces(p.rows, p.columns, p.x_stride == p.columns, parallel, [&](int64_t r, int64_t c, int64_t count) {
      cpu::forward(cpu::offset<const T>(p.x, r * p.x_stride + c), cpu::offset<T>(p.y, r * p.columns + c), count);
    });
  });
}

Status relu_squared_backward_cpu(const ReluSquaredBwdParams& p, const Parallel& parallel) {
  const bool contiguous = p.dy_stride == p.columns && p.x_stride == p.columns;
  return cpu::for_dtype(p.dtype, [&]<class T>(T) {
    cpu::for_pieces(p.rows, p.columns, contiguous, parallel, [&](int64_t r, int64_t c, int64_t count) {
      cpu::backward(cpu::offset<const T>(p.dy, r * p.dy_stride + c), cpu::offset<const T>(p.x, r * p.x_stride + c),
                    cpu::offset<T>(p.dx, r * p.columns + c), count);
    });
  });
}

}  // namespace warpsmith
