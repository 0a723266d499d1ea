#include "kernels/softmax/softmax.h"

#include "bindings/support/device.h"
#include "bindings/support/library.h"
#include "bindings/support/rows.h"
#include "common/alignment.h"

namespace warpsmith {
namespace {

// The bindings of softmax and log_softmax: checks, rows, allocation, launch. python/warpsmith/ops/_softmax.py makes the
// same checks in the same words for fake tensors.

constexpr bool kIsLog[] = {
#define WARPSMITH_ROW(op, log) log,
    WARPSMITH_SOFTMAX_OPS(WARPSMITH_ROW)
#undef WARPSMITH_ROW
};

// Runs p on the rows of x, and backward of dy, and allocates its result.
Tensor run(Softmax op, const char* name, const char* argument, const Tensor& x_any, const Rows* dy, const char* made,
           int32_t result_code, Dtype result_dtype) {
  const Rows x = as_rows(name, argument, x_any);
  Tensor result = allocate_shaped(name, made, x_any, result_code);
  if (x.rows == 0 || x.columns == 0) return result;
  const SoftmaxParams p{.x = x.tensor.const_data_ptr(),
                        .dy = dy ? dy->tensor.const_data_ptr() : nullptr,
                        .result = result.mutable_data_ptr(),
                        .rows = x.rows,
                        .columns = x.columns,
                        .x_stride = x.stride,
                        .dy_stride = dy ? dy->stride : 0,
                        .dtype = float_dtype(name, argument, x_any),
                        .result_dtype = result_dtype,
                        .log = kIsLog[static_cast<int>(op)]};
  run_on<softmax_cuda, softmax_cpu>(name, x_any, p);
  return result;
}

Tensor forward(Softmax op, const Tensor& x, bool wide) {
  const Dtype dtype = float_dtype(name(op), "x", x);
  const bool widens = wide && size_bytes(dtype) == 2;
  return run(op, name(op), "x", x, nullptr, "y", widens ? aoti_torch_dtype_float32() : dtype_code(x),
             widens ? Dtype::float32 : dtype);
}

int32_t code_of(Dtype dtype) {
  if (dtype == Dtype::float64) return aoti_torch_dtype_float64();
  if (dtype == Dtype::float32) return aoti_torch_dtype_float32();
  return dtype == Dtype::float16 ? aoti_torch_dtype_float16() : aoti_torch_dtype_bfloat16();
}

Dtype dtype_of_x(const char* op, ScalarType given, Dtype dtype) {
  const bool half = given == ScalarType::Half, brain = given == ScalarType::BFloat16;
  const Dtype narrow = half ? Dtype::float16 : Dtype::bfloat16;
  if (dtype == Dtype::float32 && (half || brain)) return narrow;
  if (dtype_text(given) != name(dtype))
    refuse(op, "x_dtype", "that of y, or 16 bits beside float32", dtype_text(given));
  return dtype;
}

Tensor backward(Softmax op, const Tensor& dy_any, const Tensor& y_any, ScalarType x_dtype) {
  const char* const kName = backward_name(op);
  const Dtype dtype = float_dtype(kName, "y", y_any);
  check_dtype(kName, "dy", dy_any, dtype);
  check_same_shape(kName, "dy", dy_any, y_any);
  check_same_device(kName, "dy", dy_any, y_any);
  const Dtype result = dtype_of_x(kName, x_dtype, dtype);
  // Kernels read both by the same vectors.
  const Tensor y = as_contiguous(y_any, kName);
  Rows dy = as_rows(kName, "dy", dy_any);
  const auto behind = [&](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16; };
  const bool together = behind(dy.tensor.const_data_ptr()) == behind(y.const_data_ptr()) &&
                        (dy.rows <= 1 || on_16_bytes(dy.stride - dy.columns, dtype));
  if (!together && runs_kernels(y)) {
    Tensor copy = allocate_like(kName, "a contiguous copy", dy.tensor);
    dy = as_rows(kName, "dy", torch::stable::copy_(copy, dy.tensor));
  }
  return run(op, kName, "y", y, &dy, "dx", code_of(result), result);
}

template <Softmax op> struct Bound {
  static Tensor forward(Tensor x, bool wide) { return warpsmith::forward(op, x, wide); }
  static Tensor backward(Tensor dy, Tensor y, ScalarType x_dtype) { return warpsmith::backward(op, dy, y, x_dtype); }
};
// g++ 12 does not instantiate a function whose address only a template takes.
#define WARPSMITH_ROW(op, log) template struct Bound<Softmax::op>;
WARPSMITH_SOFTMAX_OPS(WARPSMITH_ROW)
#undef WARPSMITH_ROW

WARPSMITH_OPS(m) {
#define WARPSMITH_ROW(op, log)                                                                      \
  m.add_forward(#op, "(Tensor x, bool wide) -> Tensor y", TORCH_BOX(&Bound<Softmax::op>::forward)); \
  m.add(#op "_backward(Tensor dy, Tensor y, ScalarType x_dtype) -> Tensor dx",                      \
        TORCH_BOX(&Bound<Softmax::op>::backward));
  WARPSMITH_SOFTMAX_OPS(WARPSMITH_ROW)
#undef WARPSMITH_ROW
}

}  // namespace
}  // namespace warpsmith
