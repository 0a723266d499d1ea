#pragma once
#include <cstdint>

#include "common/dropout.h"
#include "common/dtype.h"
#include "common/host_device.h"
#include "common/parallel.h"
#include "common/status.h"
#include "kernels/attention/attention_config.h"

// Scaled dot-product attention. One params struct serves sequences of equal length and packed sequences (varlen).
//
// s is the logit of query i and key j within one sequence and one head. Head h of q reads head h * heads_k / heads_q of
// k and v. visible(i, j) follows from the window and the mask:
//   s   = dot(q[i], k[j]) * softmax_scale
//   s   = softcap * tanh(s / softcap)                                       if softcap > 0
//   s  += -slope[h] * |i + shift - j|                                       if alibi_slopes
//   s  += bias[b, h, i, j]                                                  if bias
//   lse = log(sum over visible j of exp(s) + exp(sink[h]))                  without a sink: no second term
//   out = sum over visible j of exp(s - lse) * kept(i, j) * dropout.scale * v[j]
// A row without a visible key has out = 0, lse = -inf (lse = sink if there is a sink) and no gradient. A masked logit
// counts as -inf, whatever q, k and bias contain. Logits, sums and statistics are float (double for float64).
//
// Every finite logit follows the softmax, whatever its size. A logit of 1e8 has an ulp of 8, so lse alone cannot hold
// the logarithm of a sum beside it, and exp(s - lse) would not sum to 1. So the forward also gives what rounding took
// from lse: lse_rest = (max - lse) + log(sum over visible j of exp(s - max)), and p = exp((s - lse) - lse_rest). CUDA
// kernels do without it where |lse| < kFarLse: there it changes p by less than 2^-13 (float32: 2^-16).
namespace warpsmith {

template <class T> constexpr float kFarLse = sizeof(T) == 2 ? 1024.0f : 128.0f;

// Strides of a tensor of heads, in elements: element (b, s, h, d) is at b * batch + s * seq + h * head + d. In a packed
// tensor, token t of the whole tensor is at t * seq + h * head + d, and `batch` is not used.
struct AttentionStrides {
  int64_t batch, seq, head;
};

// Strides, in elements, of a tensor that broadcasts to [batch, heads_q, seqlen_q, seqlen_k]: 0 along a dimension of
// size 1. In packed sequences, i and j are positions within the sequence.
struct AttentionBiasStrides {
  int64_t batch, head, q, k;
};

// Where a call lies in a larger one, of which it computes some queries, keys or heads. It drops the weights that the
// larger call drops. All 0: the call stands for itself.
struct AttentionDropoutPlace {
  int64_t first_query = 0;  // of each sequence, a multiple of 16; packed: 0
  int64_t queries = 0;      // of each sequence of the larger call; 0: seqlen_q. Not used if sequences are packed
  int64_t first_key = 0;    // of each sequence, a multiple of 32; packed: 0
  int64_t first_head = 0;   // of q
  int64_t heads = 0;        // of q in the larger call; 0: heads_q
};

struct AttentionProblem {
  int64_t batch;               // sequences
  int64_t heads_q, heads_k;    // heads_q is a multiple of heads_k
  int64_t seqlen_q, seqlen_k;  // packed: max_seqlen_q, max_seqlen_k; no sequence is longer
  int64_t head_dim;            // of q and k: 8 to 256 in steps of 8
  int64_t head_dim_v;          // of v and out: 8 to 256 in steps of 8

  const int32_t* cu_seqlens_q;  // [batch + 1], first token of each sequence in q, then the end; null: not packed
  const int32_t* cu_seqlens_k;  // [batch + 1], the same for k and v; null if cu_seqlens_q is null
  int64_t total_q, total_k;     // packed: tokens of q and of k; else batch * seqlen_q and batch * seqlen_k

  double softmax_scale;
  double softcap;  // 0: none

  // Key j is in the window of query i if -window_left <= j - (i + shift) <= window_right; -1: no limit on that side.
  // shift is seqlen_k - seqlen_q of the sequence (bottom right) or 0 (top left). Causal attention has window_right = 0.
  int64_t window_left, window_right;
  bool align_bottom_right;

  const void* mask;  // bool (one byte, 0: not visible), at mask_strides; null: no mask
  AttentionBiasStrides mask_strides;
  const void* bias;  // bias_dtype, at bias_strides; null: no bias
  AttentionBiasStrides bias_strides;
  Dtype bias_dtype;            // dtype, or float32 if dtype has 16 bits
  const float* alibi_slopes;   // [heads_q], or [batch, heads_q] with alibi_batch_stride = heads_q; null: none
  int64_t alibi_batch_stride;  // 0 or heads_q
  const void* sink;            // [heads_q], logits, sink_dtype; null: none
  Dtype sink_dtype;            // dtype, or float32 if dtype has 16 bits

  Dropout dropout;  // seed null: no dropout. The mask: kernels/attention/attention_dropout.h
  AttentionDropoutPlace dropout_place;
  Dtype dtype;  // of q, k, v, out and their gradients
};

struct AttentionFwdParams {
  AttentionProblem problem;
  const void* q;   // [batch, seqlen_q, heads_q, head_dim], or packed [total_q, heads_q, head_dim]
  const void* k;   // [batch, seqlen_k, heads_k, head_dim], or packed [total_k, heads_k, head_dim]
  const void* v;   // [batch, seqlen_k, heads_k, head_dim_v], or packed [total_k, heads_k, head_dim_v]
  void* out;       // [batch, seqlen_q, heads_q, head_dim_v], or packed [total_q, heads_q, head_dim_v]
  void* lse;       // [batch, heads_q, seqlen_q], or packed [heads_q, total_q]; contiguous, float; null: not wanted
  void* lse_rest;  // as lse; null: not wanted
  AttentionStrides q_strides, k_strides, v_strides, out_strides;
  // The plan's workspace_bytes, aligned to 256, contents undefined; null if that is 0.
  void* workspace;
};

// p = exp((s - lse) - lse_rest), m = kept * dropout.scale, delta = dot(dout[i], out[i]) - dlse[i]:
//   dv[j] = sum over i of p * m * dout[i]          ds = p * (m * dot(dout[i], v[j]) - delta)
//   dsink = -sum over b, i of exp((sink - lse) - lse_rest) * delta
//   dbias = ds, summed over the dimensions of stride 0
//   ds   *= 1 - (capped s / softcap)^2                                       if softcap > 0
//   dq[i] = softmax_scale * sum over j of ds * k[j]
//   dk[j] = softmax_scale * sum over i of ds * q[i]
// dk and dv are summed over the query heads that share a key head.
struct AttentionBwdParams {
  AttentionProblem problem;
  const void* dout;  // as out
  const void* dlse;  // as lse; null: zero
  const void* q;
  const void* k;
  const void* v;
  const void* out;
  const void* lse;       // never null
  const void* lse_rest;  // as lse; null: zero
  void* dq;              // as q
  void* dk;              // as k
  void* dv;              // as v; dq, dk and dv are never null
  void* dbias;           // as bias, bias_dtype, at dbias_strides; null: not wanted
  void* dsink;           // [heads_q], sink_dtype; null: not wanted
  AttentionStrides dout_strides, q_strides, k_strides, v_strides, out_strides, dq_strides, dk_strides, dv_strides;
  AttentionBiasStrides dbias_strides;  // 0 where bias_strides is 0 or the size is 1
  bool deterministic;                  // the same bits on every run; false allows a faster path with atomics
  // The plan's workspace_bytes, or attention_backward_workspace_cpu() bytes, aligned to 256, contents undefined; null
  // if that is 0. Holds delta, dq in float, semaphores and whatever else a kernel needs. The kernels initialise what
  // they use.
  void* workspace;
};

// Strides: head_dim is contiguous. Any other stride may have any value, 0 included (expanded dout, k and v), and
// offsets exceed 2^31. Pointers are aligned to their element only. A kernel that needs more (16-byte vectors, TMA)
// refuses through attention_*_plan_cuda; the binding passes aligned copies to CUDA.
//
// Packed sequences: the kernels clamp the entries of cu_seqlens (attention_sequence), so that no entry leads to an
// access out of bounds. Tokens of q at or after cu_seqlens_q[batch] get out = 0, lse = -inf and dq = 0. Tokens of k at
// or after cu_seqlens_k[batch] get dk = dv = 0.

// The tokens [start, start + length) of a packed sequence.
struct AttentionSequence {
  int64_t start, length;
};

WARPSMITH_HOST_DEVICE AttentionSequence attention_sequence(const int32_t* cu_seqlens, int64_t sequence, int64_t total,
                                                           int64_t max_seqlen) {
  int64_t start = cu_seqlens[sequence], end = cu_seqlens[sequence + 1];
  start = start < 0 ? 0 : (start > total ? total : start);
  end = end < start ? start : (end > total ? total : end);
  return {start, end - start > max_seqlen ? max_seqlen : end - start};
}

// The keys [begin, end) that some query of [first, last] (inclusive) has in its window. Exact if first == last,
// otherwise a superset of each query's keys. `shift` as in AttentionProblem. begin >= end: no key.
struct AttentionKeys {
  int64_t begin, end;
};

WARPSMITH_HOST_DEVICE AttentionKeys attention_keys(const AttentionProblem& p, int64_t first, int64_t last,
                                                   int64_t shift, int64_t seqlen_k) {
  const int64_t begin = p.window_left < 0 ? 0 : first + shift - p.window_left;
  const int64_t end = p.window_right < 0 ? seqlen_k : last + shift + p.window_right + 1;
  return {begin < 0 ? 0 : begin, end > seqlen_k ? seqlen_k : end};
}

// The kernels of one call, chosen once. No workspace grows with seqlen_q * seqlen_k.
struct AttentionForwardPlan {
  AttentionForwardChoice hopper;  // not supported: the portable kernels run
  int64_t workspace_bytes = 0;
};
struct AttentionBackwardPlan {
  AttentionBackwardChoice hopper;  // not supported: the portable kernels run
  bool hopper_dbias = false;       // dbias has a Hopper kernel; else a portable kernel makes it
  int64_t dbias_workspace = 0;     // where the workspace of that portable kernel begins
  int64_t workspace_bytes = 0;
};

// Plans a call on the current device: ok, or `unsupported` with the reason in one sentence. Does not read
// params.workspace.
Status attention_forward_plan_cuda(const AttentionFwdParams& params, AttentionForwardPlan& plan);
Status attention_backward_plan_cuda(const AttentionBwdParams& params, AttentionBackwardPlan& plan);
int64_t attention_backward_workspace_cpu(const AttentionBwdParams& params);

// `plan`: what the planner made of these params.
Status attention_forward_cuda(const AttentionFwdParams& params, const AttentionForwardPlan& plan, void* stream);
Status attention_backward_cuda(const AttentionBwdParams& params, const AttentionBackwardPlan& plan, void* stream);

// For tests and benchmarks on a Hopper GPU: with `on`, the whole process runs the portable kernels, as other GPUs do.
// Must not change between a forward and its backward.
void attention_portable_alone(bool on);
Status attention_forward_cpu(const AttentionFwdParams& params, const Parallel& parallel);
Status attention_backward_cpu(const AttentionBwdParams& params, const Parallel& parallel);

}  // namespace warpsmith
