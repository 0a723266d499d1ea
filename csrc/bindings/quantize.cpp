#include "bindings/support/quantize.h"

#include "bindings/support/device.h"
#include "bindings/support/library.h"
#include "bindings/support/rows.h"
#include "bindings/support/scratch.h"

namespace warpsmith {
namespace {

constexpr const char *kQuantize = name(Quantize::quantize_fp8), *kDequantize = name(Quantize::dequantize_fp8),
                     *kAmax = "fp8_amax", *kScale = "fp8_scale";
constexpr int kWholeTensor = 62;  // a shift that leaves no index

bool is_e5m2(const char* op, const char* argument, ScalarType dtype) {
  if (dtype != ScalarType::Float8_e4m3fn && dtype != ScalarType::Float8_e5m2)
    refuse(op, argument, "float8_e4m3fn or float8_e5m2", dtype_text(dtype));
  return dtype == ScalarType::Float8_e5m2;
}

void check_float32(const char* op, const char* argument, const Tensor& t) {
  if (const ScalarType got = dtype_of(op, argument, t); got != ScalarType::Float)
    refuse(op, argument, "float32", dtype_text(got));
}

int32_t byte_code(bool e5m2) { return e5m2 ? aoti_torch_dtype_float8_e5m2() : aoti_torch_dtype_float8_e4m3fn(); }

int32_t narrow_code(Dtype dtype) {
  return dtype == Dtype::float32   ? aoti_torch_dtype_float32()
         : dtype == Dtype::float16 ? aoti_torch_dtype_float16()
                                   : aoti_torch_dtype_bfloat16();
}

std::vector<int64_t> shape_of(const Tensor& t) {
  const auto sizes = t.sizes();
  return {sizes.data(), sizes.data() + sizes.size()};
}

Tensor allocate_of(const char* what, const std::vector<int64_t>& sizes, int32_t dtype, const Tensor& like) {
  return allocate(kQuantize, what, sizes.data(), static_cast<int64_t>(sizes.size()), dtype, like);
}

// The shape of the scales of rows of `outer` followed by columns; of x, whose rows have several dimensions, or of its
// transpose.
std::vector<int64_t> scale_shape(Fp8Scaling scaling, std::vector<int64_t> shape, int64_t rows) {
  const int64_t across = ceil_div(shape.back(), kFp8Block);
  switch (scaling) {
    case Fp8Scaling::tensor: return {};
    case Fp8Scaling::row: shape.back() = 1; return shape;
    case Fp8Scaling::block: shape.back() = across; return shape;
    case Fp8Scaling::block2d: return {ceil_div(rows, kFp8Block), across};
  }
  return {};
}

}  // namespace

Casts cast_fp8(const Tensor& x_any, const std::optional<Tensor>& given_any, const CastOptions& o) {
  const Dtype x_dtype = narrow_dtype(kQuantize, "x", x_any);
  const bool e5m2 = is_e5m2(kQuantize, "dtype", o.dtype);
  const Rows x = as_rows(kQuantize, "x", x_any);
  const bool data_wanted = o.transpose != Fp8Transpose::only, transposed_wanted = o.transpose != Fp8Transpose::no;
  const std::vector<int64_t> shape = shape_of(x_any), turned = {x.columns, x.rows};
  const std::vector<int64_t> scales = scale_shape(o.scaling, shape, x.rows),
                             turned_scales = scale_shape(o.scaling, turned, x.columns);

  std::optional<Tensor> given;
  if (given_any) {
    check_float32(kQuantize, "scale", *given_any);
    if (o.scaling == Fp8Scaling::block || o.scaling == Fp8Scaling::block2d ||
        (o.scaling == Fp8Scaling::row && o.transpose == Fp8Transpose::also))
      refuse(kQuantize, "scale", "None: these scales are computed", "a tensor");
    const auto& expected = data_wanted ? scales : turned_scales;
    if (shape_of(*given_any) != expected) {
      std::string text;
      for (const int64_t size : expected) text += (text.empty() ? "" : ", ") + std::to_string(size);
      refuse(kQuantize, "scale", "shape (" + text + ")", shape_text(*given_any));
    }
    check_same_device(kQuantize, "scale", *given_any, x_any);
    given = as_contiguous(*given_any, kQuantize);
  }

  const int32_t real = aoti_torch_dtype_float32(), bytes = byte_code(e5m2);
  const bool one = o.scaling == Fp8Scaling::tensor;
  Casts casts;
  if (data_wanted) casts.data = allocate_of("data", shape, bytes, x_any);
  if (transposed_wanted) casts.transposed = allocate_of("transposed", turned, bytes, x_any);
  if (!given && (data_wanted || one)) casts.scale = allocate_of("scale", scales, real, x_any);
  if (!given && transposed_wanted && !one)
    casts.transposed_scale = allocate_of("transposed_scale", turned_scales, real, x_any);
  const OnDeviceOf device(x_any);
  const bool from_scratch = o.from_scratch && runs_kernels(x_any);  // the CPU writes all there is
  if (o.counts && from_scratch)
    casts.counts = zeros(kQuantize, "counts", 2, x_any, true);
  else if (o.counts)
    casts.counts = allocate_vector(kQuantize, "counts", 2, aoti_torch_dtype_int64(), x_any);
  if (o.column_sums)
    casts.sums = allocate_vector(kQuantize, "column_sums", x.columns, narrow_code(o.sums_dtype), x_any);
  if (o.amax) casts.amax = zeros(kQuantize, "amax", 1, x_any, false, 0);

  // Not null where there is nothing to write: an output without elements is wanted all the same.
  const auto address = [](const std::optional<Tensor>& t) -> void* {
    static char no_memory[16];
    return !t ? nullptr : t->numel() ? t->mutable_data_ptr() : no_memory;
  };
  const auto floats = [&](const std::optional<Tensor>& t) { return static_cast<float*>(address(t)); };
  float* const read = given ? static_cast<float*>(const_cast<void*>(given->const_data_ptr())) : nullptr;
  QuantizeParams p{
      .x = x.tensor.const_data_ptr(),
      .data = address(casts.data),
      .transposed = address(casts.transposed),
      .scale = read && (data_wanted || one) ? read : floats(casts.scale),
      .transposed_scale = read ? read : floats(casts.transposed_scale),
      .column_sums = address(casts.sums),
      .amax = floats(casts.amax),
      .counts = static_cast<int64_t*>(address(casts.counts)),
      .workspace = nullptr,
      .maxima = nullptr,
      .column_factor = o.column_factor ? static_cast<const float*>(o.column_factor->const_data_ptr()) : nullptr,
      .row_factor = o.row_factor ? static_cast<const float*>(o.row_factor->const_data_ptr()) : nullptr,
      .rows = x.rows,
      .columns = x.columns,
      .x_stride = x.stride,
      .factor_rows = o.row_factor ? o.row_factor->numel() : 0,
      .scaling = o.scaling,
      .given = given.has_value(),
      .counts_are_zeros = from_scratch,
      .power_of_two = o.power_of_two,
      .e5m2 = e5m2,
      .dtype = x_dtype,
      .sums_dtype = o.sums_dtype};
  std::optional<Tensor> workspace, maxima;
  run_on(
      kQuantize, x_any,
      [&](void* stream) {
        if (const int64_t elems = quantize_maxima_elems(p)) {
          maxima = zeros(kQuantize, "largest magnitudes", elems, x_any);
          p.maxima = static_cast<float*>(maxima->mutable_data_ptr());
        }
        if (const int64_t elems = quantize_workspace_elems(p)) {
          workspace = allocate_vector(kQuantize, "partial results", elems, real, x_any);
          p.workspace = static_cast<float*>(workspace->mutable_data_ptr());
        }
        return quantize_cuda(p, stream);
      },
      [&](const Parallel& threads) { return quantize_cpu(p, threads); });
  return casts;
}

RowsCast new_rows_cast(const char* op, const Tensor& y, Dtype dtype, int64_t rows, int64_t columns) {
  const int64_t sizes[2] = {rows, columns}, scales[2] = {rows, 1};
  const OnDeviceOf device(y);
  RowsCast c;
  c.data = allocate(op, "data", sizes, 2, byte_code(false), y);
  c.scale = allocate(op, "scale", scales, 2, aoti_torch_dtype_float32(), y);
  c.counts = zeros(op, "counts", 2, y, true);
  if (rows == 0 || columns == 0) torch::stable::fill_(c.scale, 1.0);
  c.to = {static_cast<uint8_t*>(c.data.mutable_data_ptr()), static_cast<float*>(c.scale.mutable_data_ptr()),
          static_cast<int64_t*>(c.counts.mutable_data_ptr())};
  c.behind = {};
  c.behind.x = y.const_data_ptr();
  c.behind.data = c.to.data, c.behind.scale = c.to.scale, c.behind.counts = c.to.counts;
  c.behind.rows = rows, c.behind.columns = c.behind.x_stride = columns;
  c.behind.scaling = Fp8Scaling::row;
  c.behind.counts_are_zeros = c.behind.power_of_two = true;
  c.behind.dtype = dtype;
  return c;
}

Quantized quantize_fp8(Tensor x, std::optional<Tensor> given, int64_t scaling, int64_t transpose, ScalarType dtype,
                       bool power_of_two, bool column_sums) {
  narrow_dtype(kQuantize, "x", x);
  const int32_t bytes = byte_code(is_e5m2(kQuantize, "dtype", dtype)), real = aoti_torch_dtype_float32();
  if (scaling < 0 || scaling >= static_cast<int64_t>(std::size(kFp8Scalings)))
    refuse(kQuantize, "scaling", "0 (row), 1 (tensor), 2 (block) or 3 (block2d)", std::to_string(scaling));
  if (transpose < 0 || transpose > 2)
    refuse(kQuantize, "transpose", "0 (no), 1 (also) or 2 (only)", std::to_string(transpose));
  const Casts c = cast_fp8(x, given,
                           {.scaling = static_cast<Fp8Scaling>(scaling),
                            .transpose = static_cast<Fp8Transpose>(transpose),
                            .dtype = dtype,
                            .power_of_two = power_of_two,
                            .counts = true,
                            .column_sums = column_sums,
                            .from_scratch = false});
  const auto or_nothing = [&](const std::optional<Tensor>& t, int32_t code) {
    return t ? *t : nothing(kQuantize, code, x);
  };
  return {or_nothing(c.data, bytes),
          or_nothing(c.scale, real),
          or_nothing(c.transposed, bytes),
          or_nothing(c.transposed_scale, real),
          *c.counts,
          or_nothing(c.sums, real)};
}

Tensor dequantize_fp8(Tensor data_any, Tensor scale_any, ScalarType dtype) {
  const ScalarType bytes = dtype_of(kDequantize, "data", data_any);
  const bool e5m2 = is_e5m2(kDequantize, "data", bytes);
  check_float32(kDequantize, "scale", scale_any);
  check_same_device(kDequantize, "scale", scale_any, data_any);
  if (dtype != ScalarType::Float && dtype != ScalarType::Half && dtype != ScalarType::BFloat16)
    refuse(kDequantize, "dtype", "float32, float16 or bfloat16", dtype_text(dtype));
  const Dtype y_dtype = dtype == ScalarType::Float  ? Dtype::float32
                        : dtype == ScalarType::Half ? Dtype::float16
                                                    : Dtype::bfloat16;
  const Rows data = as_rows(kDequantize, "data", data_any);
  DequantizeParams p{.data = data.tensor.const_data_ptr(),
                     .scale = nullptr,
                     .y = nullptr,
                     .rows = data.rows,
                     .columns = data.columns,
                     .data_stride = data.stride,
                     .scale_columns = 0,
                     .row_shift = kWholeTensor,
                     .column_shift = kWholeTensor,
                     .e5m2 = e5m2,
                     .dtype = y_dtype};
  // The shape says what one scale is for. Where two meanings have one shape they are the same.
  const std::vector<int64_t> shape = shape_of(data_any), got = shape_of(scale_any);
  const auto is = [&](Fp8Scaling scaling) { return got == scale_shape(scaling, shape, data.rows); };
  if (is(Fp8Scaling::row) || is(Fp8Scaling::block) || is(Fp8Scaling::block2d)) {
    const bool by_row = is(Fp8Scaling::row) || is(Fp8Scaling::block);
    p.row_shift = by_row ? 0 : 7;
    p.column_shift = is(Fp8Scaling::row) ? kWholeTensor : 7;
    p.scale_columns = got.back();
  } else if (!got.empty()) {
    refuse(kDequantize, "scale", "shape (), of rows, of blocks of 128 or of squares of 128 by 128 of data",
           shape_text(scale_any));
  }
  const Tensor scale = as_contiguous(scale_any, kDequantize);
  Tensor y = allocate_shaped(kDequantize, "values", data_any, narrow_code(y_dtype));
  if (data.rows == 0 || data.columns == 0) return y;
  p.scale = static_cast<const float*>(scale.const_data_ptr());
  p.y = y.mutable_data_ptr();
  run_on<dequantize_cuda, dequantize_cpu>(kDequantize, data_any, p);
  return y;
}

Tensor transposed_bytes(const char* op, const Tensor& data, int64_t rows_to) {
  const int64_t sizes[2] = {data.size(1), rows_to};
  Tensor made = allocate(op, "transposed bytes", sizes, 2, dtype_code(data), data);
  if (made.numel() == 0) return made;
  const TransposeBytesParams p{data.const_data_ptr(), made.mutable_data_ptr(), data.size(0), data.size(1), rows_to};
  run_on<transpose_bytes_cuda, transpose_bytes_cpu>(op, data, p);
  return made;
}

Tensor fp8_amax(Tensor x_any, bool by_row) {
  const Dtype dtype = narrow_dtype(kAmax, "x", x_any);
  const Rows x = as_rows(kAmax, "x", x_any);
  const int32_t real = aoti_torch_dtype_float32();
  const std::vector<int64_t> shape =
      scale_shape(by_row ? Fp8Scaling::row : Fp8Scaling::tensor, shape_of(x_any), x.rows);
  const Tensor found = allocate(kAmax, "amax", shape.data(), static_cast<int64_t>(shape.size()), real, x_any);
  const Fp8AmaxParams p{x.tensor.const_data_ptr(),
                        static_cast<float*>(found.mutable_data_ptr()),
                        x.rows,
                        x.columns,
                        x.stride,
                        by_row,
                        dtype};
  run_on<fp8_amax_cuda, fp8_amax_cpu>(kAmax, x_any, p);
  return found;
}

namespace {

Tensor scale_of(Tensor amax_any, ScalarType dtype, bool power_of_two) {
  check_float32(kScale, "amax", amax_any);
  const bool e5m2 = is_e5m2(kScale, "dtype", dtype);
  const Tensor amax = as_contiguous(amax_any, kScale);
  Tensor scale = allocate_like(kScale, "scale", amax_any);
  const Fp8ScaleParams p{static_cast<const float*>(amax.const_data_ptr()),
                         static_cast<float*>(scale.mutable_data_ptr()), amax.numel(), power_of_two, e5m2};
  run_on<fp8_scale_cuda, fp8_scale_cpu>(kScale, amax_any, p);
  return scale;
}

WARPSMITH_OPS(m) {
  m.add(
      "quantize_fp8(Tensor x, Tensor? scale, int scaling, int transpose, ScalarType dtype, bool power_of_two, "
      "bool column_sums) -> (Tensor data, Tensor new_scale, Tensor transposed, Tensor transposed_scale, Tensor counts, "
      "Tensor sums)",
      TORCH_BOX(&quantize_fp8));
  m.add("dequantize_fp8(Tensor data, Tensor scale, ScalarType dtype) -> Tensor values", TORCH_BOX(&dequantize_fp8));
  m.add("fp8_amax(Tensor x, bool by_row) -> Tensor amax", TORCH_BOX(&fp8_amax));
  m.add("fp8_scale(Tensor amax, ScalarType dtype, bool power_of_two) -> Tensor scale", TORCH_BOX(&scale_of));
}

}  // namespace
}  // namespace warpsmith
