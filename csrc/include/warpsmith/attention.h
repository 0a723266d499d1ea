#pragma once
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <limits>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "warpsmith/op.h"

namespace warpsmith {

enum class AttentionLayout : int64_t { bshd, bhsd, thd };

// The keyword arguments of warpsmith.attention in Python. -1: no limit of the window.
struct AttentionOptions {
  bool causal = false;
  bool align_bottom_right = true;
  int64_t window_left = -1, window_right = -1;
  std::optional<double> softmax_scale = std::nullopt;
  double softcap = 0.0;
  double dropout_p = 0.0;
  std::optional<at::Tensor> alibi_slopes = std::nullopt;
  std::optional<at::Tensor> bias = std::nullopt;
  std::optional<at::Tensor> sink = std::nullopt;
  bool deterministic = true;
  AttentionLayout layout = AttentionLayout::bshd;
  std::optional<at::Tensor> seed = std::nullopt;
  int64_t kv_heads = 0;
};

namespace detail {

using OptionalTensor = std::optional<at::Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr size_t kAttentionTensors = 9;
constexpr size_t kAttentionInputs[5] = {0, 1, 2, 6, 7};  // the inputs that have gradients

// The arguments of the raw ops, in the order of the schema. An undefined tensor is an absent one.
struct AttentionCall {
  variable_list tensors;          // q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, bias, sink, seed
  std::vector<int64_t> integers;  // max_seqlen_q, max_seqlen_k, layout, kv_heads, bottom right, window, deterministic
  std::optional<double> softmax_scale;
  double softcap, dropout_p;

  OptionalTensor optional(size_t i) const { return tensors[i].defined() ? OptionalTensor(tensors[i]) : std::nullopt; }
};

// {out, lse, lse_rest}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_forward(const AttentionCall& c) {
  using Signature = std::tuple<at::Tensor, at::Tensor, at::Tensor>(
      const at::Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
      const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, c10::SymInt,
      c10::SymInt, int64_t, int64_t, bool, c10::SymInt, c10::SymInt, std::optional<double>, double, double, bool,
      at::OptionalIntArrayRef);
  static const auto op = find_op<Signature>("warpsmith::attention_forward");
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto& i = c.integers;
  return op.call(c.tensors[0], c.optional(1), c.optional(2), c.optional(3), c.optional(4), c.optional(5), c.optional(6),
                 c.optional(7), c.optional(8), i[0], i[1], i[2], i[3], i[4] != 0, i[5], i[6], c.softmax_scale,
                 c.softcap, c.dropout_p, i[7] != 0, std::nullopt);
}

// {dq, dk, dv, dbias, dsink}. A gradient that is not wanted, or that lies inside dq or dk, has no elements.
inline variable_list attention_backward(const at::Tensor& dout, const OptionalTensor& dlse, const AttentionCall& c,
                                        const at::Tensor& out, const at::Tensor& lse, const at::Tensor& lse_rest,
                                        bool want_dbias, bool want_dsink) {
  using Signature = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
      const at::Tensor&, const OptionalTensor&, const at::Tensor&, const OptionalTensor&, const OptionalTensor&,
      const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
      const OptionalTensor&, c10::SymInt, c10::SymInt, int64_t, int64_t, bool, c10::SymInt, c10::SymInt,
      std::optional<double>, double, double, bool, const at::Tensor&, const at::Tensor&, bool, bool,
      at::OptionalIntArrayRef, const OptionalTensor&);
  static const auto op = find_op<Signature>("warpsmith::attention_backward");
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto& i = c.integers;
  auto [dq, dk, dv, dbias, dsink] = op.call(
      dout, dlse, c.tensors[0], c.optional(1), c.optional(2), c.optional(3), c.optional(4), c.optional(5),
      c.optional(6), c.optional(7), c.optional(8), i[0], i[1], i[2], i[3], i[4] != 0, i[5], i[6], c.softmax_scale,
      c.softcap, c.dropout_p, i[7] != 0, out, lse, want_dbias, want_dsink, std::nullopt, lse_rest);
  return {std::move(dq), std::move(dk), std::move(dv), std::move(dbias), std::move(dsink)};
}

// The gradients as a separate autograd function, for create_graph only. It refuses its derivative, which would
// otherwise silently be zero.
struct AttentionBackward : torch::autograd::Function<AttentionBackward> {
  // Tensors that may have a graph are separate arguments, because tensors in a list get no autograd edges.
  static variable_list forward(AutogradContext*, const at::Tensor& dout, const OptionalTensor& dlse, const at::Tensor&,
                               const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                               const OptionalTensor&, const AttentionCall& call, const at::Tensor& out,
                               const at::Tensor& lse, const at::Tensor& lse_rest, bool want_dbias, bool want_dsink) {
    return attention_backward(dout, dlse, call, out, lse, lse_rest, want_dbias, want_dsink);
  }

  static variable_list backward(AutogradContext*, variable_list) {
    throw std::runtime_error("attention: second derivatives are not available");
  }
};

struct Attention : torch::autograd::Function<Attention> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& /*q*/, const OptionalTensor& /*k*/,
                               const OptionalTensor& /*v*/, const OptionalTensor& /*bias*/,
                               const OptionalTensor& /*sink*/, const AttentionCall& call) {
    auto [out, lse, lse_rest] = attention_forward(call);
    variable_list kept = call.tensors;
    kept.push_back(out);
    kept.push_back(lse);
    kept.push_back(std::move(lse_rest));
    ctx->save_for_backward(std::move(kept));
    ctx->saved_data["integers"] = call.integers;
    ctx->saved_data["softmax_scale"] = call.softmax_scale.value_or(std::numeric_limits<double>::quiet_NaN());
    ctx->saved_data["softcap"] = call.softcap;
    ctx->saved_data["dropout_p"] = call.dropout_p;
    ctx->set_materialize_grads(false);
    return {std::move(out), std::move(lse)};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(6);  // one per input of forward
    if (!grads[0].defined() && !grads[1].defined()) return result;
    variable_list kept = ctx->get_saved_variables();
    const at::Tensor out = kept[kAttentionTensors], lse = kept[kAttentionTensors + 1],
                     lse_rest = kept[kAttentionTensors + 2];
    kept.resize(kAttentionTensors);
    const double scale = ctx->saved_data["softmax_scale"].toDouble();
    const AttentionCall call{std::move(kept), ctx->saved_data["integers"].toIntVector(),
                             scale == scale ? std::optional<double>(scale) : std::nullopt,
                             ctx->saved_data["softcap"].toDouble(), ctx->saved_data["dropout_p"].toDouble()};
    const at::Tensor dout = grads[0].defined() ? grads[0] : at::zeros_like(out);
    const OptionalTensor dlse = grads[1].defined() ? OptionalTensor(grads[1]) : std::nullopt;
    bool needs[5] = {};  // only inputs that are present have an edge
    size_t edge = 0;
    for (size_t i = 0; i < 5; ++i)
      if (call.tensors[kAttentionInputs[i]].defined()) needs[i] = ctx->needs_input_grad(edge++);
    variable_list g =
        at::GradMode::is_enabled()
            ? AttentionBackward::apply(dout, dlse, call.tensors[0], call.optional(1), call.optional(2),
                                       call.optional(6), call.optional(7), call, out, lse, lse_rest, needs[3], needs[4])
            : attention_backward(dout, dlse, call, out, lse, lse_rest, needs[3], needs[4]);
    for (size_t i = 0; i < 5; ++i)
      if (needs[i]) result[i] = std::move(g[i]);
    return result;
  }
};

inline std::tuple<at::Tensor, at::Tensor> attention(const at::Tensor& q, const OptionalTensor& k,
                                                    const OptionalTensor& v, const OptionalTensor& cu_seqlens_q,
                                                    const OptionalTensor& cu_seqlens_k, int64_t max_seqlen_q,
                                                    int64_t max_seqlen_k, const AttentionOptions& o,
                                                    AttentionLayout layout) {
  const auto given = [](const OptionalTensor& t) { return t.value_or(at::Tensor()); };
  TORCH_CHECK_VALUE(!at::GradMode::is_enabled() || !given(o.alibi_slopes).defined() || !o.alibi_slopes->requires_grad(),
                    "attention: alibi_slopes: expected a tensor that requires no gradient, got one that does");
  TORCH_CHECK_VALUE(o.dropout_p >= 0 && o.dropout_p < 1, "attention: dropout_p: expected a number in [0, 1), got ",
                    o.dropout_p);
  OptionalTensor seed = o.seed;
  if (!seed && o.dropout_p > 0)
    seed = at::randint(std::numeric_limits<int64_t>::max(), {2}, q.options().dtype(at::kLong).requires_grad(false));
  const AttentionCall call{{q, given(k), given(v), given(cu_seqlens_q), given(cu_seqlens_k), given(o.alibi_slopes),
                            given(o.bias), given(o.sink), given(seed)},
                           {max_seqlen_q, max_seqlen_k, static_cast<int64_t>(layout), o.kv_heads, o.align_bottom_right,
                            o.window_left, o.causal && o.window_right >= -1 ? 0 : o.window_right, o.deterministic},
                           o.softmax_scale,
                           o.softcap,
                           o.dropout_p};
  for (const size_t i : kAttentionInputs)
    if (call.tensors[i].defined() && has_derivative(call.tensors[i])) {
      auto results = Attention::apply(q, call.optional(1), call.optional(2), call.optional(6), call.optional(7), call);
      return {results[0], results[1]};
    }
  auto [out, lse, lse_rest] = attention_forward(call);
  return {std::move(out), std::move(lse)};
}

}  // namespace detail

// Scaled dot-product attention. Returns {out, lse}, with gradients for q, k, v, options.bias and options.sink.
//
// q: (B, Sq, H, D), k: (B, Sk, Hk, D), v: (B, Sk, Hk, Dv), or in the order of options.layout. Without v, k holds both:
// (B, Sk, 2, Hk, D). Without k, q holds all three: (B, S, 3, H, D), or along its heads with options.kv_heads.
// Everything else, errors included, is as for warpsmith.attention in Python.
inline std::tuple<at::Tensor, at::Tensor> attention(const at::Tensor& q, const std::optional<at::Tensor>& k,
                                                    const std::optional<at::Tensor>& v,
                                                    const AttentionOptions& options = {}) {
  return detail::attention(q, k, v, std::nullopt, std::nullopt, 0, 0, options, options.layout);
}

// Attention within packed sequences, as warpsmith.attention_varlen in Python. q: (Tq, H, D), k: (Tk, Hk, D), v: (Tk,
// Hk, Dv), cu_seqlens_*: (N + 1,), int32. Ignores options.layout.
inline std::tuple<at::Tensor, at::Tensor> attention_varlen(const at::Tensor& q, const std::optional<at::Tensor>& k,
                                                           const std::optional<at::Tensor>& v,
                                                           const at::Tensor& cu_seqlens_q,
                                                           const at::Tensor& cu_seqlens_k, int64_t max_seqlen_q,
                                                           int64_t max_seqlen_k, const AttentionOptions& options = {}) {
  return detail::attention(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, options,
                           AttentionLayout::thd);
}

}  // namespace warpsmith
