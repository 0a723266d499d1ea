#pragma once
#include <algorithm>
#include <cstdint>

#include "cpu/attention_tiles.h"
#include "kernels/attention/attention.h"

// How the CPU backward of attention is divided into tasks, and the layout of its workspace. Only for
// attention_backward.cpp.
namespace warpsmith::cpu {

constexpr int64_t kTasks = 32;  // the number of stripes is chosen to give about so many tasks

inline int64_t lse_rows(const AttentionProblem& p) {
  return p.heads_q * (p.cu_seqlens_q ? p.total_q : p.batch * p.seqlen_q);
}
inline int64_t key_rows(const AttentionProblem& p) {
  return p.heads_k * (p.cu_seqlens_q ? p.total_k : p.batch * p.seqlen_k);
}

// The shape of dbias: [batch or 1, heads_q or 1, seqlen_q or 1, seqlen_k or 1].
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
  // Strides of a contiguous tensor of these sizes; 0 along dimensions of size 1.
  AttentionBiasStrides contiguous() const {
    return {sizes[0] > 1 ? sizes[1] * sizes[2] * sizes[3] : 0, sizes[1] > 1 ? sizes[2] * sizes[3] : 0,
            sizes[2] > 1 ? sizes[3] : 0, sizes[3] > 1 ? 1 : 0};
  }
  bool needs_workspace(Dtype dtype) const { return wanted && sums() && size_bytes(dtype) == 2; }
};

// The tasks of a problem: (one batch entry or all) x (one key head or all) x one stripe of queries. An element of dbias
// must be summed by one task. So where dbias is a sum over batch entries, heads or queries, the task takes all of
// these.
struct Tasks {
  int64_t batches, heads, stripes;

  explicit Tasks(const AttentionBwdParams& params) {
    const AttentionProblem& p = params.problem;
    const BiasGradient dbias(params);
    batches = dbias.wanted && dbias.one_batch ? 1 : p.batch;
    heads = dbias.wanted && dbias.one_head ? 1 : p.heads_k;
    const int64_t tiles = std::max<int64_t>(1, (p.seqlen_q + kTile - 1) / kTile), groups = batches * heads;
    stripes =
        dbias.wanted && dbias.one_query ? 1 : std::min(tiles, (kTasks + groups - 1) / std::max<int64_t>(1, groups));
  }
};

// Layout: delta [lse_rows]; dk and dv of every stripe [stripes, key_rows, width], where a row is head_dim and
// head_dim_v, each rounded up; dbias, if the bias has 16 bits and is broadcast. All in the arithmetic type.
template <class F> struct Workspace {
  F* delta;
  F* keys;
  F* dbias;
  int64_t rows, dk_width, width;
  Tasks tasks;

  explicit Workspace(const AttentionBwdParams& params)
      : rows(key_rows(params.problem)),
        dk_width(round_up(params.problem.head_dim, kProductColumns)),
        width(dk_width + round_up(params.problem.head_dim_v, kProductColumns)),
        tasks(params) {
    delta = static_cast<F*>(params.workspace);
    keys = delta + round_up(lse_rows(params.problem), kProductColumns);
    dbias = keys + tasks.stripes * rows * width;
  }
  // dk of a row; dv follows dk_width later.
  F* dk_of(int64_t stripe, int64_t row) const { return keys + (stripe * rows + row) * width; }
  int64_t elements(const AttentionBwdParams& params) const {
    const BiasGradient bias(params);
    return round_up(lse_rows(params.problem), kProductColumns) + tasks.stripes * rows * width +
           (bias.needs_workspace(params.problem.bias_dtype) ? bias.elements() : 0);
  }
};

}  // namespace warpsmith::cpu
