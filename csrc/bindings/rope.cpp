#include "kernels/rope/rope.h"

#include <algorithm>
#include <cmath>

#include "bindings/support/device.h"
#include "bindings/support/library.h"
#include "bindings/support/tensor.h"
#include "common/overlap.h"

// The bindings of rope and qk_norm_rope: checks, views, allocation, launch. python/warpsmith/ops/_rope.py makes the
// same checks in the same words for fake tensors.
namespace warpsmith {
namespace {

constexpr const char *kRope = name(RopeOp::rope), *kForward = name(RopeOp::qk_norm_rope),
                     *kBackward = backward_name(RopeOp::qk_norm_rope);

// A tensor (batch, tokens, heads, head_dim) or (tokens, heads, head_dim) in which the elements of a head are adjacent.
struct HeadsView {
  Tensor tensor;
  RotaryHeads layout;
};

// Returns the tensor, or a copy if the elements of a head are not adjacent.
HeadsView as_heads(const char* op, const char* argument, const Tensor& t) {
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

// A new contiguous tensor like `t`. Its memory is ordered (batch, heads, tokens, head_dim) if the tokens of a head of
// `t` are nearer to each other than the heads of a token.
HeadsView allocate_heads(const char* op, const char* argument, const Tensor& t) {
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

// The checked arguments of both ops beside q and k. It keeps their tensors alive.
struct RotaryInputs {
  RotaryShape shape;
  RotaryAngles angles;
  RotaryPositions positions;
  Dtype dtype;
  Tensor cos, sin;
  OptionalTensor cu_seqlens, offsets;

  // True if there is nothing to write.
  bool empty(const Tensor& q, const Tensor& k) const { return q.numel() == 0 && k.numel() == 0; }
};

// Added to an error if q and k seem to have the layout of transformers.
const char* hint_if(bool heads_first) {
  return heads_first ? "; q and k are (batch, tokens, heads, head_dim): transpose(1, 2) of (batch, heads, tokens, "
                       "head_dim)"
                     : "";
}

void check_heads(const char* op, const Tensor& q, const Tensor& k, bool packed) {
  if (packed ? q.dim() != 3 : q.dim() != 3 && q.dim() != 4)
    refuse(op, "q",
           packed ? "shape (tokens, heads, head_dim) beside cu_seqlens"
                  : "shape (batch, tokens, heads, head_dim) or (tokens, heads, head_dim)",
           shape_text(q));
  bool same = k.dim() == q.dim();
  for (int64_t i = 0; same && i < q.dim(); ++i) same = i == q.dim() - 2 || k.size(i) == q.size(i);
  if (same) return;
  bool heads_first = q.dim() == 4 && k.dim() == 4;
  for (const int64_t i : {0, 2, 3}) heads_first = heads_first && k.size(i) == q.size(i);
  refuse(op, "k", "the shape of q but for its heads, " + shape_text(q), shape_text(k) + hint_if(heads_first));
}

void check_angles(const char* op, const Tensor& cos, const Tensor& sin, const Tensor& q, RotaryInputs& in) {
  in.angles.dtype = check_dtype_beside(op, "cos", cos, in.dtype);
  check_same_device(op, "cos", cos, q);
  if (cos.dim() != 2 && cos.dim() != 3)
    refuse(op, "cos", "shape (positions, rotary_dim / 2) or (batch, tokens, rotary_dim)", shape_text(cos));
  in.angles.per_token = cos.dim() == 3;
  const int64_t columns = cos.size(cos.dim() - 1);
  if (in.angles.per_token) {
    if ((cos.size(0) != in.shape.batch && cos.size(0) != 1) || cos.size(1) != in.shape.tokens)
      refuse(op, "cos",
             "shape (" + std::to_string(in.shape.batch) + " or 1, " + std::to_string(in.shape.tokens) + ", rotary_dim)",
             shape_text(cos) + hint_if(q.dim() == 4 && cos.size(1) == q.size(2)));
    if (columns % 2) refuse(op, "cos", "an even rotary dimension", shape_text(cos));
  }
  in.shape.rotary_dim = in.angles.per_token ? columns : 2 * columns;
  if (in.shape.rotary_dim > in.shape.head_dim)
    refuse(op, "cos", "a rotary dimension of at most " + std::to_string(in.shape.head_dim),
           std::to_string(in.shape.rotary_dim) + " of shape " + shape_text(cos));
  check_like(op, "sin", sin, cos, in.angles.dtype);
}

void view_angles(RotaryInputs& in) {
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

void check_positions(const char* op, const Tensor& q, int64_t position_offset, RotaryInputs& in) {
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

RotaryInputs rotary_inputs(const char* op, const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                           bool interleaved, const OptionalTensor& cu_seqlens, const OptionalTensor& offsets,
                           int64_t position_offset, bool inverse) {
  RotaryInputs in{{}, {}, {}, float_dtype(op, "q", q), cos, sin, cu_seqlens, offsets};
  check_heads(op, q, k, cu_seqlens.has_value());
  check_dtype(op, "k", k, in.dtype);
  check_same_device(op, "k", k, q);
  const int64_t dim = q.dim();
  in.shape = {dim == 4 ? q.size(0) : 1, q.size(dim - 3), q.size(dim - 1), 0, interleaved, inverse};
  check_angles(op, cos, sin, q, in);
  check_positions(op, q, position_offset, in);
  view_angles(in);
  return in;
}

// ---- rope

void run_rope(const RotaryInputs& in, const HeadsView& q, const HeadsView& k, const HeadsView& q_out,
              const HeadsView& k_out, bool inplace) {
  const RopeParams p{q.tensor.const_data_ptr(),
                     k.tensor.const_data_ptr(),
                     q_out.tensor.mutable_data_ptr(),
                     k_out.tensor.mutable_data_ptr(),
                     q.layout,
                     k.layout,
                     q_out.layout,
                     k_out.layout,
                     in.angles,
                     in.positions,
                     in.shape,
                     inplace,
                     in.dtype};
  run_on(
      kRope, q.tensor, [&](void* stream) { return rope_cuda(p, stream); },
      [&](const Parallel& threads) {
        WARPSMITH_RETURN_IF_FAILED(rotary_check_positions_cpu(in.shape, in.angles, in.positions));
        return rope_cpu(p, threads);
      });
}

std::tuple<Tensor, Tensor> rope_forward(Tensor q_any, Tensor k_any, Tensor cos, Tensor sin, bool interleaved,
                                        OptionalTensor cu_seqlens, OptionalTensor offsets, int64_t position_offset,
                                        bool inverse) {
  const RotaryInputs in =
      rotary_inputs(kRope, q_any, k_any, cos, sin, interleaved, cu_seqlens, offsets, position_offset, inverse);
  const HeadsView q = as_heads(kRope, "q", q_any), k = as_heads(kRope, "k", k_any);
  const HeadsView q_out = allocate_heads(kRope, "q", q_any), k_out = allocate_heads(kRope, "k", k_any);
  if (!in.empty(q_any, k_any)) run_rope(in, q, k, q_out, k_out, /*inplace=*/false);
  return {q_out.tensor, k_out.tensor};
}

StridedElements elements_of(const Tensor& t) {
  const auto sizes = t.sizes(), strides = t.strides();
  const auto bytes = static_cast<int64_t>(t.element_size());
  return {t.const_data_ptr(), {sizes.begin(), sizes.end()}, {strides.begin(), strides.end()}, bytes};
}

void check_writable(const char* argument, const Tensor& t) {
  if (t.numel() == 0) return;  // an empty tensor may have strides of 0
  const int64_t dim = t.dim();
  if (t.size(dim - 1) > 1 && t.stride(dim - 1) != 1)
    refuse(kRope, argument, "adjacent elements in the last dimension to be written in place",
           "stride " + std::to_string(t.stride(dim - 1)));
  for (int64_t i = 0; i < dim; ++i)
    if (t.size(i) > 1 && t.stride(i) == 0)
      refuse(kRope, argument, "elements of their own to be written in place", "an expanded tensor");
  if (overlaps_itself(elements_of(t)))
    refuse(kRope, argument, "elements of their own to be written in place", "strides by which they overlap");
}

void rope_inplace(Tensor q_any, Tensor k_any, Tensor cos, Tensor sin, bool interleaved, OptionalTensor cu_seqlens,
                  OptionalTensor offsets, int64_t position_offset, bool inverse) {
  const RotaryInputs in =
      rotary_inputs(kRope, q_any, k_any, cos, sin, interleaved, cu_seqlens, offsets, position_offset, inverse);
  check_writable("q", q_any);
  check_writable("k", k_any);
  if (q_any.numel() > 0 && k_any.numel() > 0 && overlap(elements_of(q_any), elements_of(k_any)))
    refuse(kRope, "k", "other memory than that of q to be written in place", "elements that are q's as well");
  const HeadsView q = as_heads(kRope, "q", q_any), k = as_heads(kRope, "k", k_any);
  if (!in.empty(q_any, k_any) && in.shape.rotary_dim > 0) run_rope(in, q, k, q, k, /*inplace=*/true);
}

// ---- qk_norm_rope

Dtype check_weights(const char* op, const Tensor& q_weight, const Tensor& k_weight, const Tensor& q, Dtype dtype,
                    double eps) {
  const Dtype weight_dtype = check_parameter(op, "q_weight", q_weight, dtype, {q.size(q.dim() - 1)}, q);
  check_tensor(op, "k_weight", k_weight, weight_dtype, {q.size(q.dim() - 1)}, q);
  check_eps(op, eps);
  return weight_dtype;
}

std::tuple<Tensor, Tensor> norm_forward(Tensor q_any, Tensor k_any, Tensor q_weight_any, Tensor k_weight_any,
                                        Tensor cos, Tensor sin, double eps, bool interleaved, OptionalTensor cu_seqlens,
                                        OptionalTensor offsets, int64_t position_offset) {
  const RotaryInputs in = rotary_inputs(kForward, q_any, k_any, cos, sin, interleaved, cu_seqlens, offsets,
                                        position_offset, /*inverse=*/false);
  const Dtype weight_dtype = check_weights(kForward, q_weight_any, k_weight_any, q_any, in.dtype, eps);
  const HeadsView q = as_heads(kForward, "q", q_any), k = as_heads(kForward, "k", k_any);
  const Tensor q_weight = as_contiguous(q_weight_any), k_weight = as_contiguous(k_weight_any);
  const HeadsView q_out = allocate_heads(kForward, "q", q_any), k_out = allocate_heads(kForward, "k", k_any);
  if (in.empty(q_any, k_any)) return {q_out.tensor, k_out.tensor};
  const QkNormRopeFwdParams p{q.tensor.const_data_ptr(),
                              k.tensor.const_data_ptr(),
                              q_weight.const_data_ptr(),
                              k_weight.const_data_ptr(),
                              q_out.tensor.mutable_data_ptr(),
                              k_out.tensor.mutable_data_ptr(),
                              q.layout,
                              k.layout,
                              q_out.layout,
                              k_out.layout,
                              in.angles,
                              in.positions,
                              in.shape,
                              eps,
                              in.dtype,
                              weight_dtype};
  run_on(
      kForward, q_any, [&](void* stream) { return qk_norm_rope_forward_cuda(p, stream); },
      [&](const Parallel& threads) {
        WARPSMITH_RETURN_IF_FAILED(rotary_check_positions_cpu(in.shape, in.angles, in.positions));
        return qk_norm_rope_forward_cpu(p, threads);
      });
  return {q_out.tensor, k_out.tensor};
}

// Gradients that are not wanted have zero elements.
std::tuple<Tensor, Tensor, Tensor, Tensor> norm_backward(Tensor dq_out_any, Tensor dk_out_any, Tensor q_any,
                                                         Tensor k_any, Tensor q_weight_any, Tensor k_weight_any,
                                                         Tensor cos, Tensor sin, double eps, bool interleaved,
                                                         OptionalTensor cu_seqlens, OptionalTensor offsets,
                                                         int64_t position_offset, bool want_dq, bool want_dk,
                                                         bool want_dq_weight, bool want_dk_weight) {
  const RotaryInputs in = rotary_inputs(kBackward, q_any, k_any, cos, sin, interleaved, cu_seqlens, offsets,
                                        position_offset, /*inverse=*/true);
  const Dtype weight_dtype = check_weights(kBackward, q_weight_any, k_weight_any, q_any, in.dtype, eps);
  check_like(kBackward, "dq_out", dq_out_any, q_any, in.dtype);
  check_like(kBackward, "dk_out", dk_out_any, k_any, in.dtype);
  const HeadsView q = as_heads(kBackward, "q", q_any), k = as_heads(kBackward, "k", k_any);
  const HeadsView dq_out = as_heads(kBackward, "dq_out", dq_out_any),
                  dk_out = as_heads(kBackward, "dk_out", dk_out_any);
  const Tensor q_weight = as_contiguous(q_weight_any), k_weight = as_contiguous(k_weight_any);

  const HeadsView none{allocate_vector(kBackward, "no gradient", 0, dtype_code(q_any), q_any), {}};
  const HeadsView dq = want_dq ? allocate_heads(kBackward, "dq", q_any) : none;
  const HeadsView dk = want_dk ? allocate_heads(kBackward, "dk", k_any) : none;
  Tensor dq_weight = want_dq_weight ? allocate_like(kBackward, "dq_weight", q_weight) : none.tensor;
  Tensor dk_weight = want_dk_weight ? allocate_like(kBackward, "dk_weight", k_weight) : none.tensor;
  if (in.empty(q_any, k_any)) {
    if (want_dq_weight) torch::stable::zero_(dq_weight);
    if (want_dk_weight) torch::stable::zero_(dk_weight);
    return {dq.tensor, dk.tensor, dq_weight, dk_weight};
  }
  const auto wanted = [](bool want, const Tensor& t) { return want ? t.mutable_data_ptr() : nullptr; };
  QkNormRopeBwdParams p{dq_out.tensor.const_data_ptr(),
                        dk_out.tensor.const_data_ptr(),
                        q.tensor.const_data_ptr(),
                        k.tensor.const_data_ptr(),
                        q_weight.const_data_ptr(),
                        k_weight.const_data_ptr(),
                        wanted(want_dq, dq.tensor),
                        wanted(want_dk, dk.tensor),
                        wanted(want_dq_weight, dq_weight),
                        wanted(want_dk_weight, dk_weight),
                        nullptr,
                        dq_out.layout,
                        dk_out.layout,
                        q.layout,
                        k.layout,
                        dq.layout,
                        dk.layout,
                        in.angles,
                        in.positions,
                        in.shape,
                        eps,
                        in.dtype,
                        weight_dtype};
  OptionalTensor partials;
  const auto with_partials = [&](int64_t partial_rows) {
    if (!want_dq_weight && !want_dk_weight) return;
    const int32_t sums = in.dtype == Dtype::float64 ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
    const int64_t sizes[3] = {partial_rows, 2, in.shape.head_dim};
    partials = allocate(kBackward, "partial sums of the weights' gradients", sizes, 3, sums, q_any);
    p.partials = partials->mutable_data_ptr();
  };
  run_on(
      kBackward, q_any,
      [&](void* stream) {
        int64_t partial_rows = 0;
        WARPSMITH_RETURN_IF_FAILED(qk_norm_rope_partial_rows_cuda(p, &partial_rows));
        with_partials(partial_rows);
        return qk_norm_rope_backward_cuda(p, stream);
      },
      [&](const Parallel& threads) {
        WARPSMITH_RETURN_IF_FAILED(rotary_check_positions_cpu(in.shape, in.angles, in.positions));
        with_partials(qk_norm_rope_partial_rows_cpu(in.shape.batch * in.shape.tokens));
        return qk_norm_rope_backward_cpu(p, threads);
      });
  return {dq.tensor, dk.tensor, dq_weight, dk_weight};
}

#define WARPSMITH_POSITIONS "bool interleaved, Tensor? cu_seqlens, Tensor? offsets, SymInt position_offset"
#define WARPSMITH_ROPE_INPUTS "Tensor cos, Tensor sin, " WARPSMITH_POSITIONS ", bool inverse)"
#define WARPSMITH_NORM_INPUTS \
  "Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin, float eps, " WARPSMITH_POSITIONS

WARPSMITH_OPS(m) {
  m.add_forward("rope", "(Tensor q, Tensor k, " WARPSMITH_ROPE_INPUTS " -> (Tensor q_out, Tensor k_out)",
                TORCH_BOX(&rope_forward));
  m.add("rope_inplace(Tensor(a!) q, Tensor(b!) k, " WARPSMITH_ROPE_INPUTS " -> ()", TORCH_BOX(&rope_inplace));
  m.add_forward("qk_norm_rope", "(" WARPSMITH_NORM_INPUTS ") -> (Tensor q_out, Tensor k_out)",
                TORCH_BOX(&norm_forward));
  m.add("qk_norm_rope_backward(Tensor dq_out, Tensor dk_out, " WARPSMITH_NORM_INPUTS
        ", bool want_dq, bool want_dk, bool want_dq_weight, bool want_dk_weight)"
        " -> (Tensor dq, Tensor dk, Tensor dq_weight, Tensor dk_weight)",
        TORCH_BOX(&norm_backward));
}

}  // namespace
}  // namespace warpsmith
