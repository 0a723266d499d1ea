#pragma once
#include "kernels/attention/attention.h"

namespace warpsmith::attention {

// A tensor of heads as its kernels address it.
struct HeadTensor {
  const void* base;
  AttentionStrides strides;
  int64_t batch, length, heads, head_dim;  // packed: batch 1, length: all tokens
};

inline HeadTensor head_tensor(const void* base, const AttentionStrides& strides, const AttentionProblem& p, bool query,
                              int64_t head_dim) {
  const bool packed = p.cu_seqlens_q != nullptr;
  const int64_t length = packed ? (query ? p.total_q : p.total_k) : (query ? p.seqlen_q : p.seqlen_k);
  return {base, strides, packed ? 1 : p.batch, length, query ? p.heads_q : p.heads_k, head_dim};
}

}  // namespace warpsmith::attention
