#pragma once
#include <cstdint>
#include <optional>
#include <utility>

#include "warpsmith/op.h"

// Rotary position embedding with gradients: rope and qk_norm_rope.
namespace warpsmith {

struct RopeOptions {
  bool interleaved = false;
  std::optional<at::Tensor> cu_seqlens = std::nullopt;
  int64_t position_offset = 0;
  std::optional<at::Tensor> position_offsets = std::nullopt;  // on the device; instead of position_offset
};

namespace detail {

// The same rotation by the negative angle, so derivatives of every order exist. Where a gradient of q, or of k, is not
// wanted: no heads to rotate.
inline variable_list rope_gradients(const Op& op, Backward& b) {
  for (size_t i = 0; i < 2; ++i) b.wanted[i] = b.wanted[i] && b.grads[i].defined();
  if (!b.wanted[0] && !b.wanted[1]) return variable_list(2);
  for (size_t i = 0; i < 2; ++i) b.arguments[i] = b.wanted[i] ? b.grads[i] : b.grads[1 - i].narrow(-2, 0, 0);
  b.arguments.back() = !b.arguments.back().toBool();
  return call(op, std::move(b.arguments));
}

// Inputs 0 and 2 have the gradient of output 0, inputs 1 and 3 that of output 1. Where none of such a pair is wanted:
// no heads to read.
inline variable_list qk_norm_rope_gradients(const Op& op, Backward& b) {
  for (size_t i = 0; i < 4; ++i) b.wanted[i] = b.wanted[i] && b.grads[i % 2].defined();
  for (size_t i = 0; i < 2; ++i)
    if (!b.wanted[i] && !b.wanted[i + 2]) b.arguments[i] = b.grads[i] = b.arguments[i].toTensor().narrow(-2, 0, 0);
  return b.wanted[0] || b.wanted[1] || b.wanted[2] || b.wanted[3] ? raw_gradients(op, b) : variable_list(4);
}

}  // namespace detail

// Rotary position embedding of q (B, S, Hq, D) or (T, Hq, D) and k (as q, any number of heads), in one launch. cos,
// sin: a table (positions, rotary_dim / 2), or (B or 1, S, rotary_dim), a row for each token. Gradients of every order
// for q and k; cos and sin have none. Everything else, errors included: as warpsmith.rope in Python.
inline std::pair<at::Tensor, at::Tensor> rope(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos,
                                              const at::Tensor& sin, const RopeOptions& options = {}) {
  static const detail::Op op({.name = "rope",
                              .gradients = detail::rope_gradients,
                              .inputs = {"q", "k"},
                              .saved = {"cos", "sin", "cu_seqlens", "offsets"},
                              .outputs = 2});
  detail::refuse_gradient("rope", "cos", cos);
  detail::refuse_gradient("rope", "sin", sin);
  return detail::pair(detail::call(op, {q, k, cos, sin, options.interleaved, options.cu_seqlens,
                                        options.position_offsets, options.position_offset, /*inverse=*/false}));
}

// RMS normalisation of each head of q and k over the last dimension, with weights (D,), and their rotary position
// embedding, in one pass. epsilon: as eps of warpsmith::rms_norm. Gradients for q, k and both weights. Shapes, angles
// and options as warpsmith::rope; errors as warpsmith.qk_norm_rope in Python.
inline std::pair<at::Tensor, at::Tensor> qk_norm_rope(const at::Tensor& q, const at::Tensor& k,
                                                      const at::Tensor& q_weight, const at::Tensor& k_weight,
                                                      const at::Tensor& cos, const at::Tensor& sin,
                                                      std::optional<double> epsilon = std::nullopt,
                                                      const RopeOptions& options = {}) {
  static const detail::Op op({.name = "qk_norm_rope", .gradients = detail::qk_norm_rope_gradients});
  detail::refuse_gradient("qk_norm_rope", "cos", cos);
  detail::refuse_gradient("qk_norm_rope", "sin", sin);
  return detail::pair(
      detail::call(op, {q, k, q_weight, k_weight, cos, sin, detail::epsilon_of(q, epsilon), options.interleaved,
                        options.cu_seqlens, options.position_offsets, options.position_offset}));
}

}  // namespace warpsmith
