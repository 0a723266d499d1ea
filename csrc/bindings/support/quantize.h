#pragma once
#include <optional>
#include <tuple>

#include "bindings/support/tensor.h"
#include "kernels/quantize/quantize.h"

// The raw ops of the quantize family as functions, for ops that are made of them.
namespace warpsmith {

enum class Fp8Transpose : int64_t { no, also, only };

// data, scale, transposed, transposed_scale, counts, column sums; without elements where there is nothing to return
using Quantized = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Quantized quantize_fp8(Tensor x, std::optional<Tensor> scale, int64_t scaling, int64_t transpose, ScalarType dtype,
                       bool power_of_two, bool column_sums);

// The same where only what is wanted is allocated and launched.
struct CastOptions {
  Fp8Scaling scaling;
  Fp8Transpose transpose;
  ScalarType dtype;
  bool power_of_two;
  bool counts = false, column_sums = false;
  bool amax = false;         // beside a given scale
  bool from_scratch = true;  // counts are parts of a chunk of zeros; else of memory of their own
  // Of row scales: [columns] and [at most rows], float32, contiguous (kernels/quantize/quantize.h).
  const Tensor *column_factor = nullptr, *row_factor = nullptr;
  Dtype sums_dtype = Dtype::float32;  // of column_sums
};
struct Casts {
  std::optional<Tensor> data, scale, transposed, transposed_scale, counts, sums, amax;
};
Casts cast_fp8(const Tensor& x, const std::optional<Tensor>& scale, const CastOptions& options);

// What the producer of y writes as the cast of its rows, and the params of a cast behind it, where it does not.
struct RowsCast {
  Tensor data, scale, counts;
  Float8Rows to;
  QuantizeParams behind;
};
RowsCast new_rows_cast(const char* op, const Tensor& y, Dtype dtype, int64_t rows, int64_t columns);

Tensor dequantize_fp8(Tensor data, Tensor scale, ScalarType dtype);
Tensor fp8_amax(Tensor x, bool by_row);
// A contiguous matrix of bytes, transposed; rows_to: with so many rows, the last of zeros.
Tensor transposed_bytes(const char* op, const Tensor& data, int64_t rows_to);

// No float64: the law of a scale is that of float32.
inline Dtype narrow_dtype(const char* op, const char* argument, const Tensor& t) {
  switch (dtype_of(op, argument, t)) {
    case ScalarType::Float: return Dtype::float32;
    case ScalarType::Half: return Dtype::float16;
    case ScalarType::BFloat16: return Dtype::bfloat16;
    default: refuse(op, argument, "float32, float16 or bfloat16", dtype_text(t.scalar_type()));
  }
}

}  // namespace warpsmith
