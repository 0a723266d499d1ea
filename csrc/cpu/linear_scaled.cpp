#include <algorithm>
#include <cmath>

#include "common/alignment.h"
#include "common/float8_host.h"
#include "common/float8_sums.h"
#include "common/visit_dtype.h"
#include "kernels/linear/linear.h"

// Products of 8-bit floats with the bits of the Hopper kernels (kernels/linear/hopper): the same order of sums, the
// tensor core's rounding, the same arithmetic behind it.
namespace warpsmith {
namespace {

constexpr int kRows = 32, kColumns = kFloat8Columns;  // of a tile: what is decoded serves so many
constexpr int64_t kPromotedTerms = 128;               // of a stage, whose sums are added in float32; of a block's scale

// What the 256 bytes mean, and the powers of two at their exponents.
struct Meaning {
  float value[256], power[256];
};
template <class F> Meaning meaning_of() {
  using H = HostFloat8<F>;
  const float smallest = std::bit_cast<float>(static_cast<uint32_t>(128 - H::bias) << 23);
  Meaning m;
  for (int i = 0; i < 256; ++i) {
    m.value[i] = to_float(F{static_cast<uint8_t>(i)});
    m.power[i] = float8_power(m.value[i], smallest);
  }
  return m;
}

// 32 terms of rows or, turned, of columns.
struct Terms {
  alignas(64) float value[kColumns * kFloat8Terms], power[kColumns * kFloat8Terms];

  // of[i, k] lies at i * by_row + k * by_term. Zeros behind the last row and term.
  void read(const Meaning& m, const uint8_t* bytes, int64_t stride, int rows, int terms, int by_row, int by_term) {
    std::fill(std::begin(value), std::end(value), 0.0f);
    std::fill(std::begin(power), std::end(power), 0.0f);
    for (int i = 0; i < rows; ++i)
      for (int k = 0; k < terms; ++k) {
        const uint8_t byte = bytes[i * stride + k];
        value[i * by_row + k * by_term] = m.value[byte];
        power[i * by_row + k * by_term] = m.power[byte];
      }
  }
};

template <class T>
void multiply_tile(const ProductParams& p, const Meaning& of_a, const Meaning& of_b, int64_t row, int64_t column) {
  const int rows = static_cast<int>(std::min<int64_t>(kRows, p.rows - row)),
            columns = static_cast<int>(std::min<int64_t>(kColumns, p.columns - column));
  const auto *a = static_cast<const uint8_t*>(p.a) + row * 2 * p.a_stride,
             *b = static_cast<const uint8_t*>(p.b) + column * 2 * p.b_stride;
  float sums[kRows][kColumns] = {}, parts[kRows][kColumns] = {};
  Terms left, right;
  const int64_t terms = 2 * p.inner, blocks = ceil_div(terms, kPromotedTerms);
  const bool scaled = p.scales == ProductScales::blocks, adds = scaled || p.promotes;
  const auto block_scale = [&](int i, int c, int64_t block) {
    const float of_a = p.a_scale[(row + i) * blocks + block];
    return of_a *
           p.b_scale[p.b_squares ? (column + c) / kPromotedTerms * blocks + block : block * p.columns + column + c];
  };
  for (int64_t k = 0; k < terms; k += kFloat8Terms) {
    const int here = static_cast<int>(std::min<int64_t>(kFloat8Terms, terms - k));
    left.read(of_a, a + k, 2 * p.a_stride, rows, here, kFloat8Terms, 1);
    right.read(of_b, b + k, 2 * p.b_stride, columns, here, 1, kColumns);
    for (int i = 0; i < rows; ++i)
      add_float8_products(parts[i], left.value + i * kFloat8Terms, left.power + i * kFloat8Terms, right.value,
                          right.power, kColumns);
    if (!adds || ((k + kFloat8Terms) % kPromotedTerms != 0 && k + kFloat8Terms < terms)) continue;
    for (int i = 0; i < rows; ++i)
      for (int c = 0; c < columns; ++c) {
        sums[i][c] = scaled ? std::fma(parts[i][c], block_scale(i, c, k / kPromotedTerms), sums[i][c])
                            : sums[i][c] + parts[i][c];
        parts[i][c] = 0;
      }
  }
  const T* bias = static_cast<const T*>(p.bias);
  for (int i = 0; i < rows; ++i) {
    const bool by_rows = p.scales == ProductScales::rows;
    float of_row = p.a_scale && !scaled ? p.a_scale[by_rows ? row + i : 0] : 1.0f;
    if (p.scales == ProductScales::one && p.b_scale) of_row *= p.b_scale[0];
    T* out = static_cast<T*>(p.out) + (row + i) * p.columns + column;
    for (int c = 0; c < columns; ++c) {
      float sum = adds ? sums[i][c] : parts[i][c];
      if (by_rows && p.b_scale) sum *= p.b_scale[column + c];
      sum *= of_row;
      if (bias) sum += to_float(bias[column + c]);
      out[c] = from_float<T>(sum);
    }
  }
}

}  // namespace

Status float8_product_cpu(const ProductParams& p, const Parallel& parallel) {
  static const Meaning e4m3 = meaning_of<float8_e4m3>(), e5m2 = meaning_of<float8_e5m2>();
  const Meaning& of_a = p.factors == ProductFactors::e4m3 ? e4m3 : e5m2;
  const int64_t across = ceil_div(p.columns, kColumns);
  return visit_cpu_dtype(p.dtype, [&]<class T>() {
    if constexpr (sizeof(T) == 2)
      parallel(ceil_div(p.rows, kRows) * across, 1, [&](int64_t begin, int64_t end) {
        for (int64_t tile = begin; tile < end; ++tile)
          multiply_tile<T>(p, of_a, e4m3, tile / across * kRows, tile % across * kColumns);
      });
    return Status();
  });
}

}  // namespace warpsmith
