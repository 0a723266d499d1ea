#pragma once
#include <algorithm>

#include "common/activation_functions.h"
#include "device/programmatic_launch.h"
#include "kernels/activation/activation.h"
#include "kernels/activation/activation_config.h"
#include "kernels/activation/elementwise.cuh"
#include "tiles/sum_partials.cuh"

// The kernels of the biased activations. T: storage type of x; W: of the bias; F: the function; N: elements per access.
// A thread keeps its columns, and so its bias, over all of its rows.
namespace warpsmith::activation {

// A thread's position: its column (in vectors) and first row. Blocks are two-dimensional, like their tiles. The grid
// has tiles along x, and blocks of rows along y and then z.
struct BiasedPlace {
  int64_t row_block, column, row;
  int thread;

  __device__ __forceinline__ BiasedPlace() {
    row_block = int64_t{blockIdx.z} * gridDim.y + blockIdx.y;
    column = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    row = row_block * blockDim.y + threadIdx.y;
    thread = threadIdx.y * blockDim.x + threadIdx.x;
  }
};

// Loads N elements as floats, in accesses of at most 16 bytes.
template <int N, class W>
__device__ __forceinline__ void load_floats(const void* from, int64_t element, float (&to)[N]) {
  constexpr int kPiece = N * sizeof(W) > 16 ? 16 / sizeof(W) : N;
#pragma unroll
  for (int first = 0; first < N; first += kPiece) {
    float piece[kPiece];
    device::unpack<W>(piece, load_at<W, kPiece>({from, 0}, element + first));
#pragma unroll
    for (int k = 0; k < kPiece; ++k) to[first + k] = piece[k];
  }
}

// Reads x and writes y once: 2 * sizeof(T) bytes per element. Reads the bias once per row, from the L1 or L2 cache.
template <template <class> class F, class T, class W, int N>
__global__ void __launch_bounds__(kBiasedForwardThreads, 16) biased_forward(BiasedFwdParams p) {
  const BiasedPlace at;
  const int64_t column = at.column * N;
  if (column >= p.columns || at.row >= p.rows) return;
  const auto packed = load_at<T, N>({p.x, 0}, at.row * p.x_stride + column);
  float bias[N] = {}, x[N];
  if (p.bias) load_floats<N, W>(p.bias, column, bias);
  device::unpack<T>(x, packed);
#pragma unroll
  for (int k = 0; k < N; ++k) x[k] = F<DeviceMath<T>>(x[k] + bias[k]).value();
  store_at<T, N>({p.y, 0}, at.row * p.columns + column, device::rounded<T>(x));
}

// Reads dy and x and writes dx once: 3 * sizeof(T) bytes per element. Reads the bias once per thread. Writes one float
// of partial sums per column and row block. The arithmetic is accurate enough for dbias of type W.
template <template <class> class F, class T, class W, int N, int kResident = kBiasedResident>
__global__ void __launch_bounds__(kBiasedBackwardThreads, kResident) biased_backward(BiasedBwdParams p) {
  WARPSMITH_SHARED(float, scratch, kBiasedBackwardThreads* N);
  const BiasedPlace at;
  const int rows_at_once = blockDim.y;
  const int64_t column = at.column * N, step = int64_t{gridDim.y} * rows_at_once;
  float sum[N] = {};
  if (column < p.columns) {
    float bias[N] = {};
    if (p.bias) load_floats<N, W>(p.bias, column, bias);
    for (int64_t r = at.row; r < p.rows; r += step) {
      const auto packed_dy = load_at<T, N>({p.dy, 0}, r * p.dy_stride + column);
      const auto packed_x = load_at<T, N>({p.x, 0}, r * p.x_stride + column);
      float x[N], g[N];
      device::unpack<T>(x, packed_x);
      device::unpack<T>(g, packed_dy);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        g[k] = F<DeviceMath<W>>(x[k] + bias[k]).times_derivative(g[k]);
        sum[k] += g[k];
      }
      if (p.dx) store_at<T, N>({p.dx, 0}, r * p.columns + column, device::rounded<T>(g));
    }
  }
  if (!p.partials) return;
  // Sums of pairs of the block's rows, of pairs of those, and so on, into one row of partial sums. One row after the
  // other, 32 equal ones were off by 6 times PyTorch's error (an expanded dy, 150x96, float32; H200).
#pragma unroll
  for (int k = 0; k < N; ++k) scratch[at.thread * N + k] = sum[k];
  for (int half = rows_at_once / 2; half > 0; half /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.y) >= half) continue;
#pragma unroll
    for (int k = 0; k < N; ++k) scratch[at.thread * N + k] += scratch[(at.thread + half * blockDim.x) * N + k];
  }
  if (threadIdx.y != 0 || column >= p.columns) return;
#pragma unroll
  for (int k = 0; k < N; ++k)
    device::store(static_cast<float*>(p.partials) + at.row_block * p.columns + column + k, scratch[at.thread * N + k]);
}

inline Status problem_of(const BiasedFwdParams& p, BiasedProblem* out) {
  const bool aligned = rows_on_16_bytes(p.x, p.x_stride, p.rows, p.dtype) && on_16_bytes(p.y) && on_16_bytes(p.bias);
  *out = {p.rows, p.columns, size_bytes(p.dtype), aligned};
  return {};
}

inline Status problem_of(const BiasedBwdParams& p, BiasedProblem* out) {
  DeviceProperties device;
  WARPSMITH_RETURN_IF_FAILED(device_properties(device));
  const bool aligned = rows_on_16_bytes(p.x, p.x_stride, p.rows, p.dtype) &&
                       rows_on_16_bytes(p.dy, p.dy_stride, p.rows, p.dtype) && on_16_bytes(p.dx) && on_16_bytes(p.bias);
  *out = {p.rows, p.columns, size_bytes(p.dtype), aligned, device.multiprocessors};
  return {};
}

inline LaunchConfig grid_of(const BiasedConfig& c) {
  constexpr int64_t kMostAlongY = 65535;
  const int64_t along_y = std::min(c.row_blocks, kMostAlongY), along_z = ceil_div(c.row_blocks, kMostAlongY);
  return {.grid = dim3(static_cast<unsigned>(c.tiles), static_cast<unsigned>(along_y), static_cast<unsigned>(along_z)),
          .block = dim3(static_cast<unsigned>(c.width), static_cast<unsigned>(c.rows_at_once()))};
}

template <template <class> class F> Status launch_biased_forward(const BiasedFwdParams& p, void* stream) {
  BiasedProblem problem;
  WARPSMITH_RETURN_IF_FAILED(problem_of(p, &problem));
  const BiasedConfig c = choose_biased_forward(problem);
  return visit_cuda_dtypes(p.dtype, p.bias_dtype, [&]<class T, class W>() {
    constexpr int N = 16 / sizeof(T);
    return launch(c.vector_elems == 1 ? biased_forward<F, T, W, 1> : biased_forward<F, T, W, N>, grid_of(c), stream, p);
  });
}

template <template <class> class F> Status launch_biased_backward(const BiasedBwdParams& p, void* stream) {
  BiasedProblem problem;
  WARPSMITH_RETURN_IF_FAILED(problem_of(p, &problem));
  const BiasedConfig c = choose_biased_backward(problem);
  return visit_cuda_dtypes(p.dtype, p.bias_dtype, [&]<class T, class W>() {
    constexpr int N = 16 / sizeof(T);
    WARPSMITH_RETURN_IF_FAILED(
        launch(c.vector_elems == 1 ? biased_backward<F, T, W, 1> : biased_backward<F, T, W, N>, grid_of(c), stream, p));
    if (!p.partials) return Status();
    return tiles::launch_sum_partials<W>(p.partials, p.dbias, c.row_blocks, p.columns, stream);
  });
}

}  // namespace warpsmith::activation
