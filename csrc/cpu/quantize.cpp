#include "kernels/quantize/quantize.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "common/float8_host.h"
#include "common/vectorize.h"
#include "common/visit_dtype.h"

namespace warpsmith {
namespace {

// |x| as the bits of a float, or 0 where x is not finite: integers, whose maximum the compiler vectorises.
inline uint32_t finite_magnitude(float x) {
  const uint32_t magnitude = std::bit_cast<uint32_t>(x) & 0x7fffffff;
  return magnitude < 0x7f800000 ? magnitude : 0;
}

struct Counts {
  int64_t saturated = 0, not_finite = 0;
};

// The byte of x, and whether it is saturated or not finite.
template <class F> inline uint8_t cast(float x, float scale, uint32_t& saturated, uint32_t& not_finite) {
  constexpr Float8Limits limits = HostFloat8<F>::limits;
  const float q = x / scale;
  const uint32_t x_bits = std::bit_cast<uint32_t>(x), m = x_bits & 0x7fffffff;
  const uint32_t q_magnitude = std::bit_cast<uint32_t>(q) & 0x7fffffff;
  const bool infinite = m == 0x7f800000, is_nan = m > 0x7f800000 || q_magnitude > 0x7f800000;
  not_finite += m >= 0x7f800000;
  saturated += m < 0x7f800000 && q_magnitude > limits.largest_bits && q_magnitude <= 0x7f800000;
  const uint32_t infinity = limits.has_infinity ? 0x7c | (x_bits >> 24 & 0x80) : 0x7f;
  const uint32_t rounded = round_float8<F>(q);
  return static_cast<uint8_t>(is_nan ? 0x7f : infinite ? infinity : rounded);
}

// Free functions, one per dtype: target_clones reaches neither lambdas nor templates.
#define WARPSMITH_LOOPS(T)                                                                             \
  WARPSMITH_VECTORIZE uint32_t largest_of(const T* x, int64_t count) {                                 \
    uint32_t most = 0;                                                                                 \
    for (int64_t i = 0; i < count; ++i) {                                                              \
      const uint32_t m = finite_magnitude(to_float(x[i]));                                             \
      most = m > most ? m : most;                                                                      \
    }                                                                                                  \
    return most;                                                                                       \
  }                                                                                                    \
  WARPSMITH_VECTORIZE void largest_of_each(const T* x, uint32_t* most, int64_t count) {                \
    for (int64_t i = 0; i < count; ++i) most[i] = std::max(most[i], finite_magnitude(to_float(x[i]))); \
  }                                                                                                    \
  WARPSMITH_VECTORIZE void add_row(const T* x, float* sums, int64_t count) {                           \
    for (int64_t i = 0; i < count; ++i) sums[i] += to_float(x[i]);                                     \
  }                                                                                                    \
  WARPSMITH_CAST(T, float8_e4m3)                                                                       \
  WARPSMITH_CAST(T, float8_e5m2)
// A scale for all values, or one for each. At most 2^31 values.
#define WARPSMITH_CAST(T, F)                                                                                  \
  WARPSMITH_VECTORIZE void cast_all(const T* x, float scale, F* y, int64_t count, Counts& counts) {           \
    uint32_t saturated = 0, not_finite = 0;                                                                   \
    for (int64_t i = 0; i < count; ++i) y[i].bits = cast<F>(to_float(x[i]), scale, saturated, not_finite);    \
    counts.saturated += saturated;                                                                            \
    counts.not_finite += not_finite;                                                                          \
  }                                                                                                           \
  WARPSMITH_VECTORIZE void cast_each(const T* x, const float* scale, F* y, int64_t count, Counts& counts) {   \
    uint32_t saturated = 0, not_finite = 0;                                                                   \
    for (int64_t i = 0; i < count; ++i) y[i].bits = cast<F>(to_float(x[i]), scale[i], saturated, not_finite); \
    counts.saturated += saturated;                                                                            \
    counts.not_finite += not_finite;                                                                          \
  }
WARPSMITH_LOOPS(float)
WARPSMITH_LOOPS(float16)
WARPSMITH_LOOPS(bfloat16)
#undef WARPSMITH_LOOPS
#undef WARPSMITH_CAST

#define WARPSMITH_DEQUANTIZE(T, F)                                                           \
  WARPSMITH_VECTORIZE void dequantize_all(const F* data, float scale, T* y, int64_t count) { \
    for (int64_t i = 0; i < count; ++i) y[i] = from_float<T>(to_float(data[i]) * scale);     \
  }
WARPSMITH_DEQUANTIZE(float, float8_e4m3)
WARPSMITH_DEQUANTIZE(float, float8_e5m2)
WARPSMITH_DEQUANTIZE(float16, float8_e4m3)
WARPSMITH_DEQUANTIZE(float16, float8_e5m2)
WARPSMITH_DEQUANTIZE(bfloat16, float8_e4m3)
WARPSMITH_DEQUANTIZE(bfloat16, float8_e5m2)
#undef WARPSMITH_DEQUANTIZE

constexpr int64_t kChunk = 4096;  // elements that a thread takes at least

int64_t grain(int64_t elems) { return std::max<int64_t>(1, kChunk / std::max<int64_t>(1, elems)); }

float as_float(uint32_t bits) { return std::bit_cast<float>(bits); }

template <class T> struct Matrix {
  const T* x;
  int64_t rows, columns, stride;
  const T* at(int64_t r, int64_t c) const { return x + r * stride + c; }
};
template <class T> Matrix<T> matrix_of(const void* x, int64_t rows, int64_t columns, int64_t stride) {
  return {static_cast<const T*>(x), rows, columns, stride};
}

// Of each row. The maximum has no order.
template <class T> std::vector<uint32_t> row_amax(const Matrix<T>& m, const Parallel& parallel) {
  std::vector<uint32_t> most(m.rows);
  parallel(m.rows, grain(m.columns), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) most[r] = largest_of(m.at(r, 0), m.columns);
  });
  return most;
}

template <class T> uint32_t amax(const Matrix<T>& m, const Parallel& parallel) {
  uint32_t most = 0;
  for (const uint32_t row : row_amax(m, parallel)) most = std::max(most, row);
  return most;
}

// The scales and bytes of one direction.
template <class T, class F> class Caster {
 public:
  Caster(const QuantizeParams& p, const Parallel& parallel)
      : p_(p), m_(matrix_of<T>(p.x, p.rows, p.columns, p.x_stride)), parallel_(parallel) {
    if (p.counts) p.counts[0] = p.counts[1] = 0;
    if (p.amax) *p.amax = as_float(amax(m_, parallel));
    if (p.scaling == Fp8Scaling::tensor && !p.given) *p.scale = scale_of(amax(m_, parallel));
    if (p.scaling == Fp8Scaling::block2d) squares();
    if (p.data) rows();
    if (p.transposed) columns();
    if (p.column_sums) sums();
  }

 private:
  float scale_of(uint32_t bits) const { return scale_of_amax(as_float(bits), HostFloat8<F>::limits, p_.power_of_two); }

  // Each element is counted in one direction alone.
  void add(const Counts& counts) const {
    if (!p_.counts) return;
    std::atomic_ref(p_.counts[0]) += counts.saturated;
    std::atomic_ref(p_.counts[1]) += counts.not_finite;
  }

  void squares() const {
    const int64_t down = ceil_div(m_.rows, kFp8Block), across = ceil_div(m_.columns, kFp8Block);
    parallel_(down, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        for (int64_t j = 0; j < across; ++j) {
          uint32_t most = 0;
          for (int64_t r = i * kFp8Block; r < std::min(m_.rows, (i + 1) * kFp8Block); ++r)
            most = std::max(most, largest_of(m_.at(r, j * kFp8Block), width(j)));
          if (p_.data) p_.scale[i * across + j] = scale_of(most);
          if (p_.transposed) p_.transposed_scale[j * down + i] = scale_of(most);
        }
    });
  }

  int64_t width(int64_t block) const { return std::min(kFp8Block, m_.columns - block * kFp8Block); }

  void rows() const {
    const int64_t across = ceil_div(m_.columns, kFp8Block);
    parallel_(m_.rows, grain(m_.columns), [&](int64_t begin, int64_t end) {
      Counts counts;
      std::vector<float> scaled(p_.column_factor ? m_.columns : 0);
      for (int64_t r = begin; r < end; ++r) {
        F* y = static_cast<F*>(p_.data) + r * m_.columns;
        if (p_.column_factor) {
          for (int64_t c = 0; c < m_.columns; ++c) scaled[c] = to_float(*m_.at(r, c)) * p_.column_factor[c];
          if (!p_.given) p_.scale[r] = scale_of(largest_of(scaled.data(), m_.columns));
          cast_all(scaled.data(), p_.scale[r], y, m_.columns, counts);
          continue;
        }
        if (p_.scaling == Fp8Scaling::tensor || p_.scaling == Fp8Scaling::row) {
          float* scale = p_.scale + (p_.scaling == Fp8Scaling::row ? r : 0);
          if (p_.scaling == Fp8Scaling::row && !p_.given) *scale = scale_of(largest_of(m_.at(r, 0), m_.columns));
          cast_all(m_.at(r, 0), *scale, y, m_.columns, counts);
          continue;
        }
        const bool square = p_.scaling == Fp8Scaling::block2d;
        for (int64_t j = 0; j < across; ++j) {
          const T* x = m_.at(r, j * kFp8Block);
          float* scale = p_.scale + (square ? r / kFp8Block : r) * across + j;
          if (!square) *scale = scale_of(largest_of(x, width(j)));
          cast_all(x, *scale, y + j * kFp8Block, width(j), counts);
        }
      }
      add(counts);
    });
  }

  // n values of row r by its factor.
  const float* scaled_row(int64_t r, int64_t first, int64_t n, float* to) const {
    const float factor = r < p_.factor_rows ? p_.row_factor[r] : 1.0f;
    for (int64_t c = 0; c < n; ++c) to[c] = to_float(*m_.at(r, first + c)) * factor;
    return to;
  }

  // A thread takes columns, kFp8Block at a time, and turns squares of bytes.
  void columns() const {
    const int64_t down = ceil_div(m_.rows, kFp8Block), across = ceil_div(m_.columns, kFp8Block);
    parallel_(across, grain(m_.rows * kFp8Block), [&](int64_t begin, int64_t end) {
      Counts counts;
      F bytes[kFp8Block][kFp8Block];
      float scale[kFp8Block], scaled[kFp8Block];
      for (int64_t j = begin; j < end; ++j) {
        const int64_t first = j * kFp8Block, n = width(j);
        const auto column_scales = [&](int64_t from, int64_t to, int64_t stride, int64_t block) {
          uint32_t most[kFp8Block] = {};
          for (int64_t r = from; r < to; ++r) {
            if (p_.row_factor)
              largest_of_each(scaled_row(r, first, n, scaled), most, n);
            else
              largest_of_each(m_.at(r, first), most, n);
          }
          for (int64_t c = 0; c < n; ++c) p_.transposed_scale[(first + c) * stride + block] = scale_of(most[c]);
        };
        if (p_.scaling == Fp8Scaling::row && !p_.given) column_scales(0, m_.rows, 1, 0);
        for (int64_t i = 0; i < down; ++i) {
          const int64_t top = i * kFp8Block, height = std::min(kFp8Block, m_.rows - top);
          if (p_.scaling == Fp8Scaling::block) column_scales(top, top + height, down, i);
          for (int64_t c = 0; c < n; ++c) switch (p_.scaling) {
              case Fp8Scaling::tensor: scale[c] = *p_.scale; break;
              case Fp8Scaling::row: scale[c] = p_.transposed_scale[first + c]; break;
              case Fp8Scaling::block: scale[c] = p_.transposed_scale[(first + c) * down + i]; break;
              case Fp8Scaling::block2d: scale[c] = p_.transposed_scale[j * down + i]; break;
            }
          for (int64_t r = 0; r < height; ++r) {
            if (p_.row_factor)
              cast_each(scaled_row(top + r, first, n, scaled), scale, bytes[r], n, counts);
            else
              cast_each(m_.at(top + r, first), scale, bytes[r], n, counts);
          }
          for (int64_t c = 0; c < n; ++c) {
            F* y = static_cast<F*>(p_.transposed) + (first + c) * m_.rows + top;
            for (int64_t r = 0; r < height; ++r) y[r] = bytes[r][c];
          }
        }
      }
      if (!p_.data) add(counts);
    });
  }

  // Sums of groups of 128 rows, and those of pieces of 8: rounding errors grow with the terms of one chain.
  void sums() const {
    constexpr int64_t kPiece = 8;
    parallel_(ceil_div(m_.columns, kFp8Block), grain(m_.rows * kFp8Block), [&](int64_t begin, int64_t end) {
      for (int64_t j = begin; j < end; ++j) {
        const int64_t first = j * kFp8Block, n = width(j);
        float all[kFp8Block] = {};
        for (int64_t top = 0; top < m_.rows; top += kFp8Block) {
          float group[kFp8Block] = {};
          for (int64_t r = top; r < std::min(m_.rows, top + kFp8Block); r += kPiece) {
            float piece[kFp8Block] = {};
            for (int64_t k = r; k < std::min({m_.rows, top + kFp8Block, r + kPiece}); ++k)
              add_row(m_.at(k, first), piece, n);
            for (int64_t c = 0; c < n; ++c) group[c] += piece[c];
          }
          for (int64_t c = 0; c < n; ++c) all[c] += group[c];
        }
        (void)visit_cuda_dtype(p_.sums_dtype, [&]<class S>() {
          for (int64_t c = 0; c < n; ++c) static_cast<S*>(p_.column_sums)[first + c] = from_float<S>(all[c]);
        });
      }
    });
  }

  const QuantizeParams& p_;
  Matrix<T> m_;
  const Parallel& parallel_;
};

}  // namespace

Status quantize_cpu(const QuantizeParams& p, const Parallel& parallel) {
  return visit_cuda_dtype(p.dtype, [&]<class T>() {
    if (p.e5m2)
      Caster<T, float8_e5m2>(p, parallel);
    else
      Caster<T, float8_e4m3>(p, parallel);
  });
}

Status fp8_amax_cpu(const Fp8AmaxParams& p, const Parallel& parallel) {
  return visit_cuda_dtype(p.dtype, [&]<class T>() {
    const auto m = matrix_of<T>(p.x, p.rows, p.columns, p.x_stride);
    if (!p.by_row)
      *p.amax = as_float(amax(m, parallel));
    else
      std::ranges::transform(row_amax(m, parallel), p.amax, as_float);
  });
}

Status fp8_scale_cpu(const Fp8ScaleParams& p, const Parallel&) {
  for (int64_t i = 0; i < p.count; ++i)
    p.scale[i] = scale_of_amax(p.amax[i], p.e5m2 ? kE5m2Limits : kE4m3Limits, p.power_of_two);
  return {};
}

Status transpose_bytes_cpu(const TransposeBytesParams& p, const Parallel& parallel) {
  const auto* from = static_cast<const uint8_t*>(p.data);
  auto* to = static_cast<uint8_t*>(p.transposed);
  parallel(ceil_div(p.columns, kFp8Block), grain(p.rows_to * kFp8Block), [&](int64_t begin, int64_t end) {
    for (int64_t c = begin * kFp8Block; c < std::min(p.columns, end * kFp8Block); ++c) {
      for (int64_t r = 0; r < p.rows; ++r) to[c * p.rows_to + r] = from[r * p.columns + c];
      std::fill(to + c * p.rows_to + p.rows, to + (c + 1) * p.rows_to, uint8_t{0});
    }
  });
  return {};
}

Status dequantize_cpu(const DequantizeParams& p, const Parallel& parallel) {
  return visit_cuda_dtype(p.dtype, [&]<class T>() {
    const auto rows = [&]<class F>(F) {
      parallel(p.rows, grain(p.columns), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r)
          for (int64_t c = 0; c < p.columns;) {
            const int64_t block = c >> p.column_shift;
            const int64_t count = p.column_shift > 30 ? p.columns : std::min(p.columns - c, kFp8Block);
            dequantize_all(static_cast<const F*>(p.data) + r * p.data_stride + c,
                           p.scale[(r >> p.row_shift) * p.scale_columns + block],
                           static_cast<T*>(p.y) + r * p.columns + c, count);
            c += count;
          }
      });
    };
    p.e5m2 ? rows(float8_e5m2{}) : rows(float8_e4m3{});
  });
}

}  // namespace warpsmith
