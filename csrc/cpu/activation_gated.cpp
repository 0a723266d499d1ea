#include "common/activation_functions.h"
#include "cpu/elementwise.h"
#include "kernels/activation/activation.h"

// The CPU body of the gated activations.
namespace warpsmith {
namespace cpu {
namespace {

// Loops of one function and storage type: free functions, because target_clones reaches neither lambdas nor templates.
// Outputs may overwrite the inputs, element by element.
#define WARPSMITH_LOOPS_OF(name, F, T)                                                                                 \
  WARPSMITH_VECTORIZE void name##_forward(const T* gate, const T* up, T* y, int64_t count) {                           \
    using Math = HostMath<Arithmetic<T>>;                                                                              \
    for (int64_t i = 0; i < count; ++i)                                                                                \
      y[i] = from_float<T>(activation::F<Math>(to_float(gate[i])).value() * to_float(up[i]));                          \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void name##_backward(const T* dy, const T* gate, const T* up, T* dgate, T* dup, int64_t count) { \
    using Math = HostMath<Arithmetic<T>>;                                                                              \
    WARPSMITH_IVDEP for (int64_t i = 0; i < count; ++i) {                                                              \
      const auto d = to_float(dy[i]), u = to_float(up[i]);                                                             \
      const activation::F<Math> f(to_float(gate[i]));                                                                  \
      dgate[i] = from_float<T>(f.times_derivative(d * u));                                                             \
      dup[i] = from_float<T>(d * f.value());                                                                           \
    }                                                                                                                  \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void name##_backward_y(const T* dy, const T* gate, const T* up, T* dgate, T* dup, T* y,          \
                                             int64_t count) {                                                          \
    using Math = HostMath<Arithmetic<T>>;                                                                              \
    WARPSMITH_IVDEP for (int64_t i = 0; i < count; ++i) {                                                              \
      const auto d = to_float(dy[i]), u = to_float(up[i]);                                                             \
      const activation::F<Math> f(to_float(gate[i]));                                                                  \
      dgate[i] = from_float<T>(f.times_derivative(d * u));                                                             \
      dup[i] = from_float<T>(d * f.value());                                                                           \
      y[i] = from_float<T>(f.value() * u);                                                                             \
    }                                                                                                                  \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void name##_dgate(const T* dy, const T* gate, const T* up, T* dgate, int64_t count) {            \
    using Math = HostMath<Arithmetic<T>>;                                                                              \
    WARPSMITH_IVDEP for (int64_t i = 0; i < count; ++i) dgate[i] =                                                     \
        from_float<T>(activation::F<Math>(to_float(gate[i])).times_derivative(to_float(dy[i]) * to_float(up[i])));     \
  }                                                                                                                    \
  WARPSMITH_VECTORIZE void name##_dup(const T* dy, const T* gate, T* dup, int64_t count) {                             \
    using Math = HostMath<Arithmetic<T>>;                                                                              \
    WARPSMITH_IVDEP for (int64_t i = 0; i < count; ++i) dup[i] =                                                       \
        from_float<T>(to_float(dy[i]) * activation::F<Math>(to_float(gate[i])).value());                               \
  }

// Defines the struct `name` with the loops for all storage types.
#define WARPSMITH_LOOPS(name, F)                                                                       \
  WARPSMITH_LOOPS_OF(name, F, float)                                                                   \
  WARPSMITH_LOOPS_OF(name, F, double)                                                                  \
  WARPSMITH_LOOPS_OF(name, F, float16)                                                                 \
  WARPSMITH_LOOPS_OF(name, F, bfloat16)                                                                \
  struct name {                                                                                        \
    template <class T> static void forward(const T* gate, const T* up, T* y, int64_t n) {              \
      name##_forward(gate, up, y, n);                                                                  \
    }                                                                                                  \
    template <class T>                                                                                 \
    static void backward(const T* dy, const T* gate, const T* up, T* dgate, T* dup, T* y, int64_t n) { \
      if (y)                                                                                           \
        name##_backward_y(dy, gate, up, dgate, dup, y, n);                                             \
      else if (dgate && dup)                                                                           \
        name##_backward(dy, gate, up, dgate, dup, n);                                                  \
      else if (dgate)                                                                                  \
        name##_dgate(dy, gate, up, dgate, n);                                                          \
      else if (dup)                                                                                    \
        name##_dup(dy, gate, dup, n);                                                                  \
    }                                                                                                  \
  };

#define WARPSMITH_USE(op, F) WARPSMITH_LOOPS(op##_##F, F)
#define WARPSMITH_ROW(op, F, flag) WARPSMITH_EACH_##flag(op, F, WARPSMITH_USE)
WARPSMITH_GATED_OPS(WARPSMITH_ROW)
#undef WARPSMITH_USE
#undef WARPSMITH_ROW

template <class Loops> Status gated_forward(const GatedFwdParams& p, const Parallel& parallel) {
  const bool contiguous = p.gate_stride == p.columns && p.up_stride == p.columns;
  return visit_cpu_dtype(p.dtype, [&]<class T>() {
    for_pieces(p.rows, p.columns, contiguous, parallel, [&](int64_t r, int64_t c, int64_t count) {
      Loops::forward(offset<const T>(p.gate, r * p.gate_stride + c), offset<const T>(p.up, r * p.up_stride + c),
                     offset<T>(p.y, r * p.columns + c), count);
    });
    return Status();
  });
}

template <class Loops> Status gated_backward(const GatedBwdParams& p, const Parallel& parallel) {
  const bool contiguous = p.dy_stride == p.columns && p.gate_stride == p.columns && p.up_stride == p.columns &&
                          p.dgate_stride == p.columns && p.dup_stride == p.columns;
  return visit_cpu_dtype(p.dtype, [&]<class T>() {
    for_pieces(p.rows, p.columns, contiguous, parallel, [&](int64_t r, int64_t c, int64_t count) {
      Loops::backward(offset<const T>(p.dy, r * p.dy_stride + c), offset<const T>(p.gate, r * p.gate_stride + c),
                      offset<const T>(p.up, r * p.up_stride + c), offset<T>(p.dgate, r * p.dgate_stride + c),
                      offset<T>(p.dup, r * p.dup_stride + c), offset<T>(p.y, r * p.dy_stride + c), count);
    });
    return Status();
  });
}

}  // namespace
}  // namespace cpu

Status gated_forward_cpu(Gated op, const GatedFwdParams& p, const Parallel& parallel) {
#define WARPSMITH_USE(op, F) cpu::gated_forward<cpu::op##_##F>(p, parallel)
#define WARPSMITH_CASE(op, F, flag) \
  case Gated::op: return WARPSMITH_SELECT_##flag(op, F, p.tanh, WARPSMITH_USE);
  switch (op) { WARPSMITH_GATED_OPS(WARPSMITH_CASE) }
#undef WARPSMITH_USE
  return Status::unsupported("no such gated op");
}

Status gated_backward_cpu(Gated op, const GatedBwdParams& p, const Parallel& parallel) {
#define WARPSMITH_USE(op, F) cpu::gated_backward<cpu::op##_##F>(p, parallel)
  switch (op) { WARPSMITH_GATED_OPS(WARPSMITH_CASE) }
  return Status::unsupported("no such gated op");
}

}  // namespace warpsmith
