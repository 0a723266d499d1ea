// The Hopper kernels of attention as a library for attention.py, which builds it: params from plain arrays.
#include <cstdio>

#include "kernels/attention/attention_sm90.h"

namespace {

using namespace warpsmith;

// The order of attention.py's arrays.
AttentionProblem problem_of(const int64_t* n, const double* r, void* const* x) {
  AttentionProblem p{};
  p.batch = n[0], p.heads_q = n[1], p.heads_k = n[2], p.seqlen_q = n[3], p.seqlen_k = n[4];
  p.head_dim = n[5], p.head_dim_v = n[6], p.total_q = n[7], p.total_k = n[8];
  p.window_left = n[9], p.window_right = n[10], p.align_bottom_right = n[11] != 0;
  p.dtype = n[12] != 0 ? Dtype::bfloat16 : Dtype::float16;
  p.softmax_scale = r[0], p.softcap = r[1];
  p.cu_seqlens_q = static_cast<const int32_t*>(x[11]), p.cu_seqlens_k = static_cast<const int32_t*>(x[12]);
  p.sink = x[13], p.sink_dtype = Dtype::float32;
  return p;
}
AttentionStrides strides_of(const int64_t* n, int tensor) {
  const int64_t* s = n + 13 + 3 * tensor;
  return {s[0], s[1], s[2]};
}
AttentionFwdParams forward_of(const int64_t* n, const double* r, void* const* x) {
  return {problem_of(n, r, x), x[0], x[1], x[2], x[3], x[4], strides_of(n, 0), strides_of(n, 1), strides_of(n, 2),
          strides_of(n, 3),    x[10]};
}
AttentionBwdParams backward_of(const int64_t* n, const double* r, void* const* x) {
  AttentionBwdParams p{};
  p.problem = problem_of(n, r, x);
  p.q = x[0], p.k = x[1], p.v = x[2], p.out = x[3], p.lse = x[4], p.dout = x[5], p.dlse = x[6];
  p.dq = x[7], p.dk = x[8], p.dv = x[9], p.workspace = x[10], p.dsink = x[14];
  p.q_strides = strides_of(n, 0), p.k_strides = strides_of(n, 1), p.v_strides = strides_of(n, 2);
  p.out_strides = strides_of(n, 3), p.dout_strides = strides_of(n, 4), p.dq_strides = strides_of(n, 5);
  p.dk_strides = strides_of(n, 6), p.dv_strides = strides_of(n, 7);
  p.deterministic = true;
  return p;
}
int said(const Status& status) {
  if (!status.ok()) std::printf("%s\n", status.what().c_str());
  return !status.ok();
}

}  // namespace

// Each returns 0, or 1 after it has printed why; `bytes`: of workspace.
extern "C" int attention_workspace(int backward, const int64_t* n, const double* r, void* const* x, int64_t* bytes) {
  return backward ? said(attention_backward_workspace_sm90(backward_of(n, r, x), bytes))
                  : said(attention_forward_workspace_sm90(forward_of(n, r, x), bytes));
}
extern "C" int attention_forward(const int64_t* n, const double* r, void* const* x, void* stream) {
  return said(attention_forward_sm90(forward_of(n, r, x), stream));
}
extern "C" int attention_backward(const int64_t* n, const double* r, void* const* x, void* stream) {
  return said(attention_backward_sm90(backward_of(n, r, x), stream));
}
