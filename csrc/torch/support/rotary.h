#pragma once
#include <algorithm>

#include "kernels/rope/rotary.h"
#include "torch/support/tensor.h"

// Checks and views that rope and qk_norm_rope share. python/warpsmith/ops/_rotary.py makes the same checks in the same
// words for fake tensors.
namespace warpsmith {

// A tensor of heads, (batch, tokens, heads, head_dim) or (tokens, heads, head_dim), whose elements of a head are
// adjacent: itself, or a copy that `tensor` keeps alive.
struct HeadsView {
  Tensor tensor;
  RotaryHeads layout;
};

inline HeadsView as_heads(const char* op, const char* argument, const Tensor& t) {
  constexpr int64_t kMost = int64_t{1} << 30;  // kernels count heads and their elements in 32 bits
  const int64_t dim = t.dim();
  if (t.size(dim - 1) > kMost || t.size(dim - 2) > kMost)
    refuse(op, argument, "at most 2^30 heads and 2^30 elements a head", shape_text(t));
  HeadsView v{t, {}};
  if (t.size(dim - 1) > 1 && t.stride(dim - 1) != 1) v.tensor = as_contiguous(t, op);
  const auto strides = v.tensor.strides();
  v.layout = {t.size(dim - 2), dim == 4 ? strides[0] : 0, strides[dim - 3], strides[dim - 2]};
  return v;
}

// A new tensor like `t`, contiguous in the order in which tokens and heads of `t` lie: (batch, heads, tokens, head_dim)
// in memory where a head's tokens are nearer to each other than a token's heads.
inline HeadsView allocate_heads(const char* op, const char* argument, const Tensor& t) {
  const int64_t dim = t.dim(), tokens = t.size(dim - 3), heads = t.size(dim - 2), width = t.size(dim - 1);
  const bool head_major = tokens > 1 && heads > 1 && t.stride(dim - 2) > t.stride(dim - 3);
  const auto at_least_1 = [](int64_t n) { return std::max<int64_t>(n, 1); };
  int64_t sizes[4], strides[4];
  for (int64_t i = 0; i < dim; ++i) sizes[i] = t.size(i);
  strides[dim - 1] = 1;
  strides[dim - 2] = head_major ? at_least_1(width) * at_least_1(tokens) : at_least_1(width);
  strides[dim - 3] = head_major ? at_least_1(width) : at_least_1(width) * at_least_1(heads);
  if (dim == 4) strides[0] = at_least_1(width) * at_least_1(heads) * at_least_1(tokens);
  HeadsView v{allocate_strided(op, argument, sizes, strides, dim, dtype_code(t), t), {}};
  v.layout = {heads, dim == 4 ? strides[0] : 0, strides[dim - 3], strides[dim - 2]};
  return v;
}

// What both ops take beside q and k, checked; the tensors are kept alive here.
struct RotaryInputs {
  RotaryShape shape;
  RotaryAngles angles;
  RotaryPositions positions;
  Dtype dtype;
  Tensor cos, sin;
  std::optional<Tensor> cu_seqlens, offsets;

  // Whether there is nothing to write.
  bool empty(const Tensor& q, const Tensor& k) const { return q.numel() == 0 && k.numel() == 0; }
};

namespace rotary_detail {

inline void check_heads(const char* op, const Tensor& q, const Tensor& k, bool packed) {
  if (packed ? q.dim() != 3 : q.dim() != 3 && q.dim() != 4)
    refuse(op, "q",
           packed ? "shape (tokens, heads, head_dim) beside cu_seqlens"
                  : "shape (batch, tokens, heads, head_dim) or (tokens, heads, head_dim)",
           shape_text(q));
  bool same = k.dim() == q.dim();
  for (int64_t i = 0; same && i < q.dim(); ++i) same = i == q.dim() - 2 || k.size(i) == q.size(i);
  if (!same) refuse(op, "k", "the shape of q but for its heads, " + shape_text(q), shape_text(k));
}

inline void check_angles(const char* op, const Tensor& cos, const Tensor& sin, const Tensor& q, RotaryInputs& in) {
  in.angles.dtype = float_dtype(op, "cos", cos);
  if (in.angles.dtype != in.dtype && !(in.angles.dtype == Dtype::float32 && size_bytes(in.dtype) == 2))
    refuse(op, "cos", size_bytes(in.dtype) == 2 ? std::string(name(in.dtype)) + " or float32" : name(in.dtype),
           name(in.angles.dtype));
  check_same_device(op, "cos", cos, q);
  if (cos.dim() != 2 && cos.dim() != 3)
    refuse(op, "cos", "shape (positions, rotary_dim / 2) or (batch, tokens, rotary_dim)", shape_text(cos));
  in.angles.per_token = cos.dim() == 3;
  const int64_t columns = cos.size(cos.dim() - 1);
  if (in.angles.per_token) {
    if ((cos.size(0) != in.shape.batch && cos.size(0) != 1) || cos.size(1) != in.shape.tokens)
      refuse(op, "cos",
             "shape (" + std::to_string(in.shape.batch) + " or 1, " + std::to_string(in.shape.tokens) + ", rotary_dim)",
             shape_text(cos));
    if (columns % 2) refuse(op, "cos", "an even rotary dimension", shape_text(cos));
  }
  in.shape.rotary_dim = in.angles.per_token ? columns : 2 * columns;
  if (in.shape.rotary_dim > in.shape.head_dim)
    refuse(op, "cos", "a rotary dimension of at most " + std::to_string(in.shape.head_dim),
           std::to_string(in.shape.rotary_dim) + " of shape " + shape_text(cos));
  check_dtype(op, "sin", sin, in.angles.dtype);
  check_same_shape(op, "sin", sin, cos);
  check_same_device(op, "sin", sin, cos);
}

inline void view_angles(RotaryInputs& in) {
  const int64_t dim = in.cos.dim();
  bool as_they_lie = true;
  for (int64_t i = 0; i < dim; ++i) as_they_lie = as_they_lie && in.cos.stride(i) == in.sin.stride(i);
  if (!as_they_lie || (in.cos.size(dim - 1) > 1 && in.cos.stride(dim - 1) != 1)) {
    in.cos = as_contiguous(in.cos);
    in.sin = as_contiguous(in.sin);
  }
  RotaryAngles& a = in.angles;
  a.cos = in.cos.const_data_ptr();
  a.sin = in.sin.const_data_ptr();
  a.rows = in.cos.size(dim - 2);
  a.row_stride = in.cos.stride(dim - 2);
  a.batch_stride = a.per_token && in.cos.size(0) > 1 ? in.cos.stride(0) : 0;
  a.column_stride = a.per_token && in.shape.interleaved ? 2 : 1;
}

inline void check_positions(const char* op, const Tensor& q, int64_t position_offset, RotaryInputs& in) {
  RotaryPositions& p = in.positions;
  p = {nullptr, 0, nullptr, 0, false, position_offset};
  if (in.angles.per_token) {
    if (in.cu_seqlens) refuse(op, "cu_seqlens", "None beside cos of a row for each token", "a tensor");
    if (in.offsets) refuse(op, "position_offset", "0 beside cos of a row for each token", "a tensor");
    if (position_offset != 0)
      refuse(op, "position_offset", "0 beside cos of a row for each token", std::to_string(position_offset));
    return;
  }
  int64_t entries = in.shape.batch;
  if (in.cu_seqlens) {
    const Tensor& cu = *in.cu_seqlens;
    if (cu.scalar_type() != ScalarType::Int) refuse(op, "cu_seqlens", "int32", dtype_text(cu.scalar_type()));
    if (cu.dim() != 1 || cu.size(0) < 2) refuse(op, "cu_seqlens", "shape (sequences + 1)", shape_text(cu));
    check_same_device(op, "cu_seqlens", cu, q);
    in.cu_seqlens = as_contiguous(cu);
    p.cu_seqlens = static_cast<const int32_t*>(in.cu_seqlens->const_data_ptr());
    p.sequences = entries = cu.size(0) - 1;
  }
  if (in.offsets) {
    const Tensor& o = *in.offsets;
    if (o.scalar_type() != ScalarType::Int && o.scalar_type() != ScalarType::Long)
      refuse(op, "position_offset", "int32 or int64", dtype_text(o.scalar_type()));
    if (o.dim() > 1 || (o.dim() == 1 && o.size(0) != entries))
      refuse(op, "position_offset", "shape () or (" + std::to_string(entries) + ")", shape_text(o));
    check_same_device(op, "position_offset", o, q);
    p.offsets = o.const_data_ptr();
    p.offset_stride = o.dim() == 1 ? o.stride(0) : 0;
    p.wide_offsets = o.scalar_type() == ScalarType::Long;
  } else if (!in.cu_seqlens && q.numel() > 0) {  // positions that the host knows
    const int64_t rows = in.cos.size(0);
    if (position_offset < 0 || position_offset > rows - in.shape.tokens)
      refuse(op, "position_offset", "positions from 0 to " + std::to_string(rows - 1) + ", the rows of cos",
             std::to_string(in.shape.tokens) + " from " + std::to_string(position_offset));
  }
}

}  // namespace rotary_detail

inline RotaryInputs rotary_inputs(const char* op, const Tensor& q, const Tensor& k, const Tensor& cos,
                                  const Tensor& sin, bool interleaved, const std::optional<Tensor>& cu_seqlens,
                                  const std::optional<Tensor>& offsets, int64_t position_offset, bool inverse) {
  RotaryInputs in;
  in.cos = cos;
  in.sin = sin;
  in.cu_seqlens = cu_seqlens;
  in.offsets = offsets;
  in.dtype = float_dtype(op, "q", q);
  rotary_detail::check_heads(op, q, k, cu_seqlens.has_value());
  check_dtype(op, "k", k, in.dtype);
  check_same_device(op, "k", k, q);
  const int64_t dim = q.dim();
  in.shape = {dim == 4 ? q.size(0) : 1, q.size(dim - 3), q.size(dim - 1), 0, interleaved, inverse};
  rotary_detail::check_angles(op, cos, sin, q, in);
  rotary_detail::check_positions(op, q, position_offset, in);
  rotary_detail::view_angles(in);
  return in;
}

}  // namespace warpsmith
