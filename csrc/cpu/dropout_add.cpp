#include "kernels/activation/dropout_add.h"

#include "cpu/dropout_lanes.h"
#include "cpu/elementwise.h"

namespace warpsmith {
namespace cpu {
namespace {

// Free functions, one a dtype: target_clones reaches neither lambdas nor templates.
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

Status dropout_add_forward_cpu(const DropoutAddFwdParams& p, const Parallel& parallel) {
  const bool contiguous = p.x_stride == p.columns && p.residual_stride == p.columns;
  return cpu::for_dtype(p.dtype, [&]<class T>(T) {
    const auto scale = static_cast<cpu::Arithmetic<T>>(p.dropout.scale);
    cpu::for_pieces(p.rows, p.columns, contiguous, parallel, [&](int64_t r, int64_t c, int64_t count) {
      const T *x = cpu::offset<const T>(p.x, r * p.x_stride + c),
              *residual = cpu::offset<const T>(p.residual, r * p.residual_stride + c);
      T* y = cpu::offset<T>(p.y, r * p.columns + c);
      if (!p.dropout.seed) return cpu::add(x, residual, y, count);
      cpu::for_lanes(p.dropout, r * p.columns + c, count, [&](const uint16_t* lanes, int64_t at, int64_t n) {
        cpu::drop_and_add(lanes, p.dropout.threshold, scale, x + at, residual + at, y + at, n);
      });
    });
  });
}

Status dropout_add_backward_cpu(const DropoutAddBwdParams& p, const Parallel& parallel) {
  return cpu::for_dtype(p.dtype, [&]<class T>(T) {
    const auto scale = static_cast<cpu::Arithmetic<T>>(p.dropout.scale);
    cpu::for_pieces(p.rows, p.columns, p.dy_stride == p.columns, parallel, [&](int64_t r, int64_t c, int64_t count) {
      const T* dy = cpu::offset<const T>(p.dy, r * p.dy_stride + c);
      T* dx = cpu::offset<T>(p.dx, r * p.columns + c);
      cpu::for_lanes(p.dropout, r * p.columns + c, count, [&](const uint16_t* lanes, int64_t at, int64_t n) {
        cpu::drop(lanes, p.dropout.threshold, scale, dy + at, dx + at, n);
      });
    });
  });
}

}  // namespace warpsmith
