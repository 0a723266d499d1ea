#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "bindings/support/attention.h"
#include "kernels/attention/attention_dropout.h"

// The inputs of attention, attention_varlen and their backward, and the checks that turn them into a problem.
namespace warpsmith::attention {

// The inputs that forward and backward share, in the order of the schema.
struct Inputs {
  Tensor q;
  OptionalTensor k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, bias, sink, seed;
  int64_t max_seqlen_q, max_seqlen_k, layout, kv_heads;
  bool bottom_right;
  int64_t window_left, window_right;
  std::optional<double> softmax_scale;
  double softcap, dropout_p;
  bool deterministic;
  std::optional<std::vector<int64_t>> dropout_place;  // in the order of AttentionDropoutPlace; none: the call itself
};

// The checked problem. It points into the tensors of `in`, which keep the memory alive; the check replaces tensors that
// the kernels cannot read by copies.
struct Checked {
  ThreeHeads heads;
  AttentionProblem problem{};
};

inline void check_heads(const char* op, Inputs& in, Dtype dtype) {
  if (in.v && !in.k) refuse(op, "k", "a tensor beside v", "None");
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

inline void check_sizes(const char* op, const Inputs& in, const ThreeHeads& h) {
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

// Checks offsets that the host can read. On a GPU the kernels clamp them.
inline void check_offsets(const char* op, const char* argument, const int32_t* cu, int64_t sequences, int64_t total,
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

inline void check_packed(const char* op, Inputs& in, const ThreeHeads& h, AttentionProblem& p) {
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
  const auto check_length = [&](const char* argument, int64_t length) {
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    if (length < 0) refuse(op, argument, "an integer >= 0", std::to_string(length));
    if (length > kMost)
      refuse(op, argument, "at most " + std::to_string(kMost) + ", which is the end of int32 offsets",
             std::to_string(length));
  };
  check_length("max_seqlen_q", in.max_seqlen_q);
  check_length("max_seqlen_k", in.max_seqlen_k);
  p.seqlen_q = in.max_seqlen_q;
  p.seqlen_k = in.max_seqlen_k;
  p.total_q = h.q.tokens;
  p.total_k = h.k.tokens;
  if (!in.q.is_cpu()) return;
  check_offsets(op, "cu_seqlens_q", p.cu_seqlens_q, p.batch, p.total_q, "max_seqlen_q", p.seqlen_q);
  check_offsets(op, "cu_seqlens_k", p.cu_seqlens_k, p.batch, p.total_k, "max_seqlen_k", p.seqlen_k);
}

inline void check_bias(const char* op, const Tensor& bias, const Inputs& in, AttentionProblem& p) {
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

// In the form of Python's str.
inline std::string number_text(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", x);
  return text;
}

inline void check_numbers(const char* op, const Inputs& in, AttentionProblem& p) {
  const auto window = [&](int64_t size) {
    if (size < -1) refuse(op, "window_size", "two integers >= -1", std::to_string(size));
    return size >= p.seqlen_q + p.seqlen_k ? -1 : size;  // no key is that far from a query
  };
  p.window_left = window(in.window_left);
  p.window_right = window(in.window_right);
  p.align_bottom_right = in.bottom_right;
  p.softmax_scale = in.softmax_scale ? *in.softmax_scale : 1 / std::sqrt(static_cast<double>(p.head_dim));
  if (!std::isfinite(p.softmax_scale)) refuse(op, "softmax_scale", "a finite number", std::to_string(p.softmax_scale));
  if (!(in.softcap >= 0) || !std::isfinite(in.softcap))
    refuse(op, "softcap", "a finite number >= 0", std::to_string(in.softcap));
  if (p.dtype != Dtype::float64) {
    // Kernels multiply both by log2(e), and divide the one by the other, in float.
    constexpr double kMost = 0x1p127;
    if (std::fabs(p.softmax_scale) > kMost)
      refuse(op, "softmax_scale", "at most 2^127 in size", number_text(p.softmax_scale));
    if (in.softcap > kMost) refuse(op, "softcap", "at most 2^127", number_text(in.softcap));
    if (in.softcap > 0 && std::fabs(p.softmax_scale) / in.softcap > kMost)
      refuse(op, "softcap", "at least 2^-127 of softmax_scale", number_text(in.softcap));
  }
  p.softcap = in.softcap;
}

inline void check_place(const char* op, const Inputs& in, AttentionProblem& p) {
  const auto refuse_place = [&](const std::string& expected, int64_t got) {
    refuse(op, "dropout_place", expected, std::to_string(got));
  };
  const std::vector<int64_t>& at = *in.dropout_place;
  if (at.size() != 5) refuse_place("5 integers", static_cast<int64_t>(at.size()));
  for (const int64_t i : at)
    if (i < 0 || i > INT32_MAX) refuse_place("integers from 0 to 2147483647", i);
  p.dropout_place = {at[0], at[1], at[2], at[3], at[4]};
  const AttentionDropoutPlace& place = p.dropout_place;
  if (p.cu_seqlens_q && (place.first_query || place.first_key))
    refuse_place("0 as first query and first key with cu_seqlens",
                 place.first_query ? place.first_query : place.first_key);
  if (place.first_query % kAttentionDropoutQueries) refuse_place("a multiple of 16 as first query", place.first_query);
  if (place.first_key % kAttentionDropoutKeys) refuse_place("a multiple of 32 as first key", place.first_key);
  const int64_t queries = place.first_query + p.seqlen_q, heads = place.first_head + p.heads_q;
  if (place.queries < queries) refuse_place("at least " + std::to_string(queries) + " queries", place.queries);
  if (place.first_key + p.seqlen_k > INT32_MAX)
    refuse_place("keys that end at 2147483647 at most", place.first_key + p.seqlen_k);
  if (place.heads < heads) refuse_place("at least " + std::to_string(heads) + " heads", place.heads);
}

inline void check_parameters(const char* op, Inputs& in, AttentionProblem& p) {
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
    p.sink_dtype = check_parameter(op, "sink", *in.sink, p.dtype, {p.heads_q}, in.q);
    in.sink = as_contiguous(*in.sink, op);
    p.sink = in.sink->const_data_ptr();
  }
  if (!(in.dropout_p >= 0 && in.dropout_p < 1))
    refuse(op, "dropout_p", "a number in [0, 1)", std::to_string(in.dropout_p));
  p.dropout = make_attention_dropout(nullptr, in.dropout_p);
  if (in.seed && in.dropout_p > 0) {
    if (in.seed->scalar_type() != ScalarType::Long) refuse(op, "seed", "int64", dtype_text(in.seed->scalar_type()));
    check_shape(op, "seed", *in.seed, {2});
    check_same_device(op, "seed", *in.seed, in.q);
    in.seed = as_contiguous(*in.seed, op);
    p.dropout.seed = static_cast<const int64_t*>(in.seed->const_data_ptr());
  }
  if (in.dropout_place) check_place(op, in, p);
}

inline Checked check(const char* op, Inputs& in) {
  Checked c;
  AttentionProblem& p = c.problem;
  p.dtype = float_dtype(op, "q", in.q);
  check_heads(op, in, p.dtype);
  const auto readable = runs_kernels(in.q) ? for_tensor_maps : with_adjacent_elements;
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

}  // namespace warpsmith::attention
