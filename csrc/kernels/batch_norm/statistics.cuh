#pragma once
#include "device/math.h"
#include "device/programmatic_launch.h"
#include "kernels/batch_norm/place.cuh"

// Mean and variance of each channel in three steps of fixed order: threads over their turns, blocks over their threads,
// then `finish_statistics` over the blocks. `statistics` reads x once, and writes 8 bytes a channel and slice, which
// the finish reads twice.
namespace warpsmith::batch_norm {

struct StatisticsParams {
  const void* x;
  int64_t x_stride;        // in vectors
  float *means, *squares;  // [slices, columns]: mean of x - shift, and sum of the squared differences from it, of the
                           // rows of each slice
  Turns turns;
};

// What is subtracted from a channel: its first value, or 0 where differences from that could overflow.
template <class T> __device__ __forceinline__ float shift_of(const void* x, int64_t column) {
  const float first = device::to_float(device::load(static_cast<const T*>(x) + column));
  return fabsf(first) <= 1e18f ? first : 0.0f;
}

// Mean, sum of squared differences from it, and number of what a thread has seen of its channels.
template <int N> struct Moments {
  float mean[N] = {}, square[N] = {}, count = 0;
};

// Takes the first `rows` of the rows of a turn: of differences from a channel's first value their mean, then the
// squares about that, merged into the moments before (Chan, Golub and LeVeque, 1979). No difference cancels, wherever
// the mean lies. kWhole: all U rows are there.
template <bool kWhole, class T, int N, int U>
__device__ __forceinline__ void merge_turn(Moments<N>& m, const Packed<T, N> (&x)[U], const float (&shift)[N],
                                           int rows) {
  const float here = kWhole ? U : static_cast<float>(rows), reciprocal = 1.0f / here;
  const float weight = here / (m.count + here), rest = 1.0f - weight, both = m.count * weight;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    float d[U], part[U];
#pragma unroll
    for (int u = 0; u < U; ++u) part[u] = d[u] = kWhole || u < rows ? element<T, N>(x[u], k) - shift[k] : 0.0f;
#pragma unroll
    for (int width = U / 2; width > 0; width /= 2)
#pragma unroll
      for (int u = 0; u < width; ++u) part[u] += part[u + width];
    const float of_turn = part[0] * reciprocal;
    float about = 0;
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const float apart = d[u] - of_turn;
      if (kWhole || u < rows) about = fmaf(apart, apart, about);
    }
    // Without rows before, weight is 1: their mean and squares are zeros. Infinities stay.
    const float apart = m.count > 0 ? of_turn - m.mean[k] : 0.0f;
    m.mean[k] = fmaf(of_turn, weight, m.mean[k] * rest);
    m.square[k] += fmaf(apart * apart, both, about);
  }
  m.count += here;
}

template <class T, int N> __global__ void __launch_bounds__(kThreads, kBatchNormResident)
    statistics(StatisticsParams p) {
  constexpr int U = BatchNormTogether::statistics;
  WARPSMITH_SHARED(float, means, kThreads* N);
  WARPSMITH_SHARED(float, squares, kThreads* N);
  WARPSMITH_SHARED(float, counts, kThreads);
  const Turns& t = p.turns;
  const Place<N> at(t);
  Moments<N> m;
  float shift[N] = {};
  if (at.here) {
#pragma unroll
    for (int k = 0; k < N; ++k) shift[k] = shift_of<T>(p.x, at.column + k);
  }
  for (int64_t turn = at.here ? at.slice : t.turns; turn < t.turns; turn += t.slices) {
    const int64_t first = turn * t.rows_a_turn + at.row;
    Packed<T, N> x[U];
    load_rows<T, N>(x, p.x, p.x_stride, at.vector, first, at.rows_together, t.rows);
    if (first + (U - 1) * at.rows_together < t.rows) {
      merge_turn<true, T, N>(m, x, shift, U);
    } else {
      int rows = 0;
      while (first + rows * at.rows_together < t.rows) ++rows;
      if (rows > 0) merge_turn<false, T, N>(m, x, shift, rows);
    }
  }
  if (at.lane == 0) counts[at.row] = m.count;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    means[threadIdx.x * N + k] = m.mean[k];
    squares[threadIdx.x * N + k] = m.square[k];
  }
  __syncthreads();
  const int width = t.lanes * N;
  const int64_t column = at.tile * width + threadIdx.x;
  if (static_cast<int>(threadIdx.x) >= width || column >= t.columns) return;
  const auto place = [&](int r) { return r * width + static_cast<int>(threadIdx.x); };
  const double total = sum_of_block(at.rows_together, [&](int r) { return counts[r]; });
  const double of_means = sum_of_block(at.rows_together, [&](int r) { return counts[r] * means[place(r)]; });
  const float middle = static_cast<float>(of_means / total);
  const double sum = sum_of_block(at.rows_together, [&](int r) {
    const float apart = means[place(r)] - middle;
    return counts[r] > 0 ? fmaf(apart * apart, counts[r], squares[place(r)]) : 0.0f;
  });
  device::store(p.means + at.slice * t.columns + column, middle);
  device::store(p.squares + at.slice * t.columns + column, static_cast<float>(sum));
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
  int64_t rows, columns, slices;
  BatchNormSliceRows slice_rows;
  float keep, momentum;
  double eps;
  Dtype x_dtype, dtype;
};

__global__ void __launch_bounds__(kThreads) finish_statistics(FinishStatisticsParams p) {
  WARPSMITH_SHARED(double, first_scratch, kThreads);
  WARPSMITH_SHARED(double, second_scratch, kThreads);
  device::wait_for_previous_kernel();
  const int part = static_cast<int>(threadIdx.x) / kItems;
  const int64_t column = int64_t{blockIdx.x} * kItems + threadIdx.x % kItems;
  const bool here = column < p.columns;
  double mean = 0, var = 0, squares = 0;
  const double rows = static_cast<double>(p.rows);
  if (p.means) {
    const auto count_of = [&](int64_t s) { return static_cast<double>(p.slice_rows.of(s)); };
    const int64_t from = here ? part : p.slices;
    double of_means = 0, sum = 0;
#pragma unroll 4
    for (int64_t s = from; s < p.slices; s += kParts)
      of_means += count_of(s) * device::load(p.means + s * p.columns + column);
    mean = sum_of_parts(of_means, first_scratch) / rows;
#pragma unroll 4
    for (int64_t s = from; s < p.slices; s += kParts) {
      const double apart = device::load(p.means + s * p.columns + column) - mean;
      sum += count_of(s) * apart * apart + device::load(p.squares + s * p.columns + column);
    }
    squares = sum_of_parts(sum, second_scratch);
    var = squares / rows;
    if (here && part == 0) mean += shift_as(p.x, p.x_dtype, column);
  } else if (here && part == 0) {
    mean = load_as(p.running_mean, p.dtype, column);
    var = load_as(p.running_var, p.dtype, column);
  }
  if (part != 0 || !here) return;
  device::store(p.mean + column, static_cast<float>(mean));
  device::store(p.rstd + column, static_cast<float>(1 / sqrt(var + p.eps)));
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
