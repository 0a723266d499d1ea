#pragma once
#include <algorithm>
#include <optional>

#include "bindings/support/device.h"
#include "bindings/support/matmul.h"
#include "bindings/support/tensor.h"
#include "common/alignment.h"
#include "kernels/linear/linear.h"

#ifdef WARPSMITH_CUBLAS_LT
#include "libraries/cublas_lt.h"
#endif

// Products with an activation in their epilogue. Each function returns false, and has written nothing, where torch's
// product and our kernel must do it: on the CPU, without cuBLASLt, and where choose_linear finds that it does not pay.
namespace warpsmith {

#ifdef WARPSMITH_CUBLAS_LT

namespace epilogue_detail {

inline cublas_lt::Matrix matrix_of(const Tensor& m) {
  const bool by_rows = m.size(1) <= 1 || m.stride(1) == 1;
  return {m.const_data_ptr(), by_rows ? std::max(m.stride(0), m.size(1)) : std::max(m.stride(1), m.size(0)), !by_rows};
}

inline bool aligned(const cublas_lt::Matrix& m, Dtype dtype) {
  return on_16_bytes(m.data) && on_16_bytes(m.stride, dtype);
}

// torch's handle for the current device, or null.
inline void* blas_handle() {
  void* handle = nullptr;
  if (torch_get_current_cuda_blas_handle) TORCH_ERROR_CODE_CHECK(torch_get_current_cuda_blas_handle(&handle));
  return handle;
}

inline bool multiply(const char* op, const Tensor& out, const Tensor& a, const Tensor& b, const void* bias, void* aux,
                     LinearActivation activation, cublas_lt::Epilogue epilogue) {
  if (!out.is_cuda() || activation != LinearActivation::gelu_tanh || out.scalar_type() != ScalarType::BFloat16)
    return false;
  cublas_lt::Product p{
      matrix_of(a), matrix_of(b),    out.mutable_data_ptr(), bias, aux, out.size(0), out.size(1), a.size(1),
      epilogue,     Dtype::bfloat16, out.get_device_index()};
  LinearProblem problem{p.rows, p.inner, p.columns};
  problem.activation = activation;
  problem.derivative = epilogue == cublas_lt::Epilogue::dgelu;
  problem.aligned = aligned(p.a, p.dtype) && aligned(p.b, p.dtype) && aligned({p.out, p.columns, false}, p.dtype) &&
                    on_16_bytes(p.bias) && on_16_bytes(p.aux);
  problem.library = cublas_lt::available().ok();
  raise_if_failed(op, linear_problem_on_device(&problem));
  if (!choose_linear(problem).epilogue) return false;
  void* handle = blas_handle();
  cublas_lt::Choice choice;
  if (!handle) return false;
  raise_if_failed(op, cublas_lt::choose(handle, p, &choice));
  if (!choice.found) return false;
  const Tensor workspace =
      allocate_vector(op, "workspace in bytes", choice.workspace_bytes, aoti_torch_dtype_uint8(), out);
  raise_if_failed(
      op, cublas_lt::multiply(handle, current_stream(out), p, workspace.mutable_data_ptr(), choice.workspace_bytes));
  return true;
}

}  // namespace epilogue_detail

// out = (a @ b^T) scaled + added, of 8-bit floats: one scale a factor, or with `rows` one a row of each. added: a bias
// or a matrix like out.
inline bool multiply_scaled_bytes(const char* op, const Tensor& out, const Tensor& a, const Tensor& b,
                                  const Tensor& a_scale, const Tensor& b_scale, const std::optional<Tensor>& added,
                                  bool rows, bool fast) {
  constexpr int64_t kKnowsRows = 120900;  // the version from which on factors may have scales of rows
  if (!out.is_cuda() || !cublas_lt::available().ok() || (rows && cublas_lt::version() < kKnowsRows)) return false;
  void* handle = epilogue_detail::blas_handle();
  if (!handle) return false;
  const int64_t terms = a.size(1);
  const bool is_bias = added && added->dim() == 1;
  const auto is_e5m2 = [](const Tensor& t) { return t.scalar_type() == ScalarType::Float8_e5m2; };
  const cublas_lt::Product p{.a = {a.const_data_ptr(), terms, false},
                             .b = {b.const_data_ptr(), terms, true},
                             .out = out.mutable_data_ptr(),
                             .bias = is_bias ? const_at(added) : nullptr,
                             .aux = nullptr,
                             .rows = out.size(0),
                             .columns = out.size(1),
                             .inner = terms,
                             .epilogue = is_bias ? cublas_lt::Epilogue::bias : cublas_lt::Epilogue::none,
                             .dtype = float_dtype(op, "out", out),
                             .device = out.get_device_index(),
                             .scales = rows ? cublas_lt::Scales::rows : cublas_lt::Scales::tensor,
                             .a_scale = a_scale.const_data_ptr(),
                             .b_scale = b_scale.const_data_ptr(),
                             .a_e5m2 = is_e5m2(a),
                             .b_e5m2 = is_e5m2(b),
                             .fast = fast,
                             .addend = is_bias ? nullptr : const_at(added)};
  if (!on_16_bytes(p.a.data) || !on_16_bytes(p.b.data) || !on_16_bytes(p.out) || !on_16_bytes(const_at(added)))
    return false;
  cublas_lt::Choice choice;
  raise_if_failed(op, cublas_lt::choose(handle, p, &choice));
  if (!choice.found) return false;
  std::optional<Tensor> workspace;
  if (choice.workspace_bytes > 0)
    workspace = allocate_vector(op, "workspace in bytes", choice.workspace_bytes, aoti_torch_dtype_uint8(), out);
  const Status made = cublas_lt::multiply(handle, current_stream(out), p, at(workspace), choice.workspace_bytes);
  if (p.addend && made.kind() == Status::Kind::unsupported) return false;
  raise_if_failed(op, made);
  return true;
}

// z = a @ b + bias and y = f(z); without z it is not written.
inline bool multiply_with_activation(const char* op, const Tensor& y, const Tensor& a, const Tensor& b,
                                     const std::optional<Tensor>& bias, LinearActivation activation,
                                     const std::optional<Tensor>& z) {
  using cublas_lt::Epilogue;
  const Epilogue epilogue =
      z ? (bias ? Epilogue::gelu_aux_bias : Epilogue::gelu_aux) : (bias ? Epilogue::gelu_bias : Epilogue::gelu);
  return epilogue_detail::multiply(op, y, a, b, const_at(bias), at(z), activation, epilogue);
}

// dz = (a @ b) f'(z)
inline bool multiply_with_derivative(const char* op, const Tensor& dz, const Tensor& a, const Tensor& b,
                                     const Tensor& z, LinearActivation activation) {
  return epilogue_detail::multiply(op, dz, a, b, nullptr, z.mutable_data_ptr(), activation, cublas_lt::Epilogue::dgelu);
}

#else

inline bool multiply_scaled_bytes(const char*, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                  const Tensor&, const std::optional<Tensor>&, bool, bool) {
  return false;
}

inline bool multiply_with_activation(const char*, const Tensor&, const Tensor&, const Tensor&,
                                     const std::optional<Tensor>&, LinearActivation, const std::optional<Tensor>&) {
  return false;
}

inline bool multiply_with_derivative(const char*, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                     LinearActivation) {
  return false;
}

#endif

}  // namespace warpsmith
