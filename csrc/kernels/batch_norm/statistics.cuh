#pragma once
#include "device/math.h"
#include "device/programmatic_launch.h"
#include "kernels/batch_norm/place.cuh"

// Mean and variance of each channel in three steps of fixed order: threads over their turns, blocks over their threads,
// then `finish_statistics` over the blocks. `statistics` reads x once, and writes 8 bytes a channel and slice, which
// the finish reads.
namespace warpsmith::batch_norm {

struct StatisticsParams {
  const void* x;
  int64_t x_stride;        // in vectors
  float *means, *squares;  // [slices, columns]: mean of x - shift, and sum of the squared differences from it
                           // (stored_square), of the rows of each slice
  Turns turns;
};

// What is subtracted from a channel: its first value, or 0 where differences from that could overflow.
template <class T> __device__ __forceinline__ float shift_of(const void* x, int64_t column) {
  const float first = device::to_float(device::load(static_cast<const T*>(x) + column));
  return fabsf(first) <= 1e18f ? first : 0.0f;
}

// Sums of squares of a thread and of a slice are floats. One beyond float is stored negative, as -square / kBeyond.
constexpr double kBeyond = 0x1p160;
__device__ __forceinline__ float stored_square(double square) {
  return static_cast<float>(square <= 1e38 ? square : square / -kBeyond);
}
__device__ __forceinline__ double square_of(float stored) { return stored < 0 ? stored * -kBeyond : stored; }

// The means and squares of a thread again, of its channels whose squares are not finite.
template <class T, int N>
__device__ void add_in_double(const StatisticsParams& p, const Place<N>& at, float* means, float* squares) {
  const Turns& t = p.turns;
#pragma unroll 1
  for (int k = 0; k < N; ++k) {
    if (is_finite(squares[k])) continue;
    const T* const x = static_cast<const T*>(p.x) + at.column + k;
    const double shift = shift_of<T>(p.x, at.column + k);
    double sum = 0, square = 0, count = 0;
    for (int64_t turn = at.slice; turn < t.turns; turn += t.slices) {
      const int64_t end = min((turn + 1) * t.rows_a_turn, t.rows);
      for (int64_t row = turn * t.rows_a_turn + at.row; row < end; row += at.rows_together) {
        const double d = device::to_float(device::load(x + row * p.x_stride * N)) - shift;
        sum += d;
        square += d * d;
        count += 1;
      }
    }
    square -= sum * sum / count;
    means[k] = static_cast<float>(sum / count);
    squares[k] = stored_square(square < 0 ? 0 : square);
  }
}

template <class T, int N> __global__ void __launch_bounds__(kThreads, kBatchNormResident)
    statistics(StatisticsParams p) {
  constexpr int U = BatchNormTogether::statistics;
  WARPSMITH_SHARED(float, means, kThreads* N);
  WARPSMITH_SHARED(float, squares, kThreads* N);
  WARPSMITH_SHARED(double, scratch, 2 * kThreads);
  WARPSMITH_SHARED(float, counts, kThreads);
  device::launch_dependents();
  const Turns& t = p.turns;
  const Place<N> at(t);
  float* const own_means = means + threadIdx.x * N;
  float* const own_squares = squares + threadIdx.x * N;
  int count = 0;
  if (at.here) {
    Moments<N> m;
    Packed<T, N> x[U], next[U];
    const int64_t rows_on = t.rows_a_turn * t.slices, row = at.slice * t.rows_a_turn + at.row;
    const Packed<T, N>* from = vector_at<T, N>(p.x, row * p.x_stride + at.vector);
    int64_t left = t.rows - row;  // rows from this thread's first of a turn on; a turn that is not the last is whole
    const auto load = [&](Packed<T, N>(&to)[U]) {
      load_rows<T, N>(to, from, p.x_stride, 0, 0, at.rows_together, left);
      from += rows_on * p.x_stride;
    };
    const auto there = [&] {
      int rows = 0;
#pragma unroll
      for (int u = 0; u < U; ++u) rows += u * at.rows_together < left;
      return rows;
    };
    load(x);
    const int rows = there();
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float shift = shift_of<T>(p.x, at.column + k);
      float sum = 0;
#pragma unroll
      for (int u = 0; u < U; ++u) sum += u < rows ? element<T, N>(x[u], k) - shift : 0.0f;
      m.center[k] = shift + sum / static_cast<float>(max(rows, 1));
    }
    // The loads of the next turn are in flight while this one is added.
    const auto add = [&](Packed<T, N>(&x)[U], Packed<T, N>(&next)[U]) {
      left -= rows_on;
      load(next);
      add_turn<true, T, N>(m, x, U);
      count += U;
    };
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900  // ptxas spills two registers of sm_80's otherwise
    while (left > 2 * rows_on) {
      add(x, next);
      add(next, x);
    }
#endif
    while (left > rows_on) {
      add(x, next);
#pragma unroll
      for (int u = 0; u < U; ++u) x[u] = next[u];
    }
    if (left > 0) {
      const int last = there();
      add_turn<false, T, N>(m, x, last);
      count += last;
    }
    const float reciprocal = 1.0f / static_cast<float>(max(count, 1));
    bool beyond = false;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float mean = m.sum[k] * reciprocal;
      const float square = fmaf(-mean, m.sum[k], m.square[k]);
      own_means[k] = m.center[k] - shift_of<T>(p.x, at.column + k) + mean;
      own_squares[k] = square < 0.0f ? 0.0f : square;
      beyond = beyond || !is_finite(square);
    }
    if (beyond) add_in_double<T, N>(p, at, own_means, own_squares);
  } else {
    for (int k = 0; k < N; ++k) own_means[k] = own_squares[k] = 0.0f;
  }
  if (at.lane == 0) counts[at.row] = static_cast<float>(count);
  const int width = t.lanes * N;
  const auto add = [&](int place, double& sum, double& square) {
    const double rows = counts[place / width], mean = means[place];
    sum += rows * mean;
    square += square_of(squares[place]) + rows * mean * mean;
  };
  int64_t column;
  double sum, square;
  if (!sums_of_block<N>(t, at.tile, scratch, add, column, sum, square)) return;
  double rows = 0;
#pragma unroll 8
  for (int r = 0; r < at.rows_together; ++r) rows += counts[r];
  square -= sum * sum / rows;
  device::store(p.means + at.slice * t.columns + column, static_cast<float>(sum / rows));
  device::store(p.squares + at.slice * t.columns + column, stored_square(square < 0 ? 0 : square));
}

constexpr int kItems = 8, kParts = kThreads / kItems;  // of a finishing block: channels, and threads of each

// The sum of v over the threads of a channel, the same bits in all of them. One barrier; `scratch` serves one call.
__device__ __forceinline__ double sum_of_parts(double v, double* scratch) {
  const int item = static_cast<int>(threadIdx.x) % kItems;
  scratch[threadIdx.x] = v;
  __syncthreads();
  double total = 0;
#pragma unroll 8
  for (int part = 0; part < kParts; ++part) total += scratch[part * kItems + item];
  return total;
}

__device__ __forceinline__ float shift_as(const void* x, Dtype dtype, int64_t column) {
  if (dtype == Dtype::float32) return shift_of<float>(x, column);
  return dtype == Dtype::float16 ? shift_of<float16>(x, column) : shift_of<bfloat16>(x, column);
}

struct FinishStatisticsParams {
  const void* x;                           // [rows, columns], x_dtype
  const float *means, *squares;            // [slices, columns]; null: the running statistics are those
  const void *running_mean, *running_var;  // [columns], dtype
  void *new_mean, *new_var;                // [columns], dtype, or null
  float *mean, *rstd;                      // [columns]
  double* exact;                           // [3, columns]: mean, variance and rows, or null
  const double* of_ranks;                  // [ranks, 3, columns]; null: this rank alone
  int64_t rows, columns, slices, ranks;
  BatchNormSliceRows slice_rows;
  float keep, momentum;
  double eps;
  Dtype x_dtype, dtype;
};

// Rows, mean and sum of squares about it of all ranks together, in rank order: the same bits on every rank.
__device__ __forceinline__ double merge_ranks(const FinishStatisticsParams& p, int64_t column, double& mean,
                                              double& squares) {
  double rows = 0;
  const auto of = [&](int64_t rank, int what) {
    return device::load(p.of_ranks + (3 * rank + what) * p.columns + column);
  };
  for (int64_t r = 0; r < p.ranks; ++r) {
    const double count = of(r, 2);
    rows += count;
    mean += count * of(r, 0);
  }
  mean /= rows;
  for (int64_t r = 0; r < p.ranks; ++r) {
    const double apart = of(r, 0) - mean;
    squares += of(r, 2) * (of(r, 1) + apart * apart);
  }
  return rows;
}

__global__ void __launch_bounds__(kThreads) finish_statistics(FinishStatisticsParams p) {
  WARPSMITH_SHARED(double, first_scratch, kThreads);
  WARPSMITH_SHARED(double, second_scratch, kThreads);
  device::launch_dependents();
  device::wait_for_previous_kernel();
  const int part = static_cast<int>(threadIdx.x) / kItems;
  const int64_t column = int64_t{blockIdx.x} * kItems + threadIdx.x % kItems;
  const bool here = column < p.columns;
  double mean = 0, var = 0, squares = 0;
  double rows = static_cast<double>(p.rows);
  if (p.of_ranks) {
    if (here && part == 0) rows = merge_ranks(p, column, mean, squares);
    var = squares / rows;
  } else if (p.means) {
    double sum = 0, square = 0;
#pragma unroll 4
    for (int64_t s = here ? part : p.slices; s < p.slices; s += kParts) {
      const double count = static_cast<double>(p.slice_rows.of(s)), at = device::load(p.means + s * p.columns + column);
      sum += count * at;
      square += count * at * at + square_of(device::load(p.squares + s * p.columns + column));
    }
    mean = sum_of_parts(sum, first_scratch) / rows;
    squares = sum_of_parts(square, second_scratch) - rows * mean * mean;
    if (squares < 0) squares = 0;  // NaN stays
    var = squares / rows;
    if (here && part == 0) mean += shift_as(p.x, p.x_dtype, column);
  } else if (here && part == 0) {
    mean = load_as(p.running_mean, p.dtype, column);
    var = load_as(p.running_var, p.dtype, column);
  }
  if (part != 0 || !here) return;
  device::store(p.mean + column, static_cast<float>(mean));
  device::store(p.rstd + column, static_cast<float>(1 / sqrt(var + p.eps)));
  if (p.exact) {
    device::store(p.exact + column, mean);
    device::store(p.exact + p.columns + column, var);
    device::store(p.exact + 2 * p.columns + column, rows);
  }
  if (!p.new_mean) return;
  const auto update = [&](const void* from, void* to, float value) {
    const float old = load_as(from, p.dtype, column);
    store_as(to, p.dtype, column,
             __fadd_rn(device::rounded_product(p.keep, old), device::rounded_product(p.momentum, value)));
  };
  update(p.running_mean, p.new_mean, static_cast<float>(mean));
  update(p.running_var, p.new_var, static_cast<float>(squares / (rows - 1)));
}

}  // namespace warpsmith::batch_norm
