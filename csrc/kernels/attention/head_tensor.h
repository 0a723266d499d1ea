#pragma once
#include "kernels/attention/attention.h"

namespace warpsmith::attention {

// Address, strides and sizes of a tensor of heads.
struct HeadTensor {
  const void* base;
  AttentionStrides strides;
  int64_t batch, length, heads, head_dim;  // packed: batch 1, length: all tokens
  bool packed;
};

inline HeadTensor head_tensor(const void* base, const AttentionStrides& strides, const AttentionProblem& p, bool query,
                              int64_t head_dim) {
  const bool packed = p.cu_seqlens_q != nullptr;
  const int64_t length = packed ? (query ? p.total_q : p.total_k) : (query ? p.seqlen_q : p.seqlen_k);
  return {base, strides, packed ? 1 : p.batch, length, query ? p.heads_q : p.heads_k, head_dim, packed};
}

// P: the params of a forward or a backward.
template <class P> HeadTensor q_tensor(const P& p) {
  return head_tensor(p.q, p.q_strides, p.problem, true, p.problem.head_dim);
}
template <class P> HeadTensor k_tensor(const P& p) {
  return head_tensor(p.k, p.k_strides, p.problem, false, p.problem.head_dim);
}
template <class P> HeadTensor v_tensor(const P& p) {
  return head_tensor(p.v, p.v_strides, p.problem, false, p.problem.head_dim_v);
}
template <class P> HeadTensor out_tensor(const P& p) {
  return head_tensor(p.out, p.out_strides, p.problem, true, p.problem.head_dim_v);
}
inline HeadTensor dout_tensor(const AttentionBwdParams& p) {
  return head_tensor(p.dout, p.dout_strides, p.problem, true, p.problem.head_dim_v);
}

// Whether fits(tensor) holds for all tensors of heads.
template <class Fits> bool all_fit(const AttentionFwdParams& p, Fits&& fits) {
  return fits(q_tensor(p)) && fits(k_tensor(p)) && fits(v_tensor(p)) && fits(out_tensor(p));
}
template <class Fits> bool all_fit(const AttentionBwdParams& p, Fits&& fits) {
  const AttentionProblem& a = p.problem;
  return fits(q_tensor(p)) && fits(k_tensor(p)) && fits(v_tensor(p)) && fits(out_tensor(p)) && fits(dout_tensor(p)) &&
         fits(head_tensor(p.dq, p.dq_strides, a, true, a.head_dim)) &&
         fits(head_tensor(p.dk, p.dk_strides, a, false, a.head_dim)) &&
         fits(head_tensor(p.dv, p.dv_strides, a, false, a.head_dim_v));
}

}  // namespace warpsmith::attention
