#pragma once
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "common/alignment.h"
#include "kernels/attention/attention.h"
#include "torch/support/tensor.h"

// The binding of attention: tensors as views of heads, checks, the problem.
namespace warpsmith::attention {

enum Layout : int64_t { kBatchTokensHeads, kBatchHeadsTokens, kTokensHeads };

using OptionalTensor = std::optional<Tensor>;

// Where the dimensions of a tensor stand. Tensors that hold several of q, k and v have one more dimension before their
// heads.
struct Dims {
  int64_t rank, batch, tokens, heads;  // batch: -1 where there is none

  Dims(int64_t layout, bool stacked) {
    const int64_t more = stacked ? 1 : 0;
    rank = (layout == kTokensHeads ? 3 : 4) + more;
    batch = layout == kTokensHeads ? -1 : 0;
    tokens = layout == kTokensHeads ? 0 : (layout == kBatchTokensHeads ? 1 : 2 + more);
    heads = layout == kBatchTokensHeads ? 2 + more : 1 + more;
  }
};

// As messages name it; `count`: tensors in one, or 0.
inline std::string layout_text(int64_t layout, int64_t count) {
  const std::string several = count ? std::to_string(count) + ", " : "";
  if (layout == kTokensHeads) return "shape (tokens, " + several + "heads, head_dim)";
  if (layout == kBatchTokensHeads) return "shape (batch, tokens, " + several + "heads, head_dim)";
  return "shape (batch, " + several + "heads, tokens, head_dim)";
}

// A tensor of heads inside another one: `tensor` keeps that (or a copy whose head_dim is contiguous) alive.
struct Heads {
  Tensor tensor;
  int64_t first = 0;  // elements before this one's
  AttentionStrides strides{};
  int64_t batch = 0, tokens = 0, heads = 0, width = 0;

  const void* data(Dtype dtype) const {
    return static_cast<const char*>(tensor.const_data_ptr()) + first * size_bytes(dtype);
  }
  void* mutable_data(Dtype dtype) const {
    return static_cast<char*>(tensor.mutable_data_ptr()) + first * size_bytes(dtype);
  }
};

// Heads [begin, begin + heads) of t; with `stacked` those of its entry `begin`.
inline Heads part_of(const Tensor& t, const Dims& dims, bool stacked, int64_t begin, int64_t heads) {
  Heads h;
  h.tensor = t;
  h.batch = dims.batch < 0 ? 1 : t.size(0);
  h.tokens = t.size(dims.tokens);
  h.heads = heads;
  h.width = t.size(dims.rank - 1);
  h.strides = {dims.batch < 0 ? 0 : t.stride(0), t.stride(dims.tokens), t.stride(dims.heads)};
  h.first = begin * t.stride(stacked ? dims.heads - 1 : dims.heads);
  return h;
}

// The number of tensors that q, k and v are: three; two, of which the second holds k and v stacked; or one, in which q,
// k and v are stacked or, with kv_heads, lie along its heads.
struct Packing {
  int64_t tensors;
  bool stacked_q, stacked_k;

  Packing(const OptionalTensor& k, const OptionalTensor& v, int64_t kv_heads)
      : tensors(v ? 3 : (k ? 2 : 1)), stacked_q(!k && kv_heads == 0), stacked_k(k && !v) {}
};

inline void check_rank(const char* op, const char* argument, const Tensor& t, int64_t layout, int64_t count) {
  if (t.dim() != Dims(layout, count > 0).rank || (count && t.size(Dims(layout, true).heads - 1) != count))
    refuse(op, argument, layout_text(layout, count), shape_text(t));
}

struct ThreeHeads {
  Heads q, k, v;
};

// q, k and v as they lie in the given tensors (or in their gradients).
inline ThreeHeads split(const Tensor& q, const OptionalTensor& k, const OptionalTensor& v, int64_t layout,
                        int64_t kv_heads) {
  const Packing packing(k, v, kv_heads);
  const Dims plain(layout, false), stacked(layout, true);
  if (packing.tensors == 3)
    return {part_of(q, plain, false, 0, q.size(plain.heads)), part_of(*k, plain, false, 0, k->size(plain.heads)),
            part_of(*v, plain, false, 0, v->size(plain.heads))};
  if (packing.tensors == 2) {
    const int64_t heads = k->size(stacked.heads);
    return {part_of(q, plain, false, 0, q.size(plain.heads)), part_of(*k, stacked, true, 0, heads),
            part_of(*k, stacked, true, 1, heads)};
  }
  if (packing.stacked_q) {
    const int64_t heads = q.size(stacked.heads);
    return {part_of(q, stacked, true, 0, heads), part_of(q, stacked, true, 1, heads),
            part_of(q, stacked, true, 2, heads)};
  }
  const int64_t heads_q = q.size(plain.heads) - 2 * kv_heads;
  return {part_of(q, plain, false, 0, heads_q), part_of(q, plain, false, heads_q, kv_heads),
          part_of(q, plain, false, heads_q + kv_heads, kv_heads)};
}

// Itself, or a contiguous copy if the elements of a head are apart.
inline Tensor with_adjacent_elements(const char* op, const Tensor& t) {
  return t.size(t.dim() - 1) > 1 && t.stride(t.dim() - 1) != 1 ? as_contiguous(t, op) : t;
}

// Whether the tokens of a head lie nearer to each other than the heads of a token.
inline bool is_head_major(const Tensor& t, const Dims& dims) {
  return t.size(dims.tokens) > 1 && t.size(dims.heads) > 1 && t.stride(dims.heads) > t.stride(dims.tokens);
}

// A new tensor of t's shape, but for the size of its last dimension and, if `one`, without the dimension that stacks q,
// k and v. Contiguous in the order in which tokens and heads of t lie.
inline Tensor allocate_heads(const char* op, const char* argument, const Tensor& t, int64_t layout, bool stacked,
                             bool one, int64_t heads, int64_t width) {
  const Dims from(layout, stacked), to(layout, stacked && !one);
  int64_t sizes[5], strides[5];
  if (to.batch >= 0) sizes[to.batch] = t.size(from.batch);
  sizes[to.tokens] = t.size(from.tokens);
  sizes[to.heads] = heads;
  sizes[to.rank - 1] = width;
  int64_t next = 1;
  const auto place = [&](int64_t dim) {
    strides[dim] = next;
    next *= sizes[dim] > 0 ? sizes[dim] : 1;
  };
  place(to.rank - 1);
  const bool head_major = is_head_major(t, from);
  if (head_major) place(to.tokens);
  place(to.heads);
  if (stacked && !one) {
    sizes[to.heads - 1] = t.size(from.heads - 1);
    place(to.heads - 1);
  }
  if (!head_major) place(to.tokens);
  if (to.batch >= 0) place(to.batch);
  return allocate_strided(op, argument, sizes, strides, to.rank, dtype_code(t), t);
}

inline int32_t statistics_dtype(Dtype dtype) {
  return dtype == Dtype::float64 ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
}

// Itself, or a copy if tensor maps cannot read it: those take addresses and strides of 16 bytes, and no stride of 0.
inline Tensor for_tensor_maps(const char* op, const Tensor& t) {
  const int64_t bytes = size_bytes(float_dtype(op, "q", t));
  bool fits = on_16_bytes(t.const_data_ptr());
  for (int64_t i = 0; i + 1 < t.dim(); ++i)
    fits = fits && (t.size(i) <= 1 || (t.stride(i) > 0 && t.stride(i) * bytes % 16 == 0));
  if (fits && (t.size(t.dim() - 1) <= 1 || t.stride(t.dim() - 1) == 1)) return t;
  Tensor copy = allocate_like(op, "an aligned copy", t);
  torch::stable::copy_(copy, t);
  return copy;
}

// The strides of a tensor that is broadcast to (batch, heads, seqlen_q, seqlen_k).
inline AttentionBiasStrides broadcast_strides(const Tensor& t) {
  int64_t strides[4] = {};
  for (int64_t i = 0; i < t.dim(); ++i) strides[4 - t.dim() + i] = t.size(i) == 1 ? 0 : t.stride(i);
  return {strides[0], strides[1], strides[2], strides[3]};
}

}  // namespace warpsmith::attention
