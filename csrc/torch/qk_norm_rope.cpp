#include "kernels/rope/qk_norm_rope.h"

#include "torch/support/device.h"
#include "torch/support/library.h"
#include "torch/support/rotary.h"
#include "torch/support/tensor.h"

namespace warpsmith {
namespace {

constexpr const char* kForward = "qk_norm_rope";
constexpr const char* kBackward = "qk_norm_rope_backward";

using OptionalTensor = std::optional<Tensor>;

int32_t sums_dtype(Dtype dtype) {
  return dtype == Dtype::float64 ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
}

Dtype check_weight(const char* op, const char* argument, const Tensor& weight, const Tensor& q, Dtype dtype) {
  const Dtype weight_dtype = float_dtype(op, argument, weight);
  if (weight_dtype != dtype && !(weight_dtype == Dtype::float32 && size_bytes(dtype) == 2))
    refuse(op, argument, size_bytes(dtype) == 2 ? std::string(name(dtype)) + " or float32" : name(dtype),
           name(weight_dtype));
  check_shape(op, argument, weight, {q.size(q.dim() - 1)});
  check_same_device(op, argument, weight, q);
  return weight_dtype;
}

Dtype check_weights(const char* op, const Tensor& q_weight, const Tensor& k_weight, const Tensor& q, Dtype dtype,
                    double eps) {
  const Dtype weight_dtype = check_weight(op, "q_weight", q_weight, q, dtype);
  check_dtype(op, "k_weight", k_weight, weight_dtype);
  check_weight(op, "k_weight", k_weight, q, dtype);
  if (!(eps >= 0)) refuse(op, "eps", "a number >= 0", std::to_string(eps));
  return weight_dtype;
}

std::tuple<Tensor, Tensor> forward(Tensor q_any, Tensor k_any, Tensor q_weight_any, Tensor k_weight_any, Tensor cos,
                                   Tensor sin, double eps, bool interleaved, OptionalTensor cu_seqlens,
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

// Gradients that are not wanted come back with zero elements.
std::tuple<Tensor, Tensor, Tensor, Tensor> backward(Tensor dq_out_any, Tensor dk_out_any, Tensor q_any, Tensor k_any,
                                                    Tensor q_weight_any, Tensor k_weight_any, Tensor cos, Tensor sin,
                                                    double eps, bool interleaved, OptionalTensor cu_seqlens,
                                                    OptionalTensor offsets, int64_t position_offset, bool want_dq,
                                                    bool want_dk, bool want_dq_weight, bool want_dk_weight) {
  const RotaryInputs in = rotary_inputs(kBackward, q_any, k_any, cos, sin, interleaved, cu_seqlens, offsets,
                                        position_offset, /*inverse=*/true);
  const Dtype weight_dtype = check_weights(kBackward, q_weight_any, k_weight_any, q_any, in.dtype, eps);
  const auto check_gradient = [&](const char* argument, const Tensor& gradient, const Tensor& of) {
    check_dtype(kBackward, argument, gradient, in.dtype);
    check_same_shape(kBackward, argument, gradient, of);
    check_same_device(kBackward, argument, gradient, of);
  };
  check_gradient("dq_out", dq_out_any, q_any);
  check_gradient("dk_out", dk_out_any, k_any);
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
    const int64_t sizes[3] = {partial_rows, 2, in.shape.head_dim};
    partials = allocate(kBackward, "partial sums of the weights' gradients", sizes, 3, sums_dtype(in.dtype), q_any);
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

#define WARPSMITH_QK_NORM_ROPE_INPUTS                                                                           \
  "Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin, float eps, bool interleaved, " \
  "Tensor? "                                                                                                    \
  "cu_seqlens, Tensor? offsets, SymInt position_offset"

WARPSMITH_SCHEMAS(m) {
  m.def("qk_norm_rope(" WARPSMITH_QK_NORM_ROPE_INPUTS ") -> (Tensor q_out, Tensor k_out)");
  m.def("qk_norm_rope_forward(" WARPSMITH_QK_NORM_ROPE_INPUTS ") -> (Tensor q_out, Tensor k_out)");
  m.def("qk_norm_rope_backward(Tensor dq_out, Tensor dk_out, " WARPSMITH_QK_NORM_ROPE_INPUTS
        ", bool want_dq, bool want_dk, bool want_dq_weight, bool want_dk_weight)"
        " -> (Tensor dq, Tensor dk, Tensor dq_weight, Tensor dk_weight)");
}

WARPSMITH_IMPLEMENTATIONS(m) {
  m.impl("qk_norm_rope", TORCH_BOX(&forward));
  m.impl("qk_norm_rope_forward", TORCH_BOX(&forward));
  m.impl("qk_norm_rope_backward", TORCH_BOX(&backward));
}

}  // namespace
}  // namespace warpsmith
