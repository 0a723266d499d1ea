#pragma once
#include <cstdint>
#include <optional>
#include <tuple>

#include "warpsmith/detail/quantize_ops.h"
#include "warpsmith/op.h"

// Casts to 8-bit floats with scales, and back. Not differentiable: the results require no gradient.
namespace warpsmith {

// What has a scale of its own. By their numbers in the schemas.
enum class Fp8Scaling : int64_t {
#define WARPSMITH_ROW(scaling, ...) scaling,
  WARPSMITH_FP8_SCALINGS(WARPSMITH_ROW)
#undef WARPSMITH_ROW
};
enum class Fp8Transpose : int64_t { no, also, only };

struct Fp8Options {
  at::ScalarType dtype = at::kFloat8_e4m3fn;       // or kFloat8_e5m2
  std::optional<at::Tensor> scale = std::nullopt;  // given: for tensor, and for row with one kind of bytes
  Fp8Transpose transpose = Fp8Transpose::no;
  bool power_of_two = true;
  bool column_sums = false;
};

// data.to(float32) * scale is nearly x. Undefined: not asked for.
struct Fp8Tensor {
  at::Tensor data, scale;                   // data: of the shape of x
  at::Tensor transposed, transposed_scale;  // transposed: (columns, rows), contiguous
  at::Tensor counts;                        // int64: how many elements were saturated, and how many were not finite
  at::Tensor column_sums;                   // (columns,), float32, in a fixed order: of a gradient, that of the bias
};

// x: (..., K), float32, float16 or bfloat16, any strides. The shapes of scales are those of Python's quantize_fp8.
inline Fp8Tensor quantize_fp8(const at::Tensor& x, Fp8Scaling scaling = Fp8Scaling::row,
                              const Fp8Options& options = {}) {
  using Signature = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
      const at::Tensor&, const std::optional<at::Tensor>&, int64_t, int64_t, at::ScalarType, bool, bool);
  static const auto op = detail::find_op<Signature>("warpsmith::quantize_fp8");
  const auto given = detail::is_given(options.scale) ? options.scale : std::nullopt;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto [data, scale, transposed, transposed_scale, counts, sums] =
      op.call(x, given, static_cast<int64_t>(scaling), static_cast<int64_t>(options.transpose), options.dtype,
              options.power_of_two, options.column_sums);
  Fp8Tensor t;
  t.counts = counts;
  if (options.column_sums) t.column_sums = sums;
  const at::Tensor of_data = given ? *given : scale;
  if (options.transpose != Fp8Transpose::only) {
    t.data = data;
    t.scale = of_data;
  }
  if (options.transpose != Fp8Transpose::no) {
    t.transposed = transposed;
    t.transposed_scale = given || scaling == Fp8Scaling::tensor ? of_data : transposed_scale;
  }
  return t;
}

// data * scale, rounded once. The shape of the scale says what one scale is for. dtype: float32, float16 or bfloat16.
inline at::Tensor dequantize_fp8(const at::Tensor& data, const at::Tensor& scale, at::ScalarType dtype = at::kFloat) {
  static const auto op =
      detail::find_op<at::Tensor(const at::Tensor&, const at::Tensor&, at::ScalarType)>("warpsmith::dequantize_fp8");
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return op.call(data, scale, dtype);
}

}  // namespace warpsmith
