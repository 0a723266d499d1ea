#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <optional>

#include "bindings/support/device.h"
#include "bindings/support/tensor.h"

#ifdef WARPSMITH_CUDA
#include "libraries/cublas.h"
#endif

// Matrix products by torch, on the tensors' device and stream. They run below the dispatcher, so neither autograd nor
// autocast sees them. The caller checks shapes and dtypes.
extern "C" {
AOTITorchError aoti_torch_cpu_mm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2);
AOTITorchError aoti_torch_cpu_addmm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat1,
                                        AtenTensorHandle mat2, double beta, double alpha);
#ifdef WARPSMITH_CUDA
// Absent in CPU builds of torch; reached only with a CUDA tensor in hand.
__attribute__((weak)) AOTITorchError aoti_torch_cuda_mm_out(AtenTensorHandle out, AtenTensorHandle self,
                                                            AtenTensorHandle mat2);
__attribute__((weak)) AOTITorchError aoti_torch_cuda_addmm_out(AtenTensorHandle out, AtenTensorHandle self,
                                                               AtenTensorHandle mat1, AtenTensorHandle mat2,
                                                               double beta, double alpha);
__attribute__((weak)) AOTITorchError torch_get_current_cuda_blas_handle(void** handle);
#endif
}

namespace warpsmith {

// A two-dimensional view of a tensor's memory from element `offset` on. Autograd does not see it.
inline Tensor matrix_view(const Tensor& t, int64_t offset, int64_t rows, int64_t columns, int64_t row_stride,
                          int64_t column_stride = 1) {
  const int64_t sizes[2] = {rows, columns}, strides[2] = {row_stride, column_stride};
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(t.get(), 2, sizes, strides, offset, &handle));
  return Tensor(handle);
}

namespace matmul_detail {

inline void addmm_out(const Tensor& out, const Tensor& c, const Tensor& a, const Tensor& b, double beta, double alpha) {
#ifdef WARPSMITH_CUDA
  if (out.is_cuda()) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_addmm_out(out.get(), c.get(), a.get(), b.get(), beta, alpha));
    return;
  }
#endif
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_addmm_out(out.get(), c.get(), a.get(), b.get(), beta, alpha));
}

}  // namespace matmul_detail

// out = scale * (a @ b)
inline void multiply(const Tensor& out, const Tensor& a, const Tensor& b, double scale = 1) {
  if (scale != 1) {
    matmul_detail::addmm_out(out, out, a, b, 0, scale);
    return;
  }
#ifdef WARPSMITH_CUDA
  if (out.is_cuda()) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_mm_out(out.get(), a.get(), b.get()));
    return;
  }
#endif
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(out.get(), a.get(), b.get()));
}

// out = scale * (c + a @ b); c may be out, or a vector that is added to every row
inline void multiply_add(const Tensor& out, const Tensor& c, const Tensor& a, const Tensor& b, double scale = 1) {
  matmul_detail::addmm_out(out, c, a, b, scale, scale);
}

// sum (+)= a^T @ b, where a and b [rows, ...] have adjacent columns and sum is contiguous. If sum is float32, products
// are added in float32 whatever the dtype of a and b.
inline void add_outer_products(const char* op, const Tensor& sum, const Tensor& a, const Tensor& b, bool add) {
  const Tensor transposed = matrix_view(a, 0, a.size(1), a.size(0), 1, a.stride(0));
  if (dtype_code(sum) == dtype_code(a)) {
    if (add)
      multiply_add(sum, sum, transposed, b);
    else
      multiply(sum, transposed, b);
    return;
  }
#ifdef WARPSMITH_CUDA
  if (sum.is_cuda()) {
    if (!torch_get_current_cuda_blas_handle)
      refuse(op, "weight's gradient",
             "the weight's dtype with this build of torch, which does not share its cuBLAS handle", "float32");
    void* handle = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_get_current_cuda_blas_handle(&handle));
    raise_if_failed(op, add_outer_products_cuda(handle, a.const_data_ptr(), a.stride(0), a.size(1), b.const_data_ptr(),
                                                b.stride(0), b.size(1), a.size(0), float_dtype(op, "a", a),
                                                static_cast<float*>(sum.mutable_data_ptr()), add ? 1.f : 0.f));
    return;
  }
#endif
  const int32_t wide = dtype_code(sum);
  const Tensor a_wide = converted(op, "a factor of the weight's gradient in float32", a, wide);
  const Tensor b_wide = converted(op, "a factor of the weight's gradient in float32", b, wide);
  add_outer_products(op, sum, a_wide, b_wide, add);
}

}  // namespace warpsmith
