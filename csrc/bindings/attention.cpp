#include "kernels/attention/attention.h"

#include <utility>

#include "bindings/support/attention_checks.h"
#include "bindings/support/device.h"
#include "bindings/support/library.h"

namespace warpsmith {
namespace {

using namespace attention;

bool nothing_to_do(const AttentionProblem& p) { return p.batch == 0 || p.heads_q == 0; }

// The memory of a workspace on the device of q, which `workspace` keeps; null for 0 bytes.
void* allocate_workspace(const char* op, const Tensor& q, int64_t bytes, OptionalTensor& workspace) {
  if (bytes == 0) return nullptr;
  workspace = allocate_vector(op, "workspace", bytes, aoti_torch_dtype_uint8(), q);
  return workspace->mutable_data_ptr();
}

// Shape (batch, heads, tokens), or (heads, tokens) for layouts without a batch dimension.
Tensor allocate_lse(const char* op, const char* argument, const Inputs& in, const AttentionProblem& p) {
  const int64_t tokens = in.layout == kTokensHeads ? p.total_q : p.seqlen_q;
  const int64_t sizes[3] = {p.batch, p.heads_q, tokens};
  const bool batched = in.layout != kTokensHeads;
  return allocate(op, argument, batched ? sizes : sizes + 1, batched ? 3 : 2, statistics_dtype(p.dtype), in.q);
}

std::tuple<Tensor, Tensor, Tensor> forward(Inputs in) {
  const char* op = in.cu_seqlens_q || in.cu_seqlens_k ? "attention_varlen" : "attention";
  const Tensor q = in.q;  // as given; check() may replace tensors by copies
  const Packing packing(in.k, in.v, in.kv_heads);
  const Checked c = check(op, in);
  const AttentionProblem& p = c.problem;
  const Tensor out = allocate_heads(op, "out", q, in.layout, packing.stacked_q, /*one=*/true, p.heads_q, p.head_dim_v);
  const Tensor lse = allocate_lse(op, "lse", in, p), lse_rest = allocate_lse(op, "lse_rest", in, p);
  if (nothing_to_do(p)) return {out, lse, lse_rest};
  AttentionFwdParams params{p,
                            c.heads.q.data(p.dtype),
                            c.heads.k.data(p.dtype),
                            c.heads.v.data(p.dtype),
                            out.mutable_data_ptr(),
                            lse.mutable_data_ptr(),
                            lse_rest.mutable_data_ptr(),
                            c.heads.q.strides,
                            c.heads.k.strides,
                            c.heads.v.strides,
                            part_of(out, Dims(in.layout, false), false, 0, p.heads_q).strides,
                            nullptr};
  OptionalTensor workspace;
  run_on(
      op, q,
      [&](void* stream) {
        AttentionForwardPlan plan;
        WARPSMITH_RETURN_IF_FAILED(attention_forward_plan_cuda(params, plan));
        params.workspace = allocate_workspace(op, q, plan.workspace_bytes, workspace);
        return attention_forward_cuda(params, plan, stream);
      },
      [&](const Parallel& threads) { return attention_forward_cpu(params, threads); });
  return {out, lse, lse_rest};
}

// The gradients of q, k and v, in tensors like the given ones. Where q (or k) stacks several tensors, dq (or dk) does
// too, and the others have no elements.
struct Gradients {
  Tensor dq, dk, dv;
};

Gradients allocate_gradients(const char* op, const Tensor& q, const OptionalTensor& k, const OptionalTensor& v,
                             int64_t layout, int64_t kv_heads) {
  const Packing packing(k, v, kv_heads);
  const auto none = [&] { return allocate_vector(op, "no gradient", 0, dtype_code(q), q); };
  const auto like = [&](const char* argument, const Tensor& t, bool stacked) {
    return allocate_heads(op, argument, t, layout, stacked, /*one=*/false, t.size(Dims(layout, stacked).heads),
                          t.size(t.dim() - 1));
  };
  return {like("dq", q, packing.stacked_q), k ? like("dk", *k, packing.stacked_k) : none(),
          v ? like("dv", *v, false) : none()};
}

using FiveTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// What the backward takes beside the inputs: the upstream gradients and what the forward gave.
struct Outputs {
  Tensor dout;
  OptionalTensor dlse;
  Tensor out, lse;
  OptionalTensor lse_rest;
};

// Unwanted gradients are returned with zero elements.
FiveTensors backward(Inputs in, Outputs given, bool want_dbias, bool want_dsink) {
  const char* op = in.cu_seqlens_q || in.cu_seqlens_k ? "attention_varlen_backward" : "attention_backward";
  const Tensor q = in.q;  // as given; check() may replace tensors by copies
  const OptionalTensor k = in.k, v = in.v, sink = in.sink;
  const OptionalTensor& bias = in.bias;
  const int64_t layout = in.layout;
  auto& [dout, dlse, out, lse, lse_rest] = given;
  const Checked c = check(op, in);
  const AttentionProblem& p = c.problem;
  const Dims plain(layout, false);
  const auto check_out = [&](const char* argument, const Tensor& t) {
    check_dtype(op, argument, t, p.dtype);
    check_rank(op, argument, t, layout, 0);
    const Heads h = part_of(t, plain, false, 0, t.size(plain.heads)), &of = c.heads.q;
    if (h.batch != of.batch || h.tokens != of.tokens || h.heads != p.heads_q || h.width != p.head_dim_v)
      refuse(op, argument, "the shape of the output", shape_text(t));
    check_same_device(op, argument, t, q);
  };
  check_out("dout", dout);
  check_out("out", out);
  const auto check_statistics = [&](const char* argument, const Tensor& t) {
    check_dtype(op, argument, t, p.dtype == Dtype::float64 ? Dtype::float64 : Dtype::float32);
    if (layout == kTokensHeads)
      check_shape(op, argument, t, {p.heads_q, c.heads.q.tokens});
    else
      check_shape(op, argument, t, {p.batch, p.heads_q, p.seqlen_q});
    check_same_device(op, argument, t, q);
  };
  check_statistics("lse", lse);
  if (dlse) check_statistics("dlse", *dlse);
  if (lse_rest) check_statistics("lse_rest", *lse_rest);
  if (want_dbias && (!bias || !p.bias)) refuse(op, "bias", "a floating tensor whose gradient is wanted", "none");
  if (want_dsink && !sink) refuse(op, "sink", "a tensor whose gradient is wanted", "None");

  Gradients gradients = allocate_gradients(op, q, k, v, layout, in.kv_heads);
  const auto none = [&] { return allocate_vector(op, "no gradient", 0, dtype_code(q), q); };
  Tensor dbias = want_dbias ? allocate_like(op, "dbias", *bias) : none();
  Tensor dsink = want_dsink ? allocate_like(op, "dsink", *sink) : none();
  if (nothing_to_do(p)) {
    for (Tensor* t : {&gradients.dq, &gradients.dk, &gradients.dv, &dbias, &dsink}) torch::stable::zero_(*t);
    return {gradients.dq, gradients.dk, gradients.dv, dbias, dsink};
  }
  const auto readable = runs_kernels(q) ? for_tensor_maps : with_adjacent_elements;
  dout = readable(op, dout);
  out = readable(op, out);
  lse = as_contiguous(lse, op);
  if (dlse) dlse = as_contiguous(*dlse, op);
  if (lse_rest) lse_rest = as_contiguous(*lse_rest, op);
  const ThreeHeads d = split(gradients.dq, k ? OptionalTensor(gradients.dk) : OptionalTensor(),
                             v ? OptionalTensor(gradients.dv) : OptionalTensor(), layout, in.kv_heads);
  AttentionBwdParams params{p,
                            dout.const_data_ptr(),
                            dlse ? dlse->const_data_ptr() : nullptr,
                            c.heads.q.data(p.dtype),
                            c.heads.k.data(p.dtype),
                            c.heads.v.data(p.dtype),
                            out.const_data_ptr(),
                            lse.const_data_ptr(),
                            lse_rest ? lse_rest->const_data_ptr() : nullptr,
                            d.q.mutable_data(p.dtype),
                            d.k.mutable_data(p.dtype),
                            d.v.mutable_data(p.dtype),
                            want_dbias ? dbias.mutable_data_ptr() : nullptr,
                            want_dsink ? dsink.mutable_data_ptr() : nullptr,
                            part_of(dout, plain, false, 0, p.heads_q).strides,
                            c.heads.q.strides,
                            c.heads.k.strides,
                            c.heads.v.strides,
                            part_of(out, plain, false, 0, p.heads_q).strides,
                            d.q.strides,
                            d.k.strides,
                            d.v.strides,
                            want_dbias ? broadcast_strides(dbias) : AttentionBiasStrides{},
                            in.deterministic,
                            nullptr};
  OptionalTensor workspace;
  run_on(
      op, q,
      [&](void* stream) {
        AttentionBackwardPlan plan;
        WARPSMITH_RETURN_IF_FAILED(attention_backward_plan_cuda(params, plan));
        params.workspace = allocate_workspace(op, q, plan.workspace_bytes, workspace);
        return attention_backward_cuda(params, plan, stream);
      },
      [&](const Parallel& threads) {
        params.workspace = allocate_workspace(op, q, attention_backward_workspace_cpu(params), workspace);
        return attention_backward_cpu(params, threads);
      });
  return {gradients.dq, gradients.dk, gradients.dv, dbias, dsink};
}

// The raw ops' signatures begin with, or contain, the members of Inputs in their order.
using InputTypes = void(Tensor q, OptionalTensor k, OptionalTensor v, OptionalTensor cu_seqlens_q,
                        OptionalTensor cu_seqlens_k, OptionalTensor alibi_slopes, OptionalTensor bias,
                        OptionalTensor sink, OptionalTensor seed, int64_t max_seqlen_q, int64_t max_seqlen_k,
                        int64_t layout, int64_t kv_heads, bool bottom_right, int64_t window_left, int64_t window_right,
                        std::optional<double> softmax_scale, double softcap, double dropout_p, bool deterministic);
template <class Types> struct Boxed;
template <class... A> struct Boxed<void(A...)> {
  using DropoutPlace = std::optional<std::vector<int64_t>>;
  static std::tuple<Tensor, Tensor, Tensor> forward(A... inputs, DropoutPlace dropout_place) {
    return warpsmith::forward({std::move(inputs)..., std::move(dropout_place)});
  }
  static FiveTensors backward(Tensor dout, OptionalTensor dlse, A... inputs, Tensor out, Tensor lse, bool want_dbias,
                              bool want_dsink, DropoutPlace dropout_place, OptionalTensor lse_rest) {
    return warpsmith::backward({std::move(inputs)..., std::move(dropout_place)}, {dout, dlse, out, lse, lse_rest},
                               want_dbias, want_dsink);
  }
};
// g++ 12 does not instantiate a function whose address only a template takes.
template struct Boxed<InputTypes>;

#define WARPSMITH_ATTENTION_INPUTS                                                                                   \
  "Tensor q, Tensor? k, Tensor? v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? alibi_slopes, Tensor? bias, " \
  "Tensor? sink, Tensor? seed, SymInt max_seqlen_q, SymInt max_seqlen_k, int layout, int kv_heads, "                 \
  "bool bottom_right, SymInt window_left, SymInt window_right, float? softmax_scale, float softcap, "                \
  "float dropout_p, bool deterministic"
// (first_query, queries, first_key, first_head, heads) of a larger call of which the call is a part.
#define WARPSMITH_DROPOUT_PLACE ", int[]? dropout_place=None"

WARPSMITH_OPS(m) {
  m.add_forward("attention",
                "(" WARPSMITH_ATTENTION_INPUTS WARPSMITH_DROPOUT_PLACE ") -> (Tensor out, Tensor lse, Tensor lse_rest)",
                TORCH_BOX(&Boxed<InputTypes>::forward));
  m.add("attention_backward(Tensor dout, Tensor? dlse, " WARPSMITH_ATTENTION_INPUTS
        ", Tensor out, Tensor lse, bool want_dbias, bool want_dsink" WARPSMITH_DROPOUT_PLACE
        ", Tensor? lse_rest=None)"
        " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)",
        TORCH_BOX(&Boxed<InputTypes>::backward));
}

#ifdef WARPSMITH_CUDA
WARPSMITH_HOST_OPS(m) { m.add("_attention_portable_alone(bool on) -> ()", TORCH_BOX(&attention_portable_alone)); }
#endif

}  // namespace
}  // namespace warpsmith
