#pragma once
#include "common/activation_functions.h"
#include "kernels/activation/activation.h"
#include "kernels/activation/elementwise.cuh"

// The gated activations as elementwise ops. F: a function of common/activation_functions.h.
namespace warpsmith::activation {

// Reads gate and up, writes y: 3 * sizeof(T) bytes per element.
template <template <class> class F> struct GatedForward {
  static constexpr int I = 2, O = 1;
  template <class T, int N>
  __device__ __forceinline__ void apply(const float (&x)[I][N], float (&y)[O][N], int64_t) const {
#pragma unroll
    for (int k = 0; k < N; ++k) y[0][k] = F<DeviceMath<T>>(x[0][k]).value() * x[1][k];
  }
};

// Reads dy, gate and up, writes dgate and dup: 5 * sizeof(T) bytes per element.
template <template <class> class F> struct GatedBackward {
  static constexpr int I = 3, O = 2;
  template <class T, int N>
  __device__ __forceinline__ void apply(const float (&x)[I][N], float (&y)[O][N], int64_t) const {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float dy = x[0][k], up = x[2][k];
      const F<DeviceMath<T>> f(x[1][k]);
      y[0][k] = f.times_derivative(dy * up);
      y[1][k] = dy * f.value();
    }
  }
};

// Writes what the forward wrote as well, whose place may be that of dy: 6 * sizeof(T) bytes per element.
template <template <class> class F> struct GatedBackwardWithOutput {
  static constexpr int I = 3, O = 3;
  template <class T, int N>
  __device__ __forceinline__ void apply(const float (&x)[I][N], float (&y)[O][N], int64_t) const {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float dy = x[0][k], up = x[2][k];
      const F<DeviceMath<T>> f(x[1][k]);
      y[0][k] = f.times_derivative(dy * up);
      y[1][k] = dy * f.value();
      y[2][k] = f.value() * up;
    }
  }
};

template <template <class> class F> Status gated_forward(const GatedFwdParams& p, void* stream) {
  return launch_elementwise(
      GatedForward<F>{},
      {{{p.gate, p.gate_stride}, {p.up, p.up_stride}}, {{p.y, p.columns}}, p.rows, p.columns, p.dtype}, stream);
}

template <template <class> class F> Status gated_backward(const GatedBwdParams& p, void* stream) {
  if (p.y)
    return launch_elementwise(GatedBackwardWithOutput<F>{},
                              {{{p.dy, p.dy_stride}, {p.gate, p.gate_stride}, {p.up, p.up_stride}},
                               {{p.dgate, p.dgate_stride}, {p.dup, p.dup_stride}, {p.y, p.dy_stride}},
                               p.rows,
                               p.columns,
                               p.dtype},
                              stream);
  return launch_elementwise(GatedBackward<F>{},
                            {{{p.dy, p.dy_stride}, {p.gate, p.gate_stride}, {p.up, p.up_stride}},
                             {{p.dgate, p.dgate_stride}, {p.dup, p.dup_stride}},
                             p.rows,
                             p.columns,
                             p.dtype},
                            stream);
}

}  // namespace warpsmith::activation
