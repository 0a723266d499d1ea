#pragma once
#include <cstdint>
#include <optional>
#include <tuple>

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

inline std::tuple<at::Tensor, at::Tensor> attention(const at::Tensor& q, const OptionalTensor& k,
                                                    const OptionalTensor& v, const OptionalTensor& cu_seqlens_q,
                                                    const OptionalTensor& cu_seqlens_k, int64_t max_seqlen_q,
                                                    int64_t max_seqlen_k, const AttentionOptions& o,
                                                    AttentionLayout layout) {
  static const Op op({.name = "attention", .python_has_second_derivatives = false});
  refuse_gradient("attention", "alibi_slopes", o.alibi_slopes);
  TORCH_CHECK_VALUE(o.dropout_p >= 0 && o.dropout_p < 1, "attention: dropout_p: expected a number in [0, 1), got ",
                    o.dropout_p);
  const OptionalTensor seed = dropout_seed(q, o.dropout_p, /*training=*/true, o.seed);
  const int64_t window_right = o.causal && o.window_right >= -1 ? 0 : o.window_right;
  return pair(call(op, {q,
                        k,
                        v,
                        cu_seqlens_q,
                        cu_seqlens_k,
                        o.alibi_slopes,
                        o.bias,
                        o.sink,
                        seed,
                        max_seqlen_q,
                        max_seqlen_k,
                        static_cast<int64_t>(layout),
                        o.kv_heads,
                        o.align_bottom_right,
                        o.window_left,
                        window_right,
                        o.softmax_scale,
                        o.softcap,
                        o.dropout_p,
                        o.deterministic}));
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
