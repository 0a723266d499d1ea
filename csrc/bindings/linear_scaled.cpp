#include <array>

#include "bindings/support/library.h"
#include "bindings/support/linear.h"
#include "bindings/support/product.h"
#include "bindings/support/quantize.h"
#include "bindings/support/scratch.h"
#include "kernels/linear/own_product.h"

#ifdef WARPSMITH_CUDA
// Absent in CPU builds of torch; reached only with a CUDA tensor in hand.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_cuda__scaled_mm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2,
                               AtenTensorHandle scale_a, AtenTensorHandle scale_b, AtenTensorHandle* bias,
                               AtenTensorHandle* scale_result, int32_t* out_dtype, int32_t use_fast_accum);
#endif

// scaled_linear: a linear layer whose products are of 8-bit floats. The casts are the quantize family's. The products
// are our own, where they were measured to pay or WARPSMITH_OWN_PRODUCT=1 asks for them, on the CPU with the bits of a
// card; else cuBLASLt's, by plans that are kept; of blocks, and without it, torch's _scaled_mm; or, emulated, what they
// mean: dequantized values multiplied in float32.
//
// Scales of rows and of tensors take one cast of x and one of the weight: the products of the gradients read the same
// bytes, transposed. A row's scale then lies along the sum. It is absorbed: the gradient is multiplied by it before it
// is cast, and that factor of the product has scales of ones (docs/fp8.md).
namespace warpsmith {
namespace {

using OptionalTensor = std::optional<Tensor>;

constexpr ScalarType kE4m3 = ScalarType::Float8_e4m3fn;
constexpr int64_t kSizeMultiple = 16;  // of the sizes of a product of 8-bit floats

struct ScaledOptions {
  Fp8Scaling activations, weights;
  ScaledAccumulate accumulate;
  bool grad_e5m2 = false, wgrad_high = false, power_of_two = false, emulate = false, watch = false;
};

ScaledOptions options_of(const char* op, int64_t options) {
  const int64_t scaling = options & 3, accumulate = options >> 2 & 3;
  if (options < 0 || options >= 512 || scaling == 3 || accumulate == 3)
    refuse(op, "options", "the options of a recipe, as linear_ops.h has them", std::to_string(options));
  const auto of = static_cast<Fp8Scaling>(scaling);
  ScaledOptions o{.activations = of,
                  .weights = of == Fp8Scaling::block ? Fp8Scaling::block2d : of,
                  .accumulate = static_cast<ScaledAccumulate>(accumulate)};
#define WARPSMITH_ROW(flag, bit) o.flag = options & bit;
  WARPSMITH_SCALED_FLAGS(WARPSMITH_ROW)
#undef WARPSMITH_ROW
  return o;
}

// ---- checks

void check_of(const char* op, const char* argument, const Tensor& t, ScalarType dtype,
              std::initializer_list<int64_t> shape, const Tensor& like) {
  if (const ScalarType got = dtype_of(op, argument, t); got != dtype)
    refuse(op, argument, dtype_text(dtype), dtype_text(got));
  check_shape(op, argument, t, shape);
  check_same_device(op, argument, t, like);
}

// One scale of a tensor, for the recipe that has such scales.
void check_given(const char* op, const char* argument, const OptionalTensor& scale, const ScaledOptions& options,
                 const Tensor& like) {
  if (!scale) return;
  if (options.activations != Fp8Scaling::tensor) refuse(op, argument, "None: these scales are computed", "a tensor");
  check_of(op, argument, *scale, ScalarType::Float, {}, like);
}

// Bytes of a weight and their scales, both or neither.
void check_bytes(const char* op, const char* data_name, const char* scale_name, const OptionalTensor& data,
                 const OptionalTensor& scale, int64_t rows, int64_t columns, const ScaledOptions& options,
                 const Tensor& like) {
  if (data.has_value() != scale.has_value())
    refuse(op, scale_name, std::string(data ? "a tensor" : "None") + " beside " + data_name,
           data ? "None" : "a tensor");
  if (!data) return;
  check_of(op, data_name, *data, kE4m3, {rows, columns}, like);
  if (!data->is_contiguous()) refuse(op, data_name, "a contiguous tensor", "other strides");
  switch (options.weights) {
    case Fp8Scaling::tensor: return check_of(op, scale_name, *scale, ScalarType::Float, {}, like);
    case Fp8Scaling::row: return check_of(op, scale_name, *scale, ScalarType::Float, {rows, 1}, like);
    case Fp8Scaling::block:
      return check_of(op, scale_name, *scale, ScalarType::Float, {rows, ceil_div(columns, kFp8Block)}, like);
    default:
      check_of(op, scale_name, *scale, ScalarType::Float, {ceil_div(rows, kFp8Block), ceil_div(columns, kFp8Block)},
               like);
  }
}

struct ScaledLayer {
  int64_t in, out;
};

ScaledLayer check_features(const char* op, const Tensor& weight) {
  const ScaledLayer layer{weight.size(1), weight.size(0)};
  const auto multiple = [&](const char* what, int64_t n) {
    if (n % kSizeMultiple) refuse(op, "weight", std::string(what) + " that are a multiple of 16", std::to_string(n));
  };
  multiple("in_features", layer.in);
  multiple("out_features", layer.out);
  return layer;
}

// `of` is the tensor whose last dimension is `size`, in_features or out_features.
ScaledLayer check_weight(const char* op, const Tensor& weight, const Tensor& of, bool by_out) {
  const Dtype dtype = narrow_dtype(op, by_out ? "dy" : "x", of);
  if (of.dim() == 0) refuse(op, by_out ? "dy" : "x", "at least one dimension", "a tensor without dimensions");
  check_dtype_beside(op, "weight", weight, dtype);
  const int64_t size = of.size(of.dim() - 1);
  if (weight.dim() != 2 || weight.size(by_out ? 0 : 1) != size)
    refuse(op, "weight", by_out ? "shape (" + std::to_string(size) + ", K)" : "shape (N, " + std::to_string(size) + ")",
           shape_text(weight));
  const ScaledLayer layer = check_features(op, weight);
  check_same_device(op, "weight", weight, of);
  return layer;
}

void check_bias(const char* op, const OptionalTensor& bias, int64_t out, const Tensor& like) {
  if (!bias) return;
  check_dtype_beside(op, "bias", *bias, narrow_dtype(op, "x", like));
  check_shape(op, "bias", *bias, {out});
  check_same_device(op, "bias", *bias, like);
}

// ---- casts and products

// A factor of a product, along whose rows is summed.
struct Operand {
  Tensor data;           // [rows, terms], contiguous
  OptionalTensor scale;  // of the tensor, of its rows, of 128 terms of each, or of squares of 128 by 128; none: ones
};

int64_t whole_sixteens(int64_t rows) { return ceil_div(rows, kSizeMultiple) * kSizeMultiple; }

// The rows of t, or its columns as rows.
Operand cast(const Tensor& t, const OptionalTensor& scale, Fp8Scaling scaling, bool columns,
             const ScaledOptions& options) {
  const Casts c = cast_fp8(t, scale,
                           {.scaling = scaling,
                            .transpose = columns ? Fp8Transpose::only : Fp8Transpose::no,
                            .dtype = kE4m3,
                            .power_of_two = options.power_of_two});
  const OptionalTensor& made = columns && scaling != Fp8Scaling::tensor ? c.transposed_scale : c.scale;
  return {columns ? *c.transposed : *c.data, scale ? *scale : *made};
}

Tensor as_float32(const char* op, const Tensor& added) {
  return as_contiguous(in_dtype(op, "what is added", added, aoti_torch_dtype_float32()), op);
}

// What a product adds: a bias, or a matrix like `out`.
bool is_matrix(const OptionalTensor& added) { return added && added->dim() == 2; }

void add_behind(const Tensor& out, const Tensor& added) {
  torch::stable::copy_(const_cast<Tensor&>(out), torch::stable::subtract(out, added, -1.0));
}

void multiply_emulated(const char* op, const Operand& a, const Operand& b, const OptionalTensor& added,
                       const Tensor& out) {
  const auto values = [&](const Operand& o) {
    const int64_t rows = o.data.size(0);
    return dequantize_fp8(o.data, o.scale ? *o.scale : matrix_view(ones(op, rows, o.data), 0, rows, 1, 1),
                          ScalarType::Float);
  };
  const Tensor left = values(a), right = transposed(values(b));
  const int32_t wide = aoti_torch_dtype_float32();
  const Tensor sums = dtype_code(out) == wide ? out : allocate_shaped(op, "a product in float32", out, wide);
  if (added)
    multiply_add(sums, as_float32(op, *added), left, right);
  else
    multiply(sums, left, right);
  if (dtype_code(out) != wide) torch::stable::copy_(const_cast<Tensor&>(out), sums);
}

// out = a @ b^T + bias, of the dtype of out, by our own kernels or, on the CPU, with their bits. False, and nothing is
// written, where they were not asked for or cannot.
bool multiply_by_own(const char* op, const Operand& a, const Operand& b, const OptionalTensor& bias, const Tensor& out,
                     const ScaledOptions& options) {
  const bool on_cpu = !runs_kernels(out);
  if (!on_cpu && !may_be_own(out)) return false;
  const auto values = [](const OptionalTensor& scale) {
    return scale ? static_cast<const float*>(scale->const_data_ptr()) : nullptr;
  };
  const int64_t terms = a.data.size(1), pairs = terms / 2;
  ProductParams p{.a = a.data.const_data_ptr(), .b = b.data.const_data_ptr(), .a_stride = pairs, .b_stride = pairs};
  p.out = out.mutable_data_ptr();
  p.bias = const_at(bias);
  p.rows = out.size(0);
  p.columns = out.size(1);
  p.inner = pairs;
  p.dtype = float_dtype(op, "out", out);
  p.factors = a.data.scalar_type() == kE4m3 ? ProductFactors::e4m3 : ProductFactors::e5m2;
  p.a_scale = values(a.scale);
  p.b_scale = values(b.scale);
  OptionalTensor turned;
  if (options.activations == Fp8Scaling::block) {  // a: 128 terms of a row; b: these, or squares
    p.scales = ProductScales::blocks;
    p.b_squares = b.scale->size(0) != b.data.size(0);
    if (!p.b_squares) turned = as_contiguous(transposed(*b.scale), op);
    if (turned) p.b_scale = values(turned);
  } else if (options.activations == Fp8Scaling::row) {
    p.scales = ProductScales::rows;
  }
  p.promotes = !accumulates_fast(options.accumulate, terms, false);
  if (on_cpu) {
    if (size_bytes(p.dtype) != 2) return false;
    ++own_products_launched();
    run_on(
        op, out, [](void*) { return Status(); },
        [&](const Parallel& threads) { return float8_product_cpu(p, threads); });
    return true;
  }
#if defined(WARPSMITH_CUDA) || defined(WARPSMITH_SIM)
  return run_own_product(op, out, p);
#else
  return false;
#endif
}

// As cuBLASLt reads scales and the bias: from 16 bytes on.
Tensor aligned(const char* op, const Tensor& t) {
  if (on_16_bytes(t.const_data_ptr())) return t;
  const Tensor copy = allocate_like(op, "an aligned copy", t);
  torch::stable::copy_(const_cast<Tensor&>(copy), t);
  return copy;
}

#ifdef WARPSMITH_CUDA
Tensor view_of(const Tensor& t, int64_t offset, const std::array<int64_t, 3>& sizes,
               const std::array<int64_t, 3>& strides) {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(t.get(), 3, sizes.data(), strides.data(), offset, &handle));
  return Tensor(handle);
}

// Scales of blocks as cuBLASLt reads them: [rows, blocks of terms], rows adjacent. Those of a square are repeated for
// each of its rows, since two kinds of factors would need a second layout, whose strides differ between torch's
// versions.
Tensor block_scales(const char* op, const Operand& a) {
  const Tensor& scale = *a.scale;
  const int64_t rows = a.data.size(0), blocks = scale.size(1);
  const int64_t sizes[2] = {blocks, rows};
  const Tensor turned = allocate(op, "scales of blocks", sizes, 2, aoti_torch_dtype_float32(), a.data);
  const auto fill = [&](int64_t from, int64_t count, int64_t high, int64_t scale_row) {
    if (count * high == 0) return;
    Tensor to = view_of(turned, from, {blocks, count, high}, {rows, high, 1});
    torch::stable::copy_(to, view_of(scale, scale_row * blocks, {blocks, count, high}, {1, blocks, 0}));
  };
  if (scale.size(0) == rows) {
    fill(0, rows, 1, 0);
  } else {
    const int64_t whole = rows / kFp8Block;
    fill(0, whole, kFp8Block, 0);
    fill(whole * kFp8Block, 1, rows % kFp8Block, whole);
  }
  return matrix_view(turned, 0, rows, blocks, 1, rows);
}

// out = a @ b^T + added by a kept plan of cuBLASLt. False, and nothing is written, where it has none.
bool multiply_by_plan(const char* op, const Operand& a, const Operand& b, const OptionalTensor& added,
                      const Tensor& out, const ScaledOptions& options) {
  const auto factor = [&](const Operand& o) {
    return aligned(op, o.scale ? *o.scale : ones(op, o.data.size(0), o.data));
  };
  return multiply_scaled_bytes(op, out, a.data, b.data, factor(a), factor(b), added,
                               options.activations == Fp8Scaling::row,
                               accumulates_fast(options.accumulate, a.data.size(1), false));
}

void multiply_on_card(const char* op, const Operand& a, const Operand& b, const OptionalTensor& added,
                      const Tensor& out, const ScaledOptions& options) {
  int32_t code = dtype_code(out);
  const bool wide = code == aoti_torch_dtype_float32();
  const bool blocks = options.activations == Fp8Scaling::block;
  const bool behind = added && (wide || is_matrix(added));  // cuBLASLt adds a matrix of 16 bits itself, if it can
  if (!blocks && !wide && multiply_by_plan(op, a, b, added, out, options)) return;
  if (!blocks && (wide || behind) && multiply_by_plan(op, a, b, std::nullopt, out, options)) {
    if (behind) add_behind(out, *added);
    return;
  }
  if (!aoti_torch_cuda__scaled_mm_out)
    refuse(op, "emulate", "True with this build of torch, which does not share its 8-bit products", "False");
  const auto scale_of = [&](const Operand& o) {
    if (blocks) return block_scales(op, o);
    const int64_t rows = o.data.size(0);
    return o.scale ? *o.scale : matrix_view(ones(op, rows, o.data), 0, rows, 1, 1);
  };
  const Tensor scale_a = aligned(op, scale_of(a)), of_b = aligned(op, scale_of(b));
  const Tensor scale_b = options.activations == Fp8Scaling::tensor ? of_b : transposed(of_b);
  AtenTensorHandle handle = added ? added->get() : nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_cuda__scaled_mm_out(out.get(), a.data.get(), transposed(b.data).get(),
                                                        scale_a.get(), scale_b.get(),
                                                        added && !behind ? &handle : nullptr, nullptr, &code,
                                                        accumulates_fast(options.accumulate, a.data.size(1), blocks)));
  if (behind) add_behind(out, *added);  // torch adds no matrix, and no bias to a product in float32
}
#endif

Tensor filled_up(const char* op, const Tensor& t);

// out = a @ b^T + added. a may have more rows than out: those that fill up.
void multiply_scaled(const char* op, const Operand& a, const Operand& b, const OptionalTensor& added, const Tensor& out,
                     const ScaledOptions& options) {
  if (out.numel() == 0) return;
  if (a.data.size(0) != out.size(0)) {
    const int64_t sizes[2] = {a.data.size(0), out.size(1)};
    const Tensor more = allocate(op, "a product of whole blocks", sizes, 2, dtype_code(out), out);
    multiply_scaled(op, a, b, is_matrix(added) ? filled_up(op, *added) : added, more, options);
    torch::stable::copy_(const_cast<Tensor&>(out), matrix_view(more, 0, out.size(0), out.size(1), out.size(1)));
    return;
  }
  // `emulate` is true of the CPU's tensors, the simulated kernels' among them.
  const bool by_kernels = runs_kernels(out) ? !options.emulate || out.is_cpu() : own_product_is_wanted_everywhere();
  if (by_kernels && a.data.size(1) > 0) {
    OptionalTensor same;
    if (added) same = aligned(op, as_contiguous(in_dtype(op, "what is added", *added, dtype_code(out)), op));
    // A matrix cuBLASLt adds in its product, ours would need a pass for it.
    const bool library_adds = is_matrix(same) && out.is_cuda() && options.activations != Fp8Scaling::block &&
                              !own_product_is_wanted_everywhere();
    if (!library_adds && multiply_by_own(op, a, b, is_matrix(same) ? std::nullopt : same, out, options)) {
      if (is_matrix(same)) add_behind(out, *same);
      return;
    }
#ifdef WARPSMITH_CUDA
    if (out.is_cuda()) return multiply_on_card(op, a, b, same, out, options);
#endif
  }
  multiply_emulated(op, a, b, added, out);
}

// Zeros below the rows, up to a multiple of 16: the terms of the weight's gradient, and the rows of blocks.
Tensor filled_up(const char* op, const Tensor& t) {
  const int64_t rows = t.size(0), columns = t.size(1), more = whole_sixteens(rows);
  if (more == rows) return t;
  const int64_t sizes[2] = {more, columns};
  const Tensor all = allocate(op, "rows filled up to 16", sizes, 2, dtype_code(t), t);
  Tensor first = matrix_view(all, 0, rows, columns, columns),
         rest = matrix_view(all, rows * columns, more - rows, columns, columns);
  torch::stable::copy_(first, t);
  torch::stable::zero_(rest);
  return all;
}

// Bytes that another layer has made of the same x, [rows, terms] or turned, and their scales: both or neither.
void check_shared(const char* op, const char* data_name, const char* scale_name, const OptionalTensor& data,
                  const OptionalTensor& scale, int64_t rows, int64_t columns, const ScaledOptions& options,
                  const Tensor& like) {
  ScaledOptions as_x = options;
  as_x.weights = options.activations;
  check_bytes(op, data_name, scale_name, data, scale, rows, columns, as_x, like);
}

// Bytes [rows, columns] that were turned. Scales beside them have those of blocks alone.
void check_turned(const char* op, const char* data_name, const char* scale_name, const OptionalTensor& data,
                  const OptionalTensor& scale, int64_t rows, int64_t columns, Fp8Scaling scaling, const Tensor& like) {
  const bool blocks = scaling == Fp8Scaling::block || scaling == Fp8Scaling::block2d;
  if (!blocks && scale) refuse(op, scale_name, "None: these bytes have the scales of others", "a tensor");
  if (blocks && data.has_value() != scale.has_value())
    refuse(op, scale_name, std::string(data ? "a tensor" : "None") + " beside " + data_name,
           data ? "None" : "a tensor");
  if (!data) return;
  check_of(op, data_name, *data, kE4m3, {rows, columns}, like);
  if (!data->is_contiguous()) refuse(op, data_name, "a contiguous tensor", "other strides");
  if (!blocks) return;
  const int64_t down = scaling == Fp8Scaling::block2d ? ceil_div(rows, kFp8Block) : rows;
  check_of(op, scale_name, *scale, ScalarType::Float, {down, ceil_div(columns, kFp8Block)}, like);
}

int64_t product_of_rows(const Tensor& t) {
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < t.dim(); ++i) rows *= t.size(i);
  return rows;
}

// ---- the ops

// y, and what was made anew: none of it where the bytes of x are given.
struct ScaledForward {
  Tensor y;
  OptionalTensor counts, amax, data, scale;
};
ScaledForward layer(const Tensor& x_any, const Tensor& weight, const OptionalTensor& bias,
                    const OptionalTensor& weight_data, const OptionalTensor& weight_scale,
                    const OptionalTensor& x_scale, const OptionalTensor& x_data, const OptionalTensor& x_data_scale,
                    const ScaledOptions& options, bool keep) {
  const char* op = name(LinearOp::scaled_linear);
  const ScaledLayer layer = check_weight(op, weight, x_any, false);
  check_bias(op, bias, layer.out, x_any);
  check_bytes(op, "weight_data", "weight_scale", weight_data, weight_scale, layer.out, layer.in, options, x_any);
  check_given(op, "x_scale", x_scale, options, x_any);
  const bool blocks = options.activations == Fp8Scaling::block;
  const int64_t x_rows = product_of_rows(x_any), cast_rows = blocks ? whole_sixteens(x_rows) : x_rows;
  check_shared(op, "x_data", "x_data_scale", x_data, x_data_scale, cast_rows, layer.in, options, x_any);

  const OnDeviceOf device(x_any);
  ScaledForward made;
  OptionalTensor data = x_data, scale = x_data_scale;
  if (!data) {
    const Tensor rows = adjacent_rows(op, "x", x_any);
    const bool watch = options.watch && keep;
    const Casts c = cast_fp8(blocks ? filled_up(op, rows) : rows, x_scale,
                             {.scaling = options.activations,
                              .transpose = Fp8Transpose::no,
                              .dtype = kE4m3,
                              .power_of_two = options.power_of_two,
                              .counts = keep,
                              .amax = watch && x_scale});
    data = made.data = c.data;
    scale = made.scale = c.scale;
    made.counts = c.counts;
    made.amax = watch && !x_scale ? fp8_amax(rows, false) : c.amax;
  }
  made.y = allocate_rows(op, "y", x_any, layer.out);
  if (made.y.numel()) {
    const Operand b = weight_data ? Operand{*weight_data, as_contiguous(*weight_scale, op)}
                                  : cast(weight, std::nullopt, options.weights, false, options);
    multiply_scaled(op, {*data, x_scale ? *x_scale : as_contiguous(*scale, op)}, b, bias,
                    as_rows_matrix(made.y, x_rows, layer.out), options);
  }
  return made;
}

Tensor or_none(const OptionalTensor& t) { return t ? *t : Tensor(); }

// Beside y: counts of x and its largest magnitude if it is watched; bytes and scale of x, for the backward and for
// other layers of the same x. None for what is not made.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> forward(Tensor x, Tensor weight, OptionalTensor bias,
                                                           OptionalTensor weight_data, OptionalTensor weight_scale,
                                                           OptionalTensor x_scale, OptionalTensor x_data,
                                                           OptionalTensor x_data_scale, int64_t options,
                                                           OptionalTensor dy_scale, OptionalTensor dy_counts,
                                                           OptionalTensor dy_amax) {
  const char* op = name(LinearOp::scaled_linear);
  const ScaledOptions o = options_of(op, options);
  if (dy_scale) check_given(op, "dy_scale", dy_scale, o, x);
  if (dy_counts) check_of(op, "dy_counts", *dy_counts, ScalarType::Long, {2}, x);
  if (dy_amax) check_of(op, "dy_amax", *dy_amax, ScalarType::Float, {}, x);
  const ScaledForward made = layer(x, weight, bias, weight_data, weight_scale, x_scale, x_data, x_data_scale, o, true);
  return {made.y, or_none(made.counts), or_none(made.amax), or_none(made.data), or_none(made.scale)};
}

// y alone: counts nothing, and watches no magnitude.
Tensor inference(Tensor x, Tensor weight, OptionalTensor bias, OptionalTensor weight_data, OptionalTensor weight_scale,
                 OptionalTensor x_scale, OptionalTensor x_data, OptionalTensor x_data_scale, int64_t options,
                 OptionalTensor, OptionalTensor, OptionalTensor) {
  return layer(x, weight, bias, weight_data, weight_scale, x_scale, x_data, x_data_scale,
               options_of(name(LinearOp::scaled_linear), options), false)
      .y;
}

// The weight as a product of the gradient of x reads it, [in, out]: by scales of rows and of the tensor the bytes of
// the forward, turned.
struct TurnedWeight {
  Operand operand;
  OptionalTensor absorbed;  // scales of the weight's rows, which lie along the sum
};
TurnedWeight turned_weight(const char* op, const Tensor& weight, const OptionalTensor& data,
                           const OptionalTensor& scale, const OptionalTensor& turned,
                           const OptionalTensor& turned_scale, const ScaledOptions& options) {
  if (options.activations == Fp8Scaling::block)
    return {turned ? Operand{*turned, as_contiguous(*turned_scale, op)}
                   : cast(weight, std::nullopt, options.weights, true, options),
            std::nullopt};
  const Operand rows =
      data ? Operand{*data, as_contiguous(*scale, op)} : cast(weight, std::nullopt, options.weights, false, options);
  const Tensor bytes = turned ? *turned : transposed_bytes(op, rows.data, rows.data.size(0));
  if (options.activations == Fp8Scaling::tensor) return {{bytes, rows.scale}, std::nullopt};
  return {{bytes, std::nullopt}, rows.scale};
}

// What is not wanted is None. Counts and the largest magnitude are those of dy. x: for scales of
// blocks and for a gradient of what was not cast; else the bytes of x, by the forward. x_turned: bytes of the columns
// of x, by another layer of it; its scale, and that of the turned weight, of blocks alone. sum: of
// gradients of x by other layers of it, to which that of this one is added.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    Tensor dy_any, OptionalTensor x_any, Tensor weight, OptionalTensor bias, OptionalTensor x_data,
    OptionalTensor x_data_scale, OptionalTensor weight_data, OptionalTensor weight_scale, OptionalTensor turned,
    OptionalTensor turned_scale, OptionalTensor dy_scale, OptionalTensor x_turned, OptionalTensor x_turned_scale,
    int64_t options_any, bool want_dx, bool want_dweight, bool want_dbias, OptionalTensor sum) {
  const char* op = backward_name(LinearOp::scaled_linear);
  const ScaledLayer layer = check_weight(op, weight, dy_any, true);
  check_bias(op, bias, layer.out, dy_any);
  const ScaledOptions options = options_of(op, options_any);
  const bool high = options.wgrad_high, watch = options.watch;
  const bool by_casts = want_dweight && !high, blocks = options.activations == Fp8Scaling::block;
  const bool one = options.activations == Fp8Scaling::tensor;
  const int64_t dy_rows = product_of_rows(dy_any), terms = whole_sixteens(dy_rows);
  check_shared(op, "x_data", "x_data_scale", x_data, x_data_scale, dy_rows, layer.in, options, dy_any);
  check_bytes(op, "weight_data", "weight_scale", weight_data, weight_scale, layer.out, layer.in, options, dy_any);
  check_turned(op, "turned", "turned_scale", turned, turned_scale, layer.in, layer.out, options.weights, dy_any);
  check_given(op, "dy_scale", dy_scale, options, dy_any);
  check_turned(op, "x_turned", "x_turned_scale", x_turned, x_turned_scale, layer.in, terms, options.activations,
               dy_any);
  if (want_dweight && (high || blocks) && !x_any)
    refuse(op, "x", "a tensor when the weight's gradient is wanted", "None");
  if (by_casts && !blocks && !x_data) refuse(op, "x_data", "a tensor when the weight's gradient is wanted", "None");
  if (want_dbias && !bias) refuse(op, "bias", "a tensor when its gradient is wanted", "None");
  if (x_any) check_rows(op, "x", *x_any, dy_any, layer.in, narrow_dtype(op, "dy", dy_any));
  if (sum) {
    check_rows(op, "sum", *sum, dy_any, layer.in, narrow_dtype(op, "dy", dy_any));
    if (!want_dx) refuse(op, "sum", "None where the gradient of x is not wanted", "a tensor");
  }

  const OnDeviceOf device(dy_any);
  const Tensor rows = adjacent_rows(op, "dy", dy_any);
  const Tensor dy = by_casts || blocks ? filled_up(op, rows) : rows;
  const int32_t wide = aoti_torch_dtype_float32();
  OptionalTensor dx, dweight, dbias, counts, sums, amax, new_turned, new_turned_scale;
  if (want_dx || by_casts) {
    std::optional<TurnedWeight> b;
    if (want_dx) b = turned_weight(op, weight, weight_data, weight_scale, turned, turned_scale, options);
    OptionalTensor x_scale;  // of its rows: absorbed
    if (by_casts && !blocks) x_scale = as_contiguous(*x_data_scale, op);
    const Casts c = cast_fp8(dy, dy_scale,
                             {.scaling = options.activations,
                              .transpose = !by_casts ? Fp8Transpose::no
                                           : want_dx ? Fp8Transpose::also
                                                     : Fp8Transpose::only,
                              .dtype = options.grad_e5m2 ? ScalarType::Float8_e5m2 : kE4m3,
                              .power_of_two = options.power_of_two,
                              .counts = true,
                              .column_sums = want_dbias,
                              .amax = watch && dy_scale,
                              .column_factor = b && b->absorbed ? &*b->absorbed : nullptr,
                              .row_factor = x_scale && !one ? &*x_scale : nullptr,
                              .sums_dtype = want_dbias ? narrow_dtype(op, "bias", *bias) : Dtype::float32});
    counts = c.counts;
    sums = c.sums;
    amax = c.amax;
    if (want_dx) {
      dx = allocate_rows(op, "gradient of x", dy_any, layer.in);
      const Tensor to = as_rows_matrix(*dx, rows.size(0), layer.in);
      // Rows of 16 and more are whole blocks; other scalings need no rows that fill up.
      Operand a{*c.data, dy_scale ? *dy_scale : *c.scale};
      if (!blocks && dy.size(0) != rows.size(0)) {
        a.data = matrix_view(*c.data, 0, rows.size(0), layer.out, layer.out);
        if (!one) a.scale = matrix_view(*c.scale, 0, rows.size(0), 1, 1);
      }
      OptionalTensor before;
      if (sum) before = adjacent_rows(op, "sum", *sum);
      if (to.numel()) multiply_scaled(op, a, b->operand, before, to, options);
    }
    if (by_casts) {
      const int64_t sizes[2] = {layer.out, layer.in};
      dweight = allocate(op, "gradient of weight", sizes, 2, dtype_code(weight), dy_any);
      Operand of_x;
      if (!blocks)
        of_x = {x_turned ? *x_turned : transposed_bytes(op, *x_data, terms), one ? x_scale : std::nullopt};
      else if (x_turned)
        of_x = {*x_turned, as_contiguous(*x_turned_scale, op)};
      else
        of_x = cast(filled_up(op, adjacent_rows(op, "x", *x_any)), std::nullopt, options.activations, true, options);
      multiply_scaled(op,
                      {*c.transposed, dy_scale ? *dy_scale
                                      : one    ? *c.scale
                                               : *c.transposed_scale},
                      of_x, std::nullopt, *dweight, options);
      if (!x_turned) {
        new_turned = of_x.data;
        if (blocks) new_turned_scale = of_x.scale;
      }
    }
  } else {
    counts = zeros(op, "counts", 2, dy_any, true);
    if (want_dbias) {
      sums = allocate_vector(op, "gradient of bias", layer.out, wide, dy_any);
      if (rows.numel() == 0)
        torch::stable::zero_(*sums);
      else
        add_column_sums(op, rows, *sums, narrow_dtype(op, "dy", dy_any), Dtype::float32, false);
    }
  }
  if (watch && !amax) amax = fp8_amax(rows, false);
  if (want_dweight && high) {
    const int64_t sizes[2] = {layer.out, layer.in};
    dweight = allocate(op, "gradient of weight", sizes, 2, dtype_code(weight), dy_any);
    weight_gradient_into(op, *dweight, rows, adjacent_rows(op, "x", *x_any), false);
  }
  if (want_dbias) dbias = in_dtype(op, "gradient of bias", *sums, dtype_code(*bias));
  return {or_none(dx),   or_none(dweight),    or_none(dbias),           *counts,
          or_none(amax), or_none(new_turned), or_none(new_turned_scale)};
}

// A weight as a layer keeps it: its bytes and scales, or turned, for the gradient of x.
std::tuple<Tensor, Tensor> cast_weight(Tensor weight, int64_t scaling, bool power_of_two, bool turned) {
  const char* op = "scaled_linear_cast";
  if (scaling < 0 || scaling > static_cast<int64_t>(Fp8Scaling::block))
    refuse(op, "scaling", "0 (row), 1 (tensor) or 2 (block)", std::to_string(scaling));
  ScaledOptions options = options_of(op, scaling);
  options.power_of_two = power_of_two;
  narrow_dtype(op, "weight", weight);
  if (weight.dim() != 2) refuse(op, "weight", "two dimensions", shape_text(weight));
  check_features(op, weight);
  const OnDeviceOf device(weight);
  const bool blocks = options.activations == Fp8Scaling::block;
  const Operand made = cast(weight, std::nullopt, options.weights, turned && blocks, options);
  return {turned && !blocks ? transposed_bytes(op, made.data, made.data.size(0)) : made.data, *made.scale};
}

WARPSMITH_OPS(m) {
  const std::string of_layer =
      "(Tensor x, Tensor weight, Tensor? bias, Tensor? weight_data, Tensor? weight_scale, Tensor? x_scale, "
      "Tensor? x_data, Tensor? x_data_scale, int options, Tensor? dy_scale=None, Tensor? dy_counts=None, "
      "Tensor? dy_amax=None) -> ";
  m.add_forward("scaled_linear", of_layer + "(Tensor y, Tensor counts, Tensor amax, Tensor new_data, Tensor new_scale)",
                TORCH_BOX(&forward));
  m.add("scaled_linear_inference" + of_layer + "Tensor y", TORCH_BOX(&inference));
  m.add(
      "scaled_linear_backward(Tensor dy, Tensor? x, Tensor weight, Tensor? bias, Tensor? x_data, Tensor? x_data_scale, "
      "Tensor? weight_data, Tensor? weight_scale, Tensor? turned, Tensor? turned_scale, Tensor? dy_scale, "
      "Tensor? x_turned, Tensor? x_turned_scale, int options, bool want_dx, bool want_dweight, bool want_dbias, "
      "Tensor? sum=None) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor counts, Tensor amax, Tensor new_turned, "
      "Tensor new_turned_scale)",
      TORCH_BOX(&backward));
  m.add("scaled_linear_cast(Tensor weight, int scaling, bool power_of_two, bool turned) -> (Tensor data, Tensor scale)",
        TORCH_BOX(&cast_weight));
}

}  // namespace
}  // namespace warpsmith
