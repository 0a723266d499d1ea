#pragma once
#include <string>

#include "device/programmatic_launch.h"
#include "kernels/activation/biased.h"
#include "kernels/activation/biased_config.h"
#include "kernels/activation/elementwise.cuh"
#include "kernels/activation/functions.h"

// Kernels of the biased activations. T: storage of x, W: of the bias, F: the function, N: elements of one access. A
// thread keeps its columns, and with them the bias, over all of its rows.
namespace warpsmith::activation {

constexpr int kBiasedThreads = 256;

struct BiasedTile {
  int width_log2;
  int64_t tiles, row_blocks;
  device::FastDivide divide;  // by tiles: neighbouring blocks cover neighbouring columns
};

// Where a thread stands: its column (in vectors), its first row, and the rows of all threads above and below it.
struct BiasedPlace {
  int64_t row_block, column, row;
  int rows_at_once;

  __device__ __forceinline__ explicit BiasedPlace(const BiasedTile& t) {
    row_block = t.divide.quotient(blockIdx.x);
    const int64_t tile = blockIdx.x - row_block * t.tiles;
    column = (tile << t.width_log2) + (threadIdx.x & ((1u << t.width_log2) - 1));
    row = threadIdx.x >> t.width_log2;
    rows_at_once = kBiasedThreads >> t.width_log2;
  }
};

// N elements as floats, in pieces of at most 16 bytes.
template <int N, class W>
__device__ __forceinline__ void load_floats(const void* from, int64_t element, float (&to)[N]) {
  constexpr int kPiece = N * sizeof(W) > 16 ? 16 / sizeof(W) : N;
#pragma unroll
  for (int first = 0; first < N; first += kPiece) {
    const auto piece = load_at<W, kPiece>({from, 0}, element + first);
#pragma unroll
    for (int k = 0; k < kPiece; ++k) to[first + k] = device::to_float(piece.at[k]);
  }
}

// Reads x and writes y once: 2 * sizeof(T) bytes an element, and the bias once a row from the L1 or L2.
template <template <class> class F, class T, class W, int N> __global__ void __launch_bounds__(kBiasedThreads, 8)
    biased_forward(BiasedFwdParams p, BiasedTile tile) {
  const BiasedPlace at(tile);
  const int64_t column = at.column * N, r = at.row_block * at.rows_at_once + at.row;
  if (column >= p.columns || r >= p.rows) return;
  const auto x = load_at<T, N>({p.x, 0}, r * p.x_stride + column);
  float bias[N];
  load_floats<N, W>(p.bias, column, bias);
  Vector<T, N> y;
#pragma unroll
  for (int k = 0; k < N; ++k)
    y.at[k] = device::from_float<T>(F<DeviceMath<T>>(device::to_float(x.at[k]) + bias[k]).value());
  store_at<T, N>({p.y, 0}, r * p.columns + column, y);
}

// Reads dy and x and writes dx once: 3 * sizeof(T) bytes an element, the bias once a thread, and one float a column and
// row block of partial sums. The arithmetic is as accurate as dbias, of type W, wants it.
template <template <class> class F, class T, class W, int N, int kResident = kBiasedResident>
__global__ void __launch_bounds__(kBiasedThreads, kResident) biased_backward(BiasedBwdParams p, BiasedTile tile) {
  WARPSMITH_SHARED(float, scratch, kBiasedThreads* N);
  const BiasedPlace at(tile);
  const int64_t column = at.column * N, step = tile.row_blocks * at.rows_at_once;
  float sum[N] = {};
  if (column < p.columns) {
    float bias[N];
    load_floats<N, W>(p.bias, column, bias);
    for (int64_t r = at.row_block * at.rows_at_once + at.row; r < p.rows; r += step) {
      const auto dy = load_at<T, N>({p.dy, 0}, r * p.dy_stride + column);
      const auto x = load_at<T, N>({p.x, 0}, r * p.x_stride + column);
      Vector<T, N> dx;
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const F<DeviceMath<W>> f(device::to_float(x.at[k]) + bias[k]);
        const float g = f.times_derivative(device::to_float(dy.at[k]));
        sum[k] += g;
        dx.at[k] = device::from_float<T>(g);
      }
      if (p.dx) store_at<T, N>({p.dx, 0}, r * p.columns + column, dx);
    }
  }
  if (!p.partials) return;
  // Over the rows of the block, in their order; then one row of partial sums.
#pragma unroll
  for (int k = 0; k < N; ++k) scratch[threadIdx.x * N + k] = sum[k];
  __syncthreads();
  const int width = N << tile.width_log2;
  const int64_t left = (at.column >> tile.width_log2 << tile.width_log2) * N;
  for (int c = threadIdx.x; c < width && left + c < p.columns; c += kBiasedThreads) {
    float total = 0;
    for (int r = 0; r < at.rows_at_once; ++r) total += scratch[r * width + c];
    device::store(static_cast<float*>(p.partials) + at.row_block * p.columns + left + c, total);
  }
}

constexpr int kBiasSumColumns = 32, kBiasSumSlices = 8;

// dbias from the partial sums: each thread adds every kBiasSumSlices-th row of a column, then the first adds the
// slices.
template <class W> __global__ void __launch_bounds__(kBiasSumColumns* kBiasSumSlices)
    sum_bias_partials(BiasedBwdParams p, int64_t partial_rows) {
  WARPSMITH_SHARED(float, sums, kBiasSumColumns* kBiasSumSlices);
  device::wait_for_previous_kernel();
  const int slice = threadIdx.x / kBiasSumColumns;
  const int64_t column = int64_t{blockIdx.x} * kBiasSumColumns + threadIdx.x % kBiasSumColumns;
  const float* partials = static_cast<const float*>(p.partials);
  float sum = 0;
  if (column < p.columns)
#pragma unroll 4
    for (int64_t r = slice; r < partial_rows; r += kBiasSumSlices)
      sum += device::load(partials + r * p.columns + column);
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (slice != 0 || column >= p.columns) return;
  float total = 0;
  for (int s = 0; s < kBiasSumSlices; ++s) total += sums[s * kBiasSumColumns + threadIdx.x];
  device::store(static_cast<W*>(p.dbias) + column, device::from_float<W>(total));
}

inline bool rows_aligned(const void* base, int64_t stride, int64_t rows, Dtype dtype) {
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 && (rows == 1 || stride * size_bytes(dtype) % 16 == 0);
}

inline Status problem_of(const BiasedFwdParams& p, BiasedProblem* out) {
  const bool aligned = rows_aligned(p.x, p.x_stride, p.rows, p.dtype) && rows_aligned(p.y, 0, 1, p.dtype) &&
                       rows_aligned(p.bias, 0, 1, p.dtype);
  *out = {p.rows, p.columns, size_bytes(p.dtype), aligned};
  return {};
}

inline Status problem_of(const BiasedBwdParams& p, BiasedProblem* out) {
  DeviceProperties device;
  WARPSMITH_RETURN_IF_FAILED(device_properties(device));
  const bool aligned = rows_aligned(p.x, p.x_stride, p.rows, p.dtype) &&
                       rows_aligned(p.dy, p.dy_stride, p.rows, p.dtype) && rows_aligned(p.dx, 0, 1, p.dtype) &&
                       rows_aligned(p.bias, 0, 1, p.dtype);
  *out = {p.rows, p.columns, size_bytes(p.dtype), aligned, device.multiprocessors};
  return {};
}

inline BiasedTile tile_of(const BiasedConfig& c) {
  int log2 = 0;
  while ((1 << log2) < c.width) ++log2;
  return {log2, c.tiles, c.row_blocks, device::FastDivide(c.tiles)};
}

inline LaunchConfig grid_of(const BiasedConfig& c) {
  LaunchConfig launch_config;
  launch_config.grid.x = static_cast<unsigned>(c.blocks());
  launch_config.block.x = static_cast<unsigned>(c.threads);
  return launch_config;
}

// Runs visit.template operator()<T, W>() for the storage types of x and the bias.
template <class Visit> Status dispatch_biased(Dtype dtype, Dtype bias_dtype, Visit&& visit) {
  const bool wide = bias_dtype == Dtype::float32;
  switch (dtype) {
    case Dtype::float32: return visit.template operator()<float, float>();
    case Dtype::float16:
      return wide ? visit.template operator()<float16, float>() : visit.template operator()<float16, float16>();
    case Dtype::bfloat16:
      return wide ? visit.template operator()<bfloat16, float>() : visit.template operator()<bfloat16, bfloat16>();
    case Dtype::float64: break;
  }
  return Status::unsupported(std::string("no CUDA kernel for ") + name(dtype));
}

template <template <class> class F> Status biased_forward_cuda(const BiasedFwdParams& p, void* stream) {
  BiasedProblem problem;
  WARPSMITH_RETURN_IF_FAILED(problem_of(p, &problem));
  const BiasedConfig c = choose_biased_forward(problem);
  return dispatch_biased(p.dtype, p.bias_dtype, [&]<class T, class W>() {
    constexpr int N = 16 / sizeof(T);
    return launch(c.vector_elems == 1 ? biased_forward<F, T, W, 1> : biased_forward<F, T, W, N>, grid_of(c), stream, p,
                  tile_of(c));
  });
}

template <template <class> class F> Status biased_backward_cuda(const BiasedBwdParams& p, void* stream) {
  BiasedProblem problem;
  WARPSMITH_RETURN_IF_FAILED(problem_of(p, &problem));
  const BiasedConfig c = choose_biased_backward(problem);
  return dispatch_biased(p.dtype, p.bias_dtype, [&]<class T, class W>() {
    constexpr int N = 16 / sizeof(T);
    WARPSMITH_RETURN_IF_FAILED(launch(c.vector_elems == 1 ? biased_backward<F, T, W, 1> : biased_backward<F, T, W, N>,
                                      grid_of(c), stream, p, tile_of(c)));
    if (!p.partials) return Status();
    DeviceProperties device;
    WARPSMITH_RETURN_IF_FAILED(device_properties(device));
    LaunchConfig sum;
    sum.grid.x = static_cast<unsigned>(biased_detail::ceil_div(p.columns, kBiasSumColumns));
    sum.block.x = kBiasSumColumns * kBiasSumSlices;
    sum.programmatic_dependent = device.compute_capability >= 90;
    return launch(sum_bias_partials<W>, sum, stream, p, c.row_blocks);
  });
}

inline Status biased_partial_rows(const BiasedBwdParams& p, int64_t* partial_rows) {
  BiasedProblem problem;
  WARPSMITH_RETURN_IF_FAILED(problem_of(p, &problem));
  *partial_rows = choose_biased_backward(problem).row_blocks;
  return {};
}

}  // namespace warpsmith::activation
