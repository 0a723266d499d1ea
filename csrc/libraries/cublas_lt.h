#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/status.h"

// cuBLASLt, as far as it is needed: products whose epilogue adds a bias, applies GELU and writes the pre-activation, or
// multiplies by GELU's derivative; and products of 8-bit floats with scales. The library is the copy that torch has
// opened. Its header is read by cublas_lt.cpp alone, which a build without that header leaves out. cuBLAS
// documentation, "Using the cuBLASLt API".
namespace warpsmith::cublas_lt {

// Behind the product. GELU, of 16-bit matrices, is the form by tanh, approximated by the library.
enum class Epilogue : uint8_t {
  none,
  bias,           // out = a @ b + bias
  gelu,           // out = gelu(a @ b)
  gelu_bias,      // out = gelu(a @ b + bias)
  gelu_aux,       // aux = a @ b, out = gelu(aux)
  gelu_aux_bias,  // aux = a @ b + bias, out = gelu(aux)
  dgelu,          // out = (a @ b) gelu'(aux)
};

// Rows `stride` elements apart with adjacent columns; transposed: columns `stride` apart with adjacent rows.
struct Matrix {
  const void* data;
  int64_t stride;
  bool transposed;
};

// Of 8-bit factors: one scale a factor, or one a row of `a` and one a column of `b`.
enum class Scales : uint8_t { none, tensor, rows };

// All matrices are on 16 bytes, their rows too. Without scales all are of one 16-bit dtype; with scales a and b are
// 8-bit floats, `a` as it lies and `b` transposed, and the others are of `dtype`. Sums are float32.
struct Product {
  Matrix a;          // [rows, inner]
  Matrix b;          // [inner, columns]
  void* out;         // [rows, columns], contiguous
  const void* bias;  // [columns]; or null
  void* aux;         // [rows, columns], contiguous; or null
  int64_t rows, columns, inner;
  Epilogue epilogue;
  Dtype dtype;
  int device;
  Scales scales = Scales::none;
  const void *a_scale = nullptr, *b_scale = nullptr;  // float32, on 16 bytes
  bool a_e5m2 = false, b_e5m2 = false;                // else e4m3
  bool fast = false;                                  // sums of 8-bit products in fewer bits
  const void* addend = nullptr;                       // [rows, columns], contiguous, not out: out = a @ b + addend
};

// The library's choice for a product: the first of its heuristic, with at most 32 MiB of workspace, and with split-K
// only if partial sums are float32. The same product gets the same choice, so its bits repeat.
struct Choice {
  bool found = false;
  int algorithm = 0, tile = 0, stages = 0, split_k = 0;  // the library's numbers: cublasLt.h
  int64_t workspace_bytes = 0;
};

// Ok if the library can be called; else the name of the function or of the library that is missing.
Status available();
// Its version: 130100 for 13.1.0. 0: the library is missing.
int64_t version();

// handle: torch's. Choices are kept, the least recently used of them go. Makes no call of CUDA.
Status choose(void* handle, const Product& product, Choice* choice);
// workspace: of the size that choose() gave. A product with an addend that the library refuses after all is
// `unsupported`, has written nothing, and is not chosen again.
Status multiply(void* handle, void* stream, const Product& product, void* workspace, int64_t workspace_bytes);

}  // namespace warpsmith::cublas_lt
