#include "kernels/max_pool/max_pool.h"

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "cpu/elementwise.h"

// Pixel by pixel, all channels of it in one loop. M is the type of the arithmetic, float or double.
namespace warpsmith {
namespace {

constexpr int64_t kGrainElems = 16 * 1024;  // least elements per thread

// Free functions, one per dtype: target_clones reaches neither lambdas nor templates. One pixel each.
#define WARPSMITH_LOOPS(T, M)                                                                            \
  WARPSMITH_VECTORIZE void take(const T* x, int64_t channels, int number, M* largest, int* at) {         \
    for (int64_t c = 0; c < channels; ++c) {                                                             \
      const M v = to_float(x[c]);                                                                        \
      const bool larger = v > largest[c] || v != v; /* NaN is larger than anything before it */          \
      largest[c] = larger ? v : largest[c];                                                              \
      at[c] = larger ? number : at[c];                                                                   \
    }                                                                                                    \
  }                                                                                                      \
  WARPSMITH_VECTORIZE void add(const T* dy, const uint8_t* index, int64_t channels, int number, M* dx) { \
    for (int64_t c = 0; c < channels; ++c) dx[c] += index[c] == number ? to_float(dy[c]) : M(0);         \
  }                                                                                                      \
  WARPSMITH_VECTORIZE void write(const M* from, int64_t channels, T* to) {                               \
    for (int64_t c = 0; c < channels; ++c) to[c] = from_float<T>(from[c]);                               \
  }
WARPSMITH_LOOPS(float, float)
WARPSMITH_LOOPS(float16, float)
WARPSMITH_LOOPS(bfloat16, float)
WARPSMITH_LOOPS(double, double)
#undef WARPSMITH_LOOPS

// Runs row(sample, row) for each row of so many samples, in parallel.
template <class F>
void for_rows(const MaxPoolShape& p, int64_t rows, int64_t width, const Parallel& parallel, F&& row) {
  const int64_t grain = std::max<int64_t>(1, kGrainElems / std::max<int64_t>(1, width * p.channels));
  parallel(p.samples * rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) row(i / rows, static_cast<int>(i % rows));
  });
}

template <class T> void forward(const MaxPoolForwardParams& p, const Parallel& parallel) {
  using M = Arithmetic<T>;
  for_rows(p, p.out_height, p.out_width, parallel, [&](int64_t sample, int i) {
    std::vector<M> largest(static_cast<size_t>(p.channels));
    std::vector<int> at(largest.size());
    const int h0 = i * p.stride[0] - p.padding[0], top = std::max(0, -h0);
    const int bottom = std::min(p.kernel[0], p.height - h0);
    for (int j = 0; j < p.out_width; ++j) {
      const int w0 = j * p.stride[1] - p.padding[1], left = std::max(0, -w0);
      const int right = std::min(p.kernel[1], p.width - w0);
      std::fill(largest.begin(), largest.end(), -std::numeric_limits<M>::infinity());
      std::fill(at.begin(), at.end(), top * p.kernel[1] + left);
      for (int r = top; r < bottom; ++r)
        for (int c = left; c < right; ++c)
          take(static_cast<const T*>(p.x) + ((sample * p.height + h0 + r) * p.width + w0 + c) * p.x_stride, p.channels,
               r * p.kernel[1] + c, largest.data(), at.data());
      const int64_t to = ((sample * p.out_height + i) * p.out_width + j) * p.channels;
      write(largest.data(), p.channels, static_cast<T*>(p.y) + to);
      if (p.index) std::transform(at.begin(), at.end(), p.index + to, [](int n) { return static_cast<uint8_t>(n); });
    }
  });
}

template <class T> void backward(const MaxPoolBackwardParams& p, const Parallel& parallel) {
  using M = Arithmetic<T>;
  // The windows with a pixel whose place is counted with the padding.
  const auto first = [&](int place, int d) {
    return place < p.kernel[d] ? 0 : (place - p.kernel[d]) / p.stride[d] + 1;
  };
  for_rows(p, p.height, p.width, parallel, [&](int64_t sample, int row) {
    std::vector<M> buffer(static_cast<size_t>(p.channels));
    const int h = row + p.padding[0], last_row = std::min(h / p.stride[0], p.out_height - 1);
    for (int column = 0; column < p.width; ++column) {
      const int w = column + p.padding[1], last_column = std::min(w / p.stride[1], p.out_width - 1);
      T* const to = static_cast<T*>(p.dx) + ((sample * p.height + row) * p.width + column) * p.channels;
      M* dx = buffer.data();
      if constexpr (std::is_same_v<T, M>) dx = to;
      std::fill_n(dx, p.channels, M(0));
      for (int i = first(h, 0); i <= last_row; ++i)
        for (int j = first(w, 1); j <= last_column; ++j) {
          const int64_t window = (sample * p.out_height + i) * p.out_width + j;
          add(static_cast<const T*>(p.dy) + window * p.dy_stride, p.index + window * p.channels, p.channels,
              (h - i * p.stride[0]) * p.kernel[1] + w - j * p.stride[1], dx);
        }
      if (static_cast<void*>(dx) != to) write(dx, p.channels, to);
    }
  });
}

}  // namespace

Status max_pool2d_forward_cpu(const MaxPoolForwardParams& p, const Parallel& parallel) {
  return visit_cpu_dtype(p.dtype, [&]<class T>() { forward<T>(p, parallel); });
}

Status max_pool2d_backward_cpu(const MaxPoolBackwardParams& p, const Parallel& parallel) {
  return visit_cpu_dtype(p.dtype, [&]<class T>() { backward<T>(p, parallel); });
}

}  // namespace warpsmith
