#pragma once
#include <cstdint>
#include <string>

#include "common/dtype.h"
#include "common/status.h"
#include "libraries/loader.h"

// cuBLAS, as far as it is needed: the product of 16-bit matrices that is added to a float32 matrix. torch has it as
// addmm with out_dtype, whose scalars do not cross the stable ABI. Declarations and enumerators are those of
// cublas_api.h and library_types.h, part of cuBLAS's binary interface: a build needs none of its headers. cuBLAS
// documentation, "cublasGemmEx".
namespace warpsmith {

namespace cublas {

// Functions of the library; null where the process has no cuBLAS.
struct Table {
  using GemmEx = int(void* handle, int transpose_a, int transpose_b, int m, int n, int k, const void* alpha,
                     const void* a, int a_type, int lda, const void* b, int b_type, int ldb, const void* beta, void* c,
                     int c_type, int ldc, int compute_type, int algorithm);
  GemmEx* gemm_ex;
};

inline const Table& table() {
  static const Table found = [] {
    const libraries::Loaded library({"libcublas.so.13", "libcublas.so.12", "libcublas.so.14"});
    return Table{library.find<Table::GemmEx>("cublasGemmEx")};
  }();
  return found;
}

constexpr int kKeep = 0, kTranspose = 1;            // CUBLAS_OP_N, CUBLAS_OP_T
constexpr int kFloat32 = 0, kFloat16 = 2;           // CUDA_R_32F, CUDA_R_16F
constexpr int kBfloat16 = 14;                       // CUDA_R_16BF
constexpr int kComputeFloat32 = 68, kDefault = -1;  // CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT

}  // namespace cublas

// sum[i, j] = beta * sum[i, j] + sum over r of a[r, i] * b[r, j], all row-major. sum is float32 [a_columns, b_columns],
// a [rows, a_columns] and b [rows, b_columns] are float16 or bfloat16, their rows a_stride and b_stride elements apart.
// handle: torch's, whose stream and workspace it uses.
inline Status add_outer_products_cuda(void* handle, const void* a, int64_t a_stride, int64_t a_columns, const void* b,
                                      int64_t b_stride, int64_t b_columns, int64_t rows, Dtype dtype, float* sum,
                                      float beta) {
  const cublas::Table& library = cublas::table();
  if (!library.gemm_ex) return Status::unsupported("sums in float32 need cuBLAS 12 to 14 loaded by torch, found none");
  if (dtype != Dtype::float16 && dtype != Dtype::bfloat16)
    return Status::unsupported(std::string("sums in float32: no product of ") + name(dtype));
  for (const int64_t size : {a_stride, a_columns, b_stride, b_columns, rows})
    if (size > INT32_MAX) return Status::unsupported("sums in float32: a matrix of more than 2^31 - 1 rows or columns");
  const int type = dtype == Dtype::float16 ? cublas::kFloat16 : cublas::kBfloat16;
  const float alpha = 1;
  // Column-major, as cuBLAS counts: sum^T [b_columns, a_columns] = b^T a.
  const int error = library.gemm_ex(
      handle, cublas::kKeep, cublas::kTranspose, static_cast<int>(b_columns), static_cast<int>(a_columns),
      static_cast<int>(rows), &alpha, b, type, static_cast<int>(b_stride), a, type, static_cast<int>(a_stride), &beta,
      sum, cublas::kFloat32, static_cast<int>(b_columns), cublas::kComputeFloat32, cublas::kDefault);
  return error == 0 ? Status() : Status::device("cublasGemmEx: error " + std::to_string(error));
}

}  // namespace warpsmith
