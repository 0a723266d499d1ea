#include "kernels/attention/attention.h"

#include "torch/support/attention.h"
#include "torch/support/device.h"
#include "torch/support/library.h"

namespace warpsmith {
namespace {

using namespace attention;

// What forward and backward are given beside their own tensors.
struct Inputs {
  Tensor q;
  OptionalTensor k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, bias, sink, seed;
  int64_t max_seqlen_q, max_seqlen_k, layout, kv_heads;
  bool bottom_right;
  int64_t window_left, window_right;
  std::optional<double> softmax_scale;
  double softcap, dropout_p;
};

// The tensors that a problem points to are kept alive by `in`, whose last dimensions it makes contiguous.
struct Checked {
  ThreeHeads heads;
  AttentionProblem problem{};
};

void check_heads(const char* op, Inputs& in, Dtype dtype) {
  const Packing packing(in.k, in.v, in.kv_heads);
  check_rank(op, "q", in.q, in.layout, packing.stacked_q ? 3 : 0);
  if (in.k) {
    check_dtype(op, "k", *in.k, dtype);
    check_rank(op, "k", *in.k, in.layout, packing.stacked_k ? 2 : 0);
    check_same_device(op, "k", *in.k, in.q);
  }
  if (in.v) {
    check_dtype(op, "v", *in.v, dtype);
    check_rank(op, "v", *in.v, in.layout, 0);
    check_same_device(op, "v", *in.v, in.q);
  }
  if (packing.tensors == 1 && in.kv_heads != 0) {
    const int64_t heads = in.q.size(Dims(in.layout, false).heads);
    if (in.kv_heads < 0 || in.kv_heads > (heads - 1) / 2)
      refuse(op, "kv_heads", "from 1 to " + std::to_string((heads - 1) / 2) + " of " + std::to_string(heads) + " heads",
             std::to_string(in.kv_heads));
  }
}

void check_sizes(const char* op, const Inputs& in, const ThreeHeads& h) {
  const auto check = [&](const char* argument, const char* what, int64_t got, int64_t expected) {
    if (got != expected) refuse(op, argument, std::to_string(expected) + " " + what, std::to_string(got));
  };
  const char* k = in.k ? "k" : "q";
  const char* v = in.v ? "v" : k;
  check(k, "batch entries", h.k.batch, h.q.batch);
  check(k, "elements a head", h.k.width, h.q.width);
  check(v, "batch entries", h.v.batch, h.k.batch);
  check(v, "tokens", h.v.tokens, h.k.tokens);
  check(v, "heads", h.v.heads, h.k.heads);
  const auto check_width = [&](const char* argument, int64_t width) {
    if (width < 8 || width > 256 || width % 8)
      refuse(op, argument, "8 to 256 elements a head, in steps of 8", std::to_string(width));
  };
  check_width("q", h.q.width);
  check_width(v, h.v.width);
  if (h.k.heads == 0 ? h.q.heads != 0 : h.q.heads % h.k.heads != 0)
    refuse(op, k, "a number of heads that divides " + std::to_string(h.q.heads), std::to_string(h.k.heads));
}

// Offsets that the host can read are checked; on a GPU the kernels clamp them.
void check_offsets(const char* op, const char* argument, const int32_t* cu, int64_t sequences, int64_t total,
                   const char* max_argument, int64_t max_seqlen) {
  if (cu[0] != 0) refuse(op, argument, "0 as the first offset", std::to_string(cu[0]));
  for (int64_t i = 0; i < sequences; ++i) {
    const int64_t length = int64_t{cu[i + 1]} - cu[i];
    if (length < 0 || cu[i + 1] > total)
      refuse(op, argument, "offsets that never fall, of at most " + std::to_string(total) + " tokens",
             std::to_string(cu[i + 1]) + " after " + std::to_string(cu[i]) + " at index " + std::to_string(i + 1));
    if (length > max_seqlen)
      refuse(op, max_argument, "at least " + std::to_string(length) + ", the length of sequence " + std::to_string(i),
             std::to_string(max_seqlen));
  }
}

void check_packed(const char* op, Inputs& in, const ThreeHeads& h, AttentionProblem& p) {
  const auto check = [&](const char* argument, OptionalTensor& cu) {
    if (!cu) refuse(op, argument, "a tensor", "None");
    if (cu->scalar_type() != ScalarType::Int) refuse(op, argument, "int32", dtype_text(cu->scalar_type()));
    if (cu->dim() != 1 || cu->size(0) < 2) refuse(op, argument, "shape (sequences + 1)", shape_text(*cu));
    check_same_device(op, argument, *cu, in.q);
    cu = as_contiguous(*cu, op);
    return static_cast<const int32_t*>(cu->const_data_ptr());
  };
  p.cu_seqlens_q = check("cu_seqlens_q", in.cu_seqlens_q);
  p.cu_seqlens_k = check("cu_seqlens_k", in.cu_seqlens_k);
  p.batch = in.cu_seqlens_q->size(0) - 1;
  check_shape(op, "cu_seqlens_k", *in.cu_seqlens_k, {p.batch + 1});
  if (in.max_seqlen_q < 0) refuse(op, "max_seqlen_q", "an integer >= 0", std::to_string(in.max_seqlen_q));
  if (in.max_seqlen_k < 0) refuse(op, "max_seqlen_k", "an integer >= 0", std::to_string(in.max_seqlen_k));
  p.seqlen_q = in.max_seqlen_q;
  p.seqlen_k = in.max_seqlen_k;
  p.total_q = h.q.tokens;
  p.total_k = h.k.tokens;
  if (!in.q.is_cpu()) return;
  check_offsets(op, "cu_seqlens_q", p.cu_seqlens_q, p.batch, p.total_q, "max_seqlen_q", p.seqlen_q);
  check_offsets(op, "cu_seqlens_k", p.cu_seqlens_k, p.batch, p.total_k, "max_seqlen_k", p.seqlen_k);
}

void check_bias(const char* op, const Tensor& bias, const Inputs& in, AttentionProblem& p) {
  const bool mask = dtype_of(op, "bias", bias) == ScalarType::Bool;
  if (!mask) p.bias_dtype = check_dtype_beside(op, "bias", bias, p.dtype);
  const int64_t full[4] = {p.batch, p.heads_q, p.seqlen_q, p.seqlen_k};
  bool fits = bias.dim() <= 4;
  for (int64_t i = 0; fits && i < bias.dim(); ++i) fits = bias.size(i) == 1 || bias.size(i) == full[4 - bias.dim() + i];
  if (!fits) {
    std::string text;
    for (const int64_t size : full) text += (text.empty() ? "" : ", ") + std::to_string(size);
    refuse(op, "bias", "a shape that broadcasts to (" + text + ")", shape_text(bias));
  }
  check_same_device(op, "bias", bias, in.q);
  (mask ? p.mask : p.bias) = bias.const_data_ptr();
  (mask ? p.mask_strides : p.bias_strides) = broadcast_strides(bias);
}

void check_numbers(const char* op, const Inputs& in, AttentionProblem& p) {
  const auto window = [&](int64_t size) {
    if (size < -1) refuse(op, "window_size", "two integers >= -1", std::to_string(size));
    return size >= p.seqlen_q + p.seqlen_k ? -1 : size;  // no key is that far away
  };
  p.window_left = window(in.window_left);
  p.window_right = window(in.window_right);
  p.align_bottom_right = in.bottom_right;
  p.softmax_scale = in.softmax_scale ? *in.softmax_scale : 1 / std::sqrt(static_cast<double>(p.head_dim));
  if (!std::isfinite(p.softmax_scale)) refuse(op, "softmax_scale", "a finite number", std::to_string(p.softmax_scale));
  if (!(in.softcap >= 0) || !std::isfinite(in.softcap))
    refuse(op, "softcap", "a finite number >= 0", std::to_string(in.softcap));
  p.softcap = in.softcap;
}

void check_parameters(const char* op, Inputs& in, AttentionProblem& p) {
  if (in.alibi_slopes) {
    Tensor& slopes = *in.alibi_slopes;
    if (dtype_of(op, "alibi_slopes", slopes) != ScalarType::Float)
      refuse(op, "alibi_slopes", "float32", dtype_text(slopes.scalar_type()));
    if (slopes.dim() == 2)
      check_shape(op, "alibi_slopes", slopes, {p.batch, p.heads_q});
    else
      check_shape(op, "alibi_slopes", slopes, {p.heads_q});
    check_same_device(op, "alibi_slopes", slopes, in.q);
    slopes = as_contiguous(slopes, op);
    p.alibi_slopes = static_cast<const float*>(slopes.const_data_ptr());
    p.alibi_batch_stride = slopes.dim() == 2 ? p.heads_q : 0;
  }
  if (in.bias) check_bias(op, *in.bias, in, p);
  if (in.sink) {
    p.sink_dtype = check_dtype_beside(op, "sink", *in.sink, p.dtype);
    check_shape(op, "sink", *in.sink, {p.heads_q});
    check_same_device(op, "sink", *in.sink, in.q);
    in.sink = as_contiguous(*in.sink, op);
    p.sink = in.sink->const_data_ptr();
  }
  if (!(in.dropout_p >= 0 && in.dropout_p < 1))
    refuse(op, "dropout_p", "a number in [0, 1)", std::to_string(in.dropout_p));
  p.dropout = make_dropout(nullptr, in.dropout_p);
  if (in.seed && in.dropout_p > 0) {
    if (in.seed->scalar_type() != ScalarType::Long) refuse(op, "seed", "int64", dtype_text(in.seed->scalar_type()));
    check_shape(op, "seed", *in.seed, {2});
    check_same_device(op, "seed", *in.seed, in.q);
    in.seed = as_contiguous(*in.seed, op);
    p.dropout.seed = static_cast<const int64_t*>(in.seed->const_data_ptr());
  }
}

Checked check(const char* op, Inputs& in) {
  Checked c;
  AttentionProblem& p = c.problem;
  p.dtype = float_dtype(op, "q", in.q);
  check_heads(op, in, p.dtype);
  const auto readable = in.q.is_cuda() ? for_tensor_maps : with_adjacent_elements;
  in.q = readable(op, in.q);
  if (in.k) in.k = readable(op, *in.k);
  if (in.v) in.v = readable(op, *in.v);
  c.heads = split(in.q, in.k, in.v, in.layout, in.kv_heads);
  check_sizes(op, in, c.heads);
  const auto& [q, k, v] = c.heads;
  p.batch = q.batch;
  p.heads_q = q.heads;
  p.heads_k = k.heads;
  p.seqlen_q = q.tokens;
  p.seqlen_k = k.tokens;
  p.head_dim = q.width;
  p.head_dim_v = v.width;
  p.total_q = p.batch * p.seqlen_q;
  p.total_k = p.batch * p.seqlen_k;
  if (in.cu_seqlens_q || in.cu_seqlens_k) check_packed(op, in, c.heads, p);
  check_numbers(op, in, p);
  check_parameters(op, in, p);
  return c;
}

bool nothing_to_do(const AttentionProblem& p) { return p.batch == 0 || p.heads_q == 0; }

// Runs a kernel on the device of q: `bytes` says how much workspace it wants, and `run` is given it.
template <class Bytes, class Run>
Status with_workspace(const char* op, const Tensor& q, OptionalTensor& workspace, Bytes&& bytes, Run&& run) {
  int64_t count = 0;
  WARPSMITH_RETURN_IF_FAILED(bytes(&count));
  if (count > 0) workspace = allocate_vector(op, "workspace", count, aoti_torch_dtype_uint8(), q);
  return run(workspace ? workspace->mutable_data_ptr() : nullptr);
}

// (batch, heads, tokens), without a batch dimension where there is none.
Tensor allocate_lse(const char* op, const Inputs& in, const AttentionProblem& p) {
  const int64_t tokens = in.layout == kTokensHeads ? p.total_q : p.seqlen_q;
  const int64_t sizes[3] = {p.batch, p.heads_q, tokens};
  const bool batched = in.layout != kTokensHeads;
  return allocate(op, "lse", batched ? sizes : sizes + 1, batched ? 3 : 2, statistics_dtype(p.dtype), in.q);
}

std::tuple<Tensor, Tensor> forward(Tensor q, OptionalTensor k, OptionalTensor v, OptionalTensor cu_seqlens_q,
                                   OptionalTensor cu_seqlens_k, OptionalTensor alibi_slopes, OptionalTensor bias,
                                   OptionalTensor sink, OptionalTensor seed, int64_t max_seqlen_q, int64_t max_seqlen_k,
                                   int64_t layout, int64_t kv_heads, bool bottom_right, int64_t window_left,
                                   int64_t window_right, std::optional<double> softmax_scale, double softcap,
                                   double dropout_p, bool) {
  const char* op = cu_seqlens_q || cu_seqlens_k ? "attention_varlen" : "attention";
  Inputs in{q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            alibi_slopes,
            bias,
            sink,
            seed,
            max_seqlen_q,
            max_seqlen_k,
            layout,
            kv_heads,
            bottom_right,
            window_left,
            window_right,
            softmax_scale,
            softcap,
            dropout_p};
  const Checked c = check(op, in);
  const AttentionProblem& p = c.problem;
  const Packing packing(k, v, kv_heads);
  const Tensor out = allocate_heads(op, "out", q, layout, packing.stacked_q, /*one=*/true, p.heads_q, p.head_dim_v);
  const Tensor lse = allocate_lse(op, in, p);
  if (nothing_to_do(p)) return {out, lse};
  AttentionFwdParams params{p,
                            c.heads.q.data(p.dtype),
                            c.heads.k.data(p.dtype),
                            c.heads.v.data(p.dtype),
                            out.mutable_data_ptr(),
                            lse.mutable_data_ptr(),
                            c.heads.q.strides,
                            c.heads.k.strides,
                            c.heads.v.strides,
                            part_of(out, Dims(layout, false), false, 0, p.heads_q).strides,
                            nullptr};
  OptionalTensor workspace;
  run_on(
      op, q,
      [&](void* stream) {
        WARPSMITH_RETURN_IF_FAILED(attention_forward_supported_cuda(params));
        return with_workspace(
            op, q, workspace, [&](int64_t* bytes) { return attention_forward_workspace_cuda(params, bytes); },
            [&](void* memory) {
              params.workspace = memory;
              return attention_forward_cuda(params, stream);
            });
      },
      [&](const Parallel& threads) { return attention_forward_cpu(params, threads); });
  return {out, lse};
}

// Gradients of q, k and v, in tensors like the given ones: dk and dv have no elements where dq (or dk) holds them.
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

// Gradients that are not wanted come back with zero elements.
FiveTensors backward(Tensor dout, OptionalTensor dlse, Tensor q, OptionalTensor k, OptionalTensor v,
                     OptionalTensor cu_seqlens_q, OptionalTensor cu_seqlens_k, OptionalTensor alibi_slopes,
                     OptionalTensor bias, OptionalTensor sink, OptionalTensor seed, int64_t max_seqlen_q,
                     int64_t max_seqlen_k, int64_t layout, int64_t kv_heads, bool bottom_right, int64_t window_left,
                     int64_t window_right, std::optional<double> softmax_scale, double softcap, double dropout_p,
                     bool deterministic, Tensor out, Tensor lse, bool want_dbias, bool want_dsink) {
  const char* op = cu_seqlens_q || cu_seqlens_k ? "attention_varlen_backward" : "attention_backward";
  Inputs in{q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            alibi_slopes,
            bias,
            sink,
            seed,
            max_seqlen_q,
            max_seqlen_k,
            layout,
            kv_heads,
            bottom_right,
            window_left,
            window_right,
            softmax_scale,
            softcap,
            dropout_p};
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
  if (want_dbias && (!bias || !p.bias)) refuse(op, "bias", "a floating tensor whose gradient is wanted", "none");
  if (want_dsink && !sink) refuse(op, "sink", "a tensor whose gradient is wanted", "None");

  Gradients gradients = allocate_gradients(op, q, k, v, layout, kv_heads);
  const auto none = [&] { return allocate_vector(op, "no gradient", 0, dtype_code(q), q); };
  Tensor dbias = want_dbias ? allocate_like(op, "dbias", *bias) : none();
  Tensor dsink = want_dsink ? allocate_like(op, "dsink", *sink) : none();
  if (nothing_to_do(p)) {
    for (Tensor* t : {&gradients.dq, &gradients.dk, &gradients.dv, &dbias, &dsink}) torch::stable::zero_(*t);
    return {gradients.dq, gradients.dk, gradients.dv, dbias, dsink};
  }
  const auto readable = q.is_cuda() ? for_tensor_maps : with_adjacent_elements;
  dout = readable(op, dout);
  out = readable(op, out);
  lse = as_contiguous(lse, op);
  if (dlse) dlse = as_contiguous(*dlse, op);
  const ThreeHeads d = split(gradients.dq, k ? OptionalTensor(gradients.dk) : OptionalTensor(),
                             v ? OptionalTensor(gradients.dv) : OptionalTensor(), layout, kv_heads);
  AttentionBwdParams params{p,
                            dout.const_data_ptr(),
                            dlse ? dlse->const_data_ptr() : nullptr,
                            c.heads.q.data(p.dtype),
                            c.heads.k.data(p.dtype),
                            c.heads.v.data(p.dtype),
                            out.const_data_ptr(),
                            lse.const_data_ptr(),
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
                            deterministic,
                            nullptr};
  OptionalTensor workspace;
  run_on(
      op, q,
      [&](void* stream) {
        WARPSMITH_RETURN_IF_FAILED(attention_backward_supported_cuda(params));
        return with_workspace(
            op, q, workspace, [&](int64_t* bytes) { return attention_backward_workspace_cuda(params, bytes); },
            [&](void* memory) {
              params.workspace = memory;
              return attention_backward_cuda(params, stream);
            });
      },
      [&](const Parallel& threads) {
        const auto bytes = [&](int64_t* count) {
          *count = attention_backward_workspace_cpu(params);
          return Status();
        };
        return with_workspace(op, q, workspace, bytes, [&](void* memory) {
          params.workspace = memory;
          return attention_backward_cpu(params, threads);
        });
      });
  return {gradients.dq, gradients.dk, gradients.dv, dbias, dsink};
}

#define WARPSMITH_ATTENTION_INPUTS                                                                                   \
  "Tensor q, Tensor? k, Tensor? v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? alibi_slopes, Tensor? bias, " \
  "Tensor? sink, Tensor? seed, SymInt max_seqlen_q, SymInt max_seqlen_k, int layout, int kv_heads, "                 \
  "bool bottom_right, SymInt window_left, SymInt window_right, float? softmax_scale, float softcap, "                \
  "float dropout_p, bool deterministic"

WARPSMITH_SCHEMAS(m) {
  m.def("attention(" WARPSMITH_ATTENTION_INPUTS ") -> (Tensor out, Tensor lse)");
  m.def("attention_forward(" WARPSMITH_ATTENTION_INPUTS ") -> (Tensor out, Tensor lse)");
  m.def("attention_backward(Tensor dout, Tensor? dlse, " WARPSMITH_ATTENTION_INPUTS
        ", Tensor out, Tensor lse, bool want_dbias, bool want_dsink)"
        " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)");
}

WARPSMITH_IMPLEMENTATIONS(m) {
  m.impl("attention", TORCH_BOX(&forward));
  m.impl("attention_forward", TORCH_BOX(&forward));
  m.impl("attention_backward", TORCH_BOX(&backward));
}

}  // namespace
}  // namespace warpsmith
