#pragma once
#include <cstdint>

#include "common/alignment.h"

// How the kernels share out pixels: a pure function of the problem, printable through warpsmith.plan.
namespace warpsmith {

struct MaxPoolProblem {
  int64_t samples = 0, channels = 0, height = 0, width = 0, out_height = 0, out_width = 0;
  int kernel[2] = {}, stride[2] = {}, padding[2] = {};
  int element_bytes = 2;
};

constexpr int kMaxPoolThreads = 256;
constexpr int kMaxPoolRows = 4;        // of y: one under the other, of a thread
constexpr int kMaxPoolMostArea = 255;  // of a window: a place in it has one byte

// A thread has one vector of channels. `square`: of windows 3 x 3 at stride 2, or 2 x 2 at stride 2, kernels know the
// sizes: forward a thread makes kMaxPoolRows pixels of y, backward a block of 2 x 2 pixels of dx. Of other windows it
// makes one pixel.
struct MaxPoolConfig {
  int vector_elems = 1;
  int square = 0;  // 3, 2, or 0: other windows
  int64_t vectors = 0;
  int64_t rows = 0, columns = 0;        // of threads: forward over a sample of y
  int64_t dx_rows = 0, dx_columns = 0;  // backward over one of dx

  constexpr int64_t blocks(const MaxPoolProblem& p, bool backward) const {
    const int64_t threads = p.samples * vectors * (backward ? dx_rows * dx_columns : rows * columns);
    return ceil_div(threads, kMaxPoolThreads);
  }
};

constexpr MaxPoolConfig choose_max_pool(const MaxPoolProblem& p) {
  MaxPoolConfig c;
  const int whole = 16 / p.element_bytes, k = p.kernel[0];
  c.vector_elems = p.channels % whole == 0 ? whole : 1;
  c.vectors = p.channels / c.vector_elems;
  const bool known = p.kernel[1] == k && p.stride[0] == 2 && p.stride[1] == 2 && (k == 2 || k == 3);
  c.square = known ? k : 0;
  c.rows = known ? ceil_div(p.out_height, kMaxPoolRows) : p.out_height;
  c.columns = p.out_width;
  // Blocks of pixels begin on a stride's multiple behind the first row and column of padding.
  c.dx_rows = known ? ceil_div(p.height + p.padding[0], 2) : p.height;
  c.dx_columns = known ? ceil_div(p.width + p.padding[1], 2) : p.width;
  return c;
}

}  // namespace warpsmith
