#pragma once
#include <algorithm>
#include <cstdint>

#include "cpu/attention_tiles.h"
#include "kernels/attention/attention.h"

// How the CPU's backward of attention is cut into tasks, and what lies in its workspace. For attention_backward.cpp
// alone.
namespace warpsmith::cpu {

constexpr int64_t kBlock = 256;  // keys whose dk and dv a task holds at a time
constexpr int64_t kTasks = 32;   // stripes are added until there are so many tasks

inline int64_t lse_rows(const AttentionProblem& p) {
  return p.heads_q * (p.cu_seqlens_q ? p.total_q : p.batch * p.seqlen_q);
}

// dbias as the tasks see it: [batch or 1, heads_q or 1, seqlen_q or 1, seqlen_k or 1].
struct BiasGradient {
  bool wanted, one_batch, one_head, one_query, one_key;  // one_*: broadcast, a sum over that dimension
  int64_t sizes[4];

  explicit BiasGradient(const AttentionBwdParams& params) : wanted(params.dbias != nullptr) {
    const AttentionProblem& p = params.problem;
    const AttentionBiasStrides& s = params.dbias_strides;
    one_batch = s.batch == 0 && p.batch > 1;
    one_head = s.head == 0 && p.heads_q > 1;
    one_query = s.q == 0 && p.seqlen_q > 1;
    one_key = s.k == 0 && p.seqlen_k > 1;
    const int64_t full[4] = {p.batch, p.heads_q, p.seqlen_q, p.seqlen_k}, strides[4] = {s.batch, s.head, s.q, s.k};
    for (int i = 0; i < 4; ++i) sizes[i] = strides[i] == 0 ? 1 : full[i];
  }
  bool sums() const { return one_batch || one_head || one_query || one_key; }
  int64_t elements() const { return sizes[0] * sizes[1] * sizes[2] * sizes[3]; }
  // Strides of a contiguous tensor of these sizes, 0 along dimensions of one.
  AttentionBiasStrides contiguous() const {
    return {sizes[0] > 1 ? sizes[1] * sizes[2] * sizes[3] : 0, sizes[1] > 1 ? sizes[2] * sizes[3] : 0,
            sizes[2] > 1 ? sizes[3] : 0, sizes[3] > 1 ? 1 : 0};
  }
  bool needs_workspace(Dtype dtype) const { return wanted && sums() && size_bytes(dtype) == 2; }
};

// The tasks of a problem: (batch or all) x (head of k or all) x stripe. A task that is the only one to add to an
// element of dbias needs all batches or heads over which dbias is a sum.
struct Tasks {
  int64_t batches, heads, stripes;

  explicit Tasks(const AttentionBwdParams& params) {
    const AttentionProblem& p = params.problem;
    const BiasGradient dbias(params);
    batches = dbias.wanted && dbias.one_batch ? 1 : p.batch;
    heads = dbias.wanted && dbias.one_head ? 1 : p.heads_k;
    const int64_t blocks = std::max<int64_t>(1, (p.seqlen_k + kBlock - 1) / kBlock), groups = batches * heads;
    stripes =
        dbias.wanted && dbias.one_key ? 1 : std::min(blocks, (kTasks + groups - 1) / std::max<int64_t>(1, groups));
  }
};

// delta [rows], then dq [stripes, rows, head_dim rounded up] and, where the bias is broadcast and of 16 bits, dbias,
// all of the arithmetic type; rows are those of lse.
template <class F> struct Workspace {
  F* delta;
  F* dq;
  F* dbias;
  int64_t rows, dq_stride;
  Tasks tasks;

  explicit Workspace(const AttentionBwdParams& params)
      : rows(lse_rows(params.problem)), dq_stride(round_up(params.problem.head_dim, kProductColumns)), tasks(params) {
    delta = static_cast<F*>(params.workspace);
    dq = delta + round_up(rows, kProductColumns);
    dbias = dq + tasks.stripes * rows * dq_stride;
  }
  F* dq_of(int64_t stripe, int64_t row) const { return dq + (stripe * rows + row) * dq_stride; }
  int64_t elements(const AttentionBwdParams& params) const {
    const BiasGradient bias(params);
    return round_up(rows, kProductColumns) + tasks.stripes * rows * dq_stride +
           (bias.needs_workspace(params.problem.bias_dtype) ? bias.elements() : 0);
  }
};

}  // namespace warpsmith::cpu
