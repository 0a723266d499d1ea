#pragma once
#include <string>

#include "bindings/support/tensor.h"
#include "common/alignment.h"

// What the bindings of the norms of pixels share.
namespace warpsmith {

// A tensor (N, C, ...) without holes in which the channels of a pixel are adjacent: torch's channels_last.
inline Tensor allocate_pixels(const char* op, const char* argument, const Tensor& like) {
  constexpr int64_t kMaxDim = 16;
  const int64_t dim = like.dim();
  if (dim > kMaxDim) refuse(op, argument, "at most 16 dimensions", std::to_string(dim));
  int64_t strides[kMaxDim], stride = 1;
  const auto lay = [&](int64_t i) {
    strides[i] = stride;
    stride *= like.size(i) > 0 ? like.size(i) : 1;
  };
  lay(1);
  for (int64_t i = dim - 1; i > 1; --i) lay(i);
  lay(0);
  return allocate_strided(op, argument, like.sizes().data(), strides, dim, dtype_code(like), like);
}

// A tensor (N, C, ...) read as rows, one a pixel. Its channels are adjacent, its pixels at one stride, and for kernels
// rows that are made of vectors of 16 bytes lie on 16 bytes; any other tensor is copied once, and `tensor` keeps the
// copy alive.
struct Pixels {
  Tensor tensor;
  int64_t rows = 1, columns = 1, stride = 0;
};

inline Pixels as_pixels(const char* op, const char* argument, const Tensor& t, Dtype dtype) {
  const int64_t dim = t.dim();
  Pixels p{t, 1, t.size(1), t.size(1)};
  bool fits = p.columns <= 1 || t.stride(1) == 1, known = false;
  int64_t next = 0;  // the stride that the next outer dimension must have
  const auto outer = [&](int64_t i) {
    p.rows *= t.size(i);
    if (t.size(i) == 1) return;
    if (!known)
      p.stride = t.stride(i), known = true;
    else if (t.stride(i) != next)
      fits = false;
    next = t.stride(i) * t.size(i);
  };
  for (int64_t i = dim - 1; i > 1; --i) outer(i);
  outer(0);
  if (p.rows == 0 || p.columns == 0) return p;
  if (runs_kernels(t) && p.columns % (16 / size_bytes(dtype)) == 0)
    fits = fits && rows_on_16_bytes(t.const_data_ptr(), p.stride, p.rows, dtype);
  if (!fits) {
    p.tensor = allocate_pixels(op, argument, t);
    torch::stable::copy_(p.tensor, t);
    p.stride = p.columns;
  }
  return p;
}

inline void check_dimensions(const char* op, const Tensor& x) {
  if (x.dim() < 2) refuse(op, "x", "at least two dimensions, (N, C, ...)", shape_text(x));
}

}  // namespace warpsmith
