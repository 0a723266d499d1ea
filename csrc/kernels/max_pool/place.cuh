#pragma once
#include "device/fast_divide.h"
#include "kernels/max_pool/max_pool.h"
#include "tiles/pixels.cuh"

// Where a thread works.
namespace warpsmith::max_pool {

using namespace tiles;

constexpr int kThreads = kMaxPoolThreads;

// The divisors of a launch: threads are numbered by vector, column, row, sample.
struct Places {
  device::FastDivide vectors, columns, rows;
  int64_t vector_count, column_count, row_count, threads;
  Places(const MaxPoolShape& p, const MaxPoolConfig& c, bool backward)
      : vectors(c.vectors),
        columns(backward ? c.dx_columns : c.columns),
        rows(backward ? c.dx_rows : c.rows),
        vector_count(c.vectors),
        column_count(backward ? c.dx_columns : c.columns),
        row_count(backward ? c.dx_rows : c.rows),
        threads(p.samples * c.vectors * column_count * row_count) {}
};

struct Place {
  int64_t sample, vector;
  int row, column;
  bool here;

  __device__ __forceinline__ explicit Place(const Places& p) : sample(0), vector(0), row(0), column(0), here(false) {
    const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    here = thread < p.threads;
    const int64_t pixel = p.vectors.quotient(thread), line = p.columns.quotient(pixel);
    sample = p.rows.quotient(line);
    vector = thread - pixel * p.vector_count;
    column = static_cast<int>(pixel - line * p.column_count);
    row = static_cast<int>(line - sample * p.row_count);
  }
};

// Whether 0 <= i < count.
__device__ __forceinline__ bool within(int i, int count) {
  return static_cast<unsigned>(i) < static_cast<unsigned>(count);
}

}  // namespace warpsmith::max_pool
