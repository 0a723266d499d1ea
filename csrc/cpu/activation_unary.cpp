#include "common/activation_functions.h"
#include "cpu/dropout_lanes.h"
#include "cpu/elementwise.h"
#include "kernels/activation/activation.h"

// The CPU bodies of the unary activations and of dropout_add.
namespace warpsmith {
namespace cpu {
namespace {

// Loops of one function and storage type: free functions, because target_clones reaches neither lambdas nor templates.
#define WARPSMITH_LOOPS_OF(name, F, T)                                                          \
  WARPSMITH_VECTORIZE void name##_forward(const T* x, T* y, int64_t count) {                    \
    using Function = activation::F<HostMath<Arithmetic<T>>>;                                    \
    for (int64_t i = 0; i < count; ++i) y[i] = from_float<T>(Function(to_float(x[i])).value()); \
  }                                                                                             \
  WARPSMITH_VECTORIZE void name##_backward(const T* dy, const T* x, T* dx, int64_t count) {     \
    using Function = activation::F<HostMath<Arithmetic<T>>>;                                    \
    for (int64_t i = 0; i < count; ++i)                                                         \
      dx[i] = from_float<T>(Function(to_float(x[i])).times_derivative(to_float(dy[i])));        \
  }
#define WARPSMITH_ROW(op, F, flag)   \
  WARPSMITH_LOOPS_OF(op, F, float)   \
  WARPSMITH_LOOPS_OF(op, F, double)  \
  WARPSMITH_LOOPS_OF(op, F, float16) \
  WARPSMITH_LOOPS_OF(op, F, bfloat16)
WARPSMITH_UNARY_OPS(WARPSMITH_ROW)
#undef WARPSMITH_ROW

template <class Loop> Status unary_forward(const UnaryFwdParams& p, const Parallel& parallel, Loop&& loop) {
  return visit_cpu_dtype(p.dtype, [&]<class T>() {
    for_pieces(p.rows, p.columns, p.x_stride == p.columns, parallel, [&](int64_t r, int64_t c, int64_t count) {
      loop(offset<const T>(p.x, r * p.x_stride + c), offset<T>(p.y, r * p.columns + c), count);
    });
    return Status();
  });
}

template <class Loop> Status unary_backward(const UnaryBwdParams& p, const Parallel& parallel, Loop&& loop) {
  const bool contiguous = p.dy_stride == p.columns && p.x_stride == p.columns;
  return visit_cpu_dtype(p.dtype, [&]<class T>() {
    for_pieces(p.rows, p.columns, contiguous, parallel, [&](int64_t r, int64_t c, int64_t count) {
      loop(offset<const T>(p.dy, r * p.dy_stride + c), offset<const T>(p.x, r * p.x_stride + c),
           offset<T>(p.dx, r * p.columns + c), count);
    });
    return Status();
  });
}

// Free functions, one per dtype: target_clones reaches neither lambdas nor templates.
#define WARPSMITH_DROPOUT_ADD(T)                                                                                    \
  WARPSMITH_VECTORIZE void add(const T* x, const T* residual, T* y, int64_t count) {                                \
    for (int64_t i = 0; i < count; ++i) y[i] = from_float<T>(to_float(residual[i]) + to_float(x[i]));               \
  }                                                                                                                 \
  WARPSMITH_VECTORIZE void drop_and_add(const uint16_t* lanes, uint32_t threshold, Arithmetic<T> scale, const T* x, \
                                        const T* residual, T* y, int64_t count) {                                   \
    for (int64_t i = 0; i < count; ++i) {                                                                           \
      const Arithmetic<T> kept = to_float(x[i]) * scale;                                                            \
      y[i] = from_float<T>(to_float(residual[i]) + (lanes[i] >= threshold ? kept : Arithmetic<T>(0)));              \
    }                                                                                                               \
  }                                                                                                                 \
  WARPSMITH_VECTORIZE void drop(const uint16_t* lanes, uint32_t threshold, Arithmetic<T> scale, const T* dy, T* dx, \
                                int64_t count) {                                                                    \
    for (int64_t i = 0; i < count; ++i) {                                                                           \
      const Arithmetic<T> kept = to_float(dy[i]) * scale;                                                           \
      dx[i] = from_float<T>(lanes[i] >= threshold ? kept : Arithmetic<T>(0));                                       \
    }                                                                                                               \
  }
WARPSMITH_DROPOUT_ADD(float)
WARPSMITH_DROPOUT_ADD(double)
WARPSMITH_DROPOUT_ADD(float16)
WARPSMITH_DROPOUT_ADD(bfloat16)
#undef WARPSMITH_DROPOUT_ADD

}  // namespace
}  // namespace cpu

Status unary_forward_cpu(Unary op, const UnaryFwdParams& p, const Parallel& parallel) {
#define WARPSMITH_CASE(op, F, flag) \
  case Unary::op: return cpu::unary_forward(p, parallel, [](auto... a) { cpu::op##_forward(a...); });
  switch (op) { WARPSMITH_UNARY_OPS(WARPSMITH_CASE) }
#undef WARPSMITH_CASE
  return Status::unsupported("no such unary op");
}

Status unary_backward_cpu(Unary op, const UnaryBwdParams& p, const Parallel& parallel) {
#define WARPSMITH_CASE(op, F, flag) \
  case Unary::op: return cpu::unary_backward(p, parallel, [](auto... a) { cpu::op##_backward(a...); });
  switch (op) { WARPSMITH_UNARY_OPS(WARPSMITH_CASE) }
  return Status::unsupported("no such unary op");
}

Status dropout_add_forward_cpu(const DropoutAddFwdParams& p, const Parallel& parallel) {
  const bool contiguous = p.x_stride == p.columns && p.residual_stride == p.columns;
  return visit_cpu_dtype(p.dtype, [&]<class T>() {
    const auto scale = static_cast<Arithmetic<T>>(p.dropout.scale);
    cpu::for_pieces(p.rows, p.columns, contiguous, parallel, [&](int64_t r, int64_t c, int64_t count) {
      const T *x = cpu::offset<const T>(p.x, r * p.x_stride + c),
              *residual = cpu::offset<const T>(p.residual, r * p.residual_stride + c);
      T* y = cpu::offset<T>(p.y, r * p.columns + c);
      if (!p.dropout.seed) return cpu::add(x, residual, y, count);
      cpu::for_lanes(p.dropout, r * p.columns + c, count, [&](const uint16_t* lanes, int64_t at, int64_t n) {
        cpu::drop_and_add(lanes, p.dropout.threshold, scale, x + at, residual + at, y + at, n);
      });
    });
    return Status();
  });
}

Status dropout_add_backward_cpu(const DropoutAddBwdParams& p, const Parallel& parallel) {
  return visit_cpu_dtype(p.dtype, [&]<class T>() {
    const auto scale = static_cast<Arithmetic<T>>(p.dropout.scale);
    cpu::for_pieces(p.rows, p.columns, p.dy_stride == p.columns, parallel, [&](int64_t r, int64_t c, int64_t count) {
      const T* dy = cpu::offset<const T>(p.dy, r * p.dy_stride + c);
      T* dx = cpu::offset<T>(p.dx, r * p.columns + c);
      cpu::for_lanes(p.dropout, r * p.columns + c, count, [&](const uint16_t* lanes, int64_t at, int64_t n) {
        cpu::drop(lanes, p.dropout.threshold, scale, dy + at, dx + at, n);
      });
    });
    return Status();
  });
}

}  // namespace warpsmith
