#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cmath>
#include <cstdio>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>

#include "bindings/support/errors.h"
#include "common/dtype.h"
#include "common/huge_pages.h"
#include "common/visit_dtype.h"

namespace warpsmith {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Whether an op runs its kernels on this tensor, rather than the CPU's loops. In a build for the host execution layer
// (csrc/sim) they run on CPU tensors.
inline bool runs_kernels(const Tensor& t) {
#ifdef WARPSMITH_SIM
  return t.is_cpu();
#else
  return t.is_cuda();
#endif
}

inline std::string shape_text(const Tensor& t) {
  std::string s = "(";
  for (int64_t i = 0; i < t.dim(); ++i) s += (i ? ", " : "") + std::to_string(t.size(i));
  return s + ")";
}

inline std::string device_text(const Tensor& t) {
  if (t.is_cpu()) return "a CPU tensor";
  return t.is_cuda() ? "a tensor on cuda:" + std::to_string(t.get_device_index())
                     : "a tensor on another kind of device";
}

// The name that Python uses, for dtypes that users mix up; torch's internal name for the others.
inline std::string dtype_text(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return "float32";
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Double: return "float64";
    case ScalarType::Bool: return "bool";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::ComplexFloat: return "complex64";
    case ScalarType::ComplexDouble: return "complex128";
    case ScalarType::Float8_e4m3fn: return "float8_e4m3fn";
    case ScalarType::Float8_e5m2: return "float8_e5m2";
    default: return torch::headeronly::toString(dtype);
  }
}

inline int32_t dtype_code(const Tensor& t) {
  int32_t code = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &code));
  return code;
}

// By one call of the ABI where Tensor::scalar_type() makes up to 20.
inline ScalarType scalar_type_of(const Tensor& t) {
  struct Known {
    int32_t code;
    ScalarType type;
  };
  static const Known all[] = {{aoti_torch_dtype_bfloat16(), ScalarType::BFloat16},
                              {aoti_torch_dtype_float32(), ScalarType::Float},
                              {aoti_torch_dtype_float16(), ScalarType::Half},
                              {aoti_torch_dtype_int64(), ScalarType::Long},
                              {aoti_torch_dtype_float8_e4m3fn(), ScalarType::Float8_e4m3fn},
                              {aoti_torch_dtype_float8_e5m2(), ScalarType::Float8_e5m2}};
  const int32_t code = dtype_code(t);
  for (const Known& known : all)
    if (known.code == code) return known.type;
  return t.scalar_type();
}

// The dtype of a required argument. The dispatcher lets Python's None pass as an undefined tensor.
inline ScalarType dtype_of(const char* op, const char* argument, const Tensor& t) {
  if (!t.defined()) refuse(op, argument, "a tensor", "None");
  return scalar_type_of(t);
}

// The dtype of a floating-point tensor that the kernels support.
inline Dtype float_dtype(const char* op, const char* argument, const Tensor& t) {
  switch (dtype_of(op, argument, t)) {
    case ScalarType::Float: return Dtype::float32;
    case ScalarType::Half: return Dtype::float16;
    case ScalarType::BFloat16: return Dtype::bfloat16;
    case ScalarType::Double:
      if (runs_kernels(t)) refuse(op, argument, "float32, float16 or bfloat16 on CUDA", "float64");
      return Dtype::float64;
    default: refuse(op, argument, "float32, float16, bfloat16 or (on the CPU) float64", dtype_text(t.scalar_type()));
  }
}

// A number as %g prints it: std::to_string prints 1e-40 as 0.000000.
inline std::string short_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}

// Refuses a number that is not finite in the arithmetic of a dtype: float64 for float64, float32 for other dtypes.
inline void check_finite(const char* op, const char* argument, double value, Dtype dtype) {
  const bool wide = dtype == Dtype::float64;
  const double most = wide ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
  if (!(value >= -most && value <= most))
    refuse(op, argument, wide ? "a finite number" : "a finite number of float32", short_text(value));
}

inline void check_dtype(const char* op, const char* argument, const Tensor& t, Dtype expected) {
  if (dtype_of(op, argument, t) == ScalarType::Double && expected != Dtype::float64)
    refuse(op, argument, name(expected), name(Dtype::float64));
  if (const Dtype got = float_dtype(op, argument, t); got != expected) refuse(op, argument, name(expected), name(got));
}

// For tensors that are float64 on every device. float_dtype refuses float64 where kernels run.
inline void check_float64(const char* op, const char* argument, const Tensor& t) {
  if (const ScalarType got = dtype_of(op, argument, t); got != ScalarType::Double)
    refuse(op, argument, name(Dtype::float64), dtype_text(got));
}

// The dtype of a weight, bias, residual or table beside an activation of `dtype`: the same, or float32 beside a 16-bit
// one.
inline Dtype check_dtype_beside(const char* op, const char* argument, const Tensor& t, Dtype dtype) {
  const Dtype got = float_dtype(op, argument, t);
  if (!is_same_or_float32(got, dtype)) refuse(op, argument, same_or_float32_text(dtype), name(got));
  return got;
}

inline void check_shape(const char* op, const char* argument, const Tensor& t,
                        std::initializer_list<int64_t> expected) {
  bool same = t.dim() == static_cast<int64_t>(expected.size());
  int64_t i = 0;
  for (const int64_t size : expected) same = same && t.size(i++) == size;
  if (same) return;
  std::string text;
  for (const int64_t size : expected) text += (text.empty() ? "" : ", ") + std::to_string(size);
  refuse(op, argument, "shape (" + text + ")", shape_text(t));
}

inline void check_same_shape(const char* op, const char* argument, const Tensor& t, const Tensor& like) {
  bool same = t.dim() == like.dim();
  for (int64_t i = 0; same && i < t.dim(); ++i) same = t.size(i) == like.size(i);
  if (!same) refuse(op, argument, "shape " + shape_text(like), shape_text(t));
}

inline int32_t device_code(const Tensor& t) {
  int32_t code = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t.get(), &code));
  return code;
}

// Compares the kind of device as well as its index: a meta tensor has index 0 too.
inline void check_same_device(const char* op, const char* argument, const Tensor& t, const Tensor& like) {
  if (t.get_device_index() != like.get_device_index() || device_code(t) != device_code(like))
    refuse(op, argument, device_text(like), device_text(t));
}

// A tensor of a dtype, and of the shape and device of `like`.
inline void check_like(const char* op, const char* argument, const Tensor& t, const Tensor& like, Dtype dtype) {
  check_dtype(op, argument, t, dtype);
  check_same_shape(op, argument, t, like);
  check_same_device(op, argument, t, like);
}

// A tensor of a dtype and a shape on the device of `like`.
inline void check_tensor(const char* op, const char* argument, const Tensor& t, Dtype dtype,
                         std::initializer_list<int64_t> shape, const Tensor& like) {
  check_dtype(op, argument, t, dtype);
  check_shape(op, argument, t, shape);
  check_same_device(op, argument, t, like);
}

// The same for a parameter, whose dtype may be float32 beside 16 bits. Returns its dtype.
inline Dtype check_parameter(const char* op, const char* argument, const Tensor& t, Dtype dtype,
                             std::initializer_list<int64_t> shape, const Tensor& like) {
  const Dtype got = check_dtype_beside(op, argument, t, dtype);
  check_tensor(op, argument, t, got, shape, like);
  return got;
}

// The common dtype of two parameters or statistics of `count` elements, each of which may be missing: that of the
// activation, or float32 beside 16 bits.
inline Dtype check_pair(const char* op, const char* first_name, const OptionalTensor& first, const char* second_name,
                        const OptionalTensor& second, const Tensor& like, Dtype dtype, int64_t count) {
  if (first) dtype = check_parameter(op, first_name, *first, dtype, {count}, like);
  if (second && first) check_tensor(op, second_name, *second, dtype, {count}, like);
  return second && !first ? check_parameter(op, second_name, *second, dtype, {count}, like) : dtype;
}

inline void check_eps(const char* op, double eps) {
  if (!(eps >= 0 && std::isfinite(eps))) refuse(op, "eps", "a finite number >= 0", short_text(eps));
}

// Allocates a tensor on the device of `like`, through torch's allocator. Calls the C shim directly:
// torch::stable::empty goes through the boxed dispatcher and costs about 1 us more.
inline Tensor allocate_strided(const char* op, const char* argument, const int64_t* sizes, const int64_t* strides,
                               int64_t dim, int32_t dtype, const Tensor& like) {
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(dim, sizes, strides, dtype, device_code(like), like.get_device_index(), &handle) !=
      AOTI_TORCH_SUCCESS) {
    std::string text;
    for (int64_t i = 0; i < dim; ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
    throw std::runtime_error(std::string(op) + ": " + kOutOfMemory + argument + " of shape (" + text + ") on " +
                             device_text(like));
  }
  Tensor made(handle);
  int64_t elements = 1;
  for (int64_t i = 0; i < dim; ++i) elements *= sizes[i];
  constexpr int64_t kLargestElement = 8;  // of fewer elements none needs the call below
  if (elements >= kHugePagesFromBytes / kLargestElement && like.is_cpu()) {
    int64_t bytes = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(made.get(), &bytes));
    if (bytes >= kHugePagesFromBytes) advise_huge_pages(made.data_ptr(), bytes);
  }
  return made;
}

// The same, contiguous.
inline Tensor allocate(const char* op, const char* argument, const int64_t* sizes, int64_t dim, int32_t dtype,
                       const Tensor& like) {
  constexpr int64_t kMaxDim = 64;
  if (dim > kMaxDim) refuse(op, argument, "at most 64 dimensions", std::to_string(dim));
  int64_t strides[kMaxDim] = {};  // with no dimension none is set, of which g++ warns
  int64_t stride = 1;
  for (int64_t i = dim - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= sizes[i] > 0 ? sizes[i] : 1;
  }
  return allocate_strided(op, argument, sizes, strides, dim, dtype, like);
}

inline Tensor allocate_like(const char* op, const char* argument, const Tensor& like) {
  const auto sizes = like.sizes();
  return allocate(op, argument, sizes.data(), static_cast<int64_t>(sizes.size()), dtype_code(like), like);
}

// Returns t, or a contiguous copy. torch::stable::contiguous goes through the boxed dispatcher (0.5 us even if it does
// nothing), and if memory is short its error has no reason.
inline Tensor as_contiguous(const Tensor& t, const char* op = "warpsmith") {
  if (t.is_contiguous()) return t;
  Tensor copy = allocate_like(op, "a contiguous copy", t);
  torch::stable::copy_(copy, t);
  return copy;
}

inline OptionalTensor as_contiguous(const OptionalTensor& t) {
  return t ? OptionalTensor(as_contiguous(*t)) : std::nullopt;
}

// Returns a copy in another dtype.
inline Tensor converted(const char* op, const char* what, const Tensor& t, int32_t dtype) {
  const auto sizes = t.sizes();
  Tensor copy = allocate(op, what, sizes.data(), static_cast<int64_t>(sizes.size()), dtype, t);
  return torch::stable::copy_(copy, t);
}

inline Tensor in_dtype(const char* op, const char* what, const Tensor& t, int32_t dtype) {
  return dtype_code(t) == dtype ? t : converted(op, what, t, dtype);
}

inline Tensor allocate_vector(const char* op, const char* argument, int64_t count, int32_t dtype, const Tensor& like) {
  return allocate(op, argument, &count, 1, dtype, like);
}

// The dtype of sums, losses and row statistics: float32, or float64 for float64 tensors.
inline Dtype real_dtype(Dtype dtype) { return dtype == Dtype::float64 ? Dtype::float64 : Dtype::float32; }
inline int32_t real_code(Dtype dtype) {
  return dtype == Dtype::float64 ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
}

inline Tensor allocate_shaped(const char* op, const char* argument, const Tensor& shape, int32_t dtype) {
  const auto sizes = shape.sizes();
  return allocate(op, argument, sizes.data(), static_cast<int64_t>(sizes.size()), dtype, shape);
}

inline Tensor allocate_scalar(const char* op, const char* argument, int32_t dtype, const Tensor& like) {
  return allocate(op, argument, nullptr, 0, dtype, like);
}

// Stands for an output that is not wanted: a tensor without elements.
inline Tensor nothing(const char* op, int32_t dtype, const Tensor& like) {
  return allocate_vector(op, "no result", 0, dtype, like);
}

// Address of element `offset` of an optional tensor, or null.
inline void* at(const std::optional<Tensor>& t, int64_t offset = 0) {
  if (!t) return nullptr;
  return static_cast<char*>(t->mutable_data_ptr()) + offset * static_cast<int64_t>(t->element_size());
}
inline const void* const_at(const std::optional<Tensor>& t, int64_t offset = 0) {
  if (!t) return nullptr;
  return static_cast<const char*>(t->const_data_ptr()) + offset * static_cast<int64_t>(t->element_size());
}

}  // namespace warpsmith
