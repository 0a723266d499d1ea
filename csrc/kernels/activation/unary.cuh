#pragma once
#include "common/activation_functions.h"
#include "kernels/activation/activation.h"
#include "kernels/activation/elementwise.cuh"

// The unary activations as elementwise ops. F: a function of common/activation_functions.h.
namespace warpsmith::activation {

// Reads x, writes y: 2 * sizeof(T) bytes per element.
template <template <class> class F> struct UnaryForward {
  static constexpr int I = 1, O = 1;
  template <class T, int N>
  __device__ __forceinline__ void apply(const float (&x)[I][N], float (&y)[O][N], int64_t) const {
#pragma unroll
    for (int k = 0; k < N; ++k) y[0][k] = F<DeviceMath<T>>(x[0][k]).value();
  }
};

// Reads dy and x, writes dx: 3 * sizeof(T) bytes per element.
template <template <class> class F> struct UnaryBackward {
  static constexpr int I = 2, O = 1;
  template <class T, int N>
  __device__ __forceinline__ void apply(const float (&x)[I][N], float (&y)[O][N], int64_t) const {
#pragma unroll
    for (int k = 0; k < N; ++k) y[0][k] = F<DeviceMath<T>>(x[1][k]).times_derivative(x[0][k]);
  }
};

template <template <class> class F> Status unary_forward(const UnaryFwdParams& p, void* stream) {
  return launch_elementwise(UnaryForward<F>{}, {{{p.x, p.x_stride}}, {{p.y, p.columns}}, p.rows, p.columns, p.dtype},
                            stream);
}

template <template <class> class F> Status unary_backward(const UnaryBwdParams& p, void* stream) {
  return launch_elementwise(UnaryBackward<F>{},
                            {{{p.dy, p.dy_stride}, {p.x, p.x_stride}}, {{p.dx, p.columns}}, p.rows, p.columns, p.dtype},
                            stream);
}

}  // namespace warpsmith::activation
