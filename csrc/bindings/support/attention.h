#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "bindings/support/tensor.h"
#include "common/alignment.h"
#include "kernels/attention/attention.h"

// The binding of attention: views of tensors as heads, checks, and the problem.
namespace warpsmith::attention {

enum Layout : int64_t { kBatchTokensHeads, kBatchHeadsTokens, kTokensHeads };

// The positions of a tensor's dimensions. A tensor that stacks several of q, k and v has one more dimension before its
// heads.
struct Dims {
  int64_t rank, batch, tokens, heads;  // batch: -1 without a batch dimension

  Dims(int64_t layout, bool stacked) {
    const int64_t more = stacked ? 1 : 0;
    rank = (layout == kTokensHeads ? 3 : 4) + more;
    batch = layout == kTokensHeads ? -1 : 0;
    tokens = layout == kTokensHeads ? 0 : (layout == kBatchTokensHeads ? 1 : 2 + more);
    heads = layout == kBatchTokensHeads ? 2 + more : 1 + more;
  }
};

// The layout as messages name it. `count`: the number of stacked tensors, or 0.
inline std::string layout_text(int64_t layout, int64_t count) {
  const std::string several = count ? std::to_string(count) + ", " : "";
  if (layout == kTokensHeads) return "shape (tokens, " + several + "heads, head_dim)";
  if (layout == kBatchTokensHeads) return "shape (batch, tokens, " + several + "heads, head_dim)";
  return "shape (batch, " + several + "heads, tokens, head_dim)";
}

// A view of heads inside a tensor. `tensor` keeps that tensor alive (or a copy of it whose head_dim is contiguous).
struct Heads {
  Tensor tensor;
  int64_t first = 0;  // offset of the view, in elements
  AttentionStrides strides{};
  int64_t batch = 0, tokens = 0, heads = 0, width = 0;

  const void* data(Dtype dtype) const {
    return static_cast<const char*>(tensor.const_data_ptr()) + first * size_bytes(dtype);
  }
  void* mutable_data(Dtype dtype) const {
    return static_cast<char*>(tensor.mutable_data_ptr()) + first * size_bytes(dtype);
  }
};

// Heads [begin, begin + heads) of t. With `stacked`, the heads of entry `begin` of the stack.
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

// How q, k and v are packed: in three tensors; in two, where the second stacks k and v; or in one, which stacks q, k
// and v or, with kv_heads, holds them along its heads.
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

// Views of q, k and v (or of their gradients) inside the given tensors.
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

// Returns t, or a contiguous copy if the last dimension is not contiguous.
inline Tensor with_adjacent_elements(const char* op, const Tensor& t) {
  return t.size(t.dim() - 1) > 1 && t.stride(t.dim() - 1) != 1 ? as_contiguous(t, op) : t;
}

// Whether neighbouring tokens of a head are closer in memory than neighbouring heads of a token.
inline bool is_head_major(const Tensor& t, const Dims& dims) {
  return t.size(dims.tokens) > 1 && t.size(dims.heads) > 1 && t.stride(dims.heads) > t.stride(dims.tokens);
}

// A new tensor with the shape of t, except for the size of its last dimension and, with `one`, without the stacking
// dimension. Contiguous, with tokens and heads in the order that they have in the memory of t.
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

// Returns t, or a copy if tensor maps cannot read t: they need addresses and strides that are multiples of 16 bytes,
// and no stride of 0.
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

// The strides of a tensor that broadcasts to (batch, heads, seqlen_q, seqlen_k).
inline AttentionBiasStrides broadcast_strides(const Tensor& t) {
  int64_t strides[4] = {};
  for (int64_t i = 0; i < t.dim(); ++i) strides[4 - t.dim() + i] = t.size(i) == 1 ? 0 : t.stride(i);
  return {strides[0], strides[1], strides[2], strides[3]};
}

}  // namespace warpsmith::attention
