#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/float8_scale.h"
#include "common/op_list.h"
#include "common/parallel.h"
#include "common/status.h"
#include "kernels/quantize/quantize_config.h"
#include "kernels/quantize/quantize_ops.h"

// Params and entry points of the quantize family. A scale is the factor that gives values back: x ~ byte * scale.
namespace warpsmith {

WARPSMITH_DEFINE_OPS(Quantize, WARPSMITH_QUANTIZE_OPS)

struct QuantizeParams {
  const void* x;            // [rows, columns], dtype; rows x_stride apart
  void* data;               // [rows, columns], float8, contiguous; null: not wanted
  void* transposed;         // [columns, rows], float8, contiguous; null: not wanted
  float* scale;             // of data; with Fp8Scaling::tensor of both. Read if `given`, else written
  float* transposed_scale;  // of transposed, not for Fp8Scaling::tensor. Read if `given`, else written
  void* column_sums;        // [columns], of x, made in float32, of sums_dtype; null: not wanted
  float* amax;              // [], zero: the largest finite magnitude of x; beside given scales; null: not wanted
  int64_t* counts;          // [2]: saturated elements, elements that are not finite; null: not wanted
  float* workspace;         // [quantize_workspace_elems(...)]; CUDA alone
  float* maxima;            // [quantize_maxima_elems(...)], zeros; CUDA alone
  // Of Fp8Scaling::row: what values are multiplied by before they are cast, so that the scales of a product's other
  // factor need no place in the sum. Null: 1.
  const float* column_factor;  // [columns], in data
  const float* row_factor;     // [factor_rows], in transposed; rows behind are multiplied by 1
  int64_t rows, columns, x_stride, factor_rows;
  Fp8Scaling scaling;
  bool given;
  bool counts_are_zeros;  // else they are cleared first
  bool power_of_two, e5m2;
  Dtype dtype, sums_dtype = Dtype::float32;
};
// Scales are [rows, 1] and [columns, 1] for Fp8Scaling::row, [rows, blocks of columns] and [columns, blocks of rows]
// for block, [blocks of rows, blocks of columns] and its transpose for block2d, all contiguous.

// amax = the largest finite magnitude of the tensor, or of each row; 0 where there is none.
struct Fp8AmaxParams {
  const void* x;  // as above
  float* amax;    // [] or [rows]
  int64_t rows, columns, x_stride;
  bool by_row;
  Dtype dtype;
};

// scale[i] = scale_of_amax(amax[i])
struct Fp8ScaleParams {
  const float* amax;  // [count]
  float* scale;       // [count]
  int64_t count;
  bool power_of_two, e5m2;
};

// y[r, c] = data[r, c] * scale[r >> row_shift, c >> column_shift], rounded to dtype.
struct DequantizeParams {
  const void* data;    // [rows, columns], float8; rows data_stride apart
  const float* scale;  // [..., scale_columns], contiguous
  void* y;             // [rows, columns], dtype, contiguous
  int64_t rows, columns, data_stride, scale_columns;
  int row_shift, column_shift;
  bool e5m2;
  Dtype dtype;
};

// transposed[c, r] = data[r, c], and 0 for rows behind: bytes, of any meaning.
struct TransposeBytesParams {
  const void* data;  // [rows, columns], contiguous
  void* transposed;  // [columns, rows_to], contiguous
  int64_t rows, columns, rows_to;
};

Status quantize_cuda(const QuantizeParams& params, void* stream);
Status quantize_cpu(const QuantizeParams& params, const Parallel& parallel);
Status fp8_amax_cuda(const Fp8AmaxParams& params, void* stream);
Status fp8_amax_cpu(const Fp8AmaxParams& params, const Parallel& parallel);
Status fp8_scale_cuda(const Fp8ScaleParams& params, void* stream);
Status fp8_scale_cpu(const Fp8ScaleParams& params, const Parallel& parallel);
Status transpose_bytes_cuda(const TransposeBytesParams& params, void* stream);
Status transpose_bytes_cpu(const TransposeBytesParams& params, const Parallel& parallel);
Status dequantize_cuda(const DequantizeParams& params, void* stream);
Status dequantize_cpu(const DequantizeParams& params, const Parallel& parallel);

constexpr QuantizeProblem problem_of(const QuantizeParams& p) {
  return {.rows = p.rows,
          .columns = p.columns,
          .element_bytes = size_bytes(p.dtype),
          .scaling = p.scaling,
          .data = p.data != nullptr,
          .transposed = p.transposed != nullptr,
          .given = p.given,
          .column_sums = p.column_sums != nullptr,
          .factors = p.column_factor != nullptr || p.row_factor != nullptr,
          .contiguous = p.x_stride == p.columns || p.rows == 1};
}
constexpr int64_t quantize_workspace_elems(const QuantizeParams& p) { return choose_quantize(problem_of(p)).workspace; }
constexpr int64_t quantize_maxima_elems(const QuantizeParams& p) { return choose_quantize(problem_of(p)).maxima; }

}  // namespace warpsmith
