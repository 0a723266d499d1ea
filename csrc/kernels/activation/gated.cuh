#pragma once
#include "common/activation_functions.h"
#include "kernels/activation/activation.h"
#include "kernels/activation/elementwise.cuh"
#include "tiles/float8_cast.cuh"

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

// The same for a row a block, with the cast of y: one more byte written per element, and 4 per row.
template <template <class> class F, class T> __global__ void __launch_bounds__(kGatedRowThreads, 2)
    gated_rows(GatedFwdParams p) {
  constexpr int N = 16 / sizeof(T), V = kGatedRowVectors;
  WARPSMITH_SHARED(float, scratch, kGatedRowThreads / 32);
  const int64_t row = blockIdx.x;
  const int columns = static_cast<int>(p.columns);
  const auto column_of = [&](int v) { return static_cast<int>(v * blockDim.x + threadIdx.x) * N; };
  T* const to = static_cast<T*>(p.y) + row * p.columns;
  Packed<T, N> y[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int column = column_of(v);
    if (column >= columns) continue;
    float x[2][N], out[1][N];
    device::unpack<T>(x[0], load_at<T, N>({p.gate, p.gate_stride}, row * p.gate_stride + column));
    device::unpack<T>(x[1], load_at<T, N>({p.up, p.up_stride}, row * p.up_stride + column));
    GatedForward<F>{}.template apply<T, N>(x, out, 0);
    y[v] = device::rounded<T>(out[0]);
    store_at<T, N>({to, p.columns}, column, y[v]);
  }
  quantize::cast_row<T, V>([&](int v, float (&values)[N]) { device::unpack<T>(values, y[v]); }, column_of, columns, to,
                           p.cast, row, scratch);
}

template <template <class> class F> Status gated_rows(const GatedFwdParams& p, int threads, void* stream) {
  const LaunchConfig c{.grid = static_cast<unsigned>(p.rows), .block = static_cast<unsigned>(threads)};
  return p.dtype == Dtype::float16 ? launch(gated_rows<F, float16>, c, stream, p)
                                   : launch(gated_rows<F, bfloat16>, c, stream, p);
}

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
