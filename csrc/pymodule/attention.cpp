#include <algorithm>
#include <string>

#include "kernels/attention/attention_config.h"
#include "kernels/attention/attention_ops.h"
#include "kernels/attention/portable/portable_config.h"
#include "pymodule/problem.h"

namespace warpsmith::host {
namespace {

bool extended(const AttentionKernelProblem& p) { return p.softcap || p.mask || p.bias || p.alibi || p.dropout; }

// Describes the Hopper kernel if it supports the problem, otherwise the portable kernel with `tile`, with the reason.
template <class Choice, class Tile>
pybind11::dict describe(const Choice& hopper, const AttentionKernelProblem& p, const Tile& tile) {
  pybind11::dict d;
  if (hopper.supported) {
    d["kernel"] = "sm_90a";
    d["why"] = hopper.why;
    d["head_dim"] = hopper.tile.head_dim;
    d["threads"] = hopper.tile.threads();
    return d;
  }
  if (const char* against = attention::reason_against_portable(p)) {
    d["kernel"] = pybind11::none();
    d["why"] = std::string("no CUDA kernel for ") + against;
    return d;
  }
  d["kernel"] = "sm_80";
  d["why"] = std::string("the portable kernel takes every option; no Hopper kernel for ") + hopper.why;
  d["head_dim"] = tile.head_dim;
  d["threads"] = tile.threads();
  return d;
}

pybind11::dict plan_attention(const char* op, const pybind11::kwargs& given) {
  Problem problem(op, given);
  AttentionKernelProblem p;
  p.seqlen_q = problem.integer("seqlen_q", 0);
  p.seqlen_k = problem.integer("seqlen_k", 0, p.seqlen_q);
  p.head_dim = static_cast<int>(problem.multiple("head_dim", 8, 256));
  p.head_dim_v = static_cast<int>(problem.multiple("head_dim_v", 8, 256, p.head_dim));
  p.element_bytes = problem.dtype_bytes("dtype", "bfloat16");
  p.causal = problem.flag("causal", false);
  p.softcap = problem.flag("softcap", false);
  p.mask = problem.flag("mask", false);
  p.bias = problem.flag("bias", false);
  p.alibi = problem.flag("alibi", false);
  p.dropout = problem.flag("dropout", false);
  p.sm90a_code = problem.flag("sm90a_code", true);
  problem.refuse_unknown();

  pybind11::dict d;
  const int head_dim = std::max(p.head_dim, p.head_dim_v);
  const int tile = attention::portable_tile(std::min(p.element_bytes, 4), extended(p), head_dim);
  d["forward"] = describe(choose_attention_forward_sm90(p), p, attention::kPortableForward[tile]);
  const int ordered_dq = attention::portable_ordered_dq_tile(head_dim, attention::kMostSharedBytes);
  if (p.element_bytes == 2 && !extended(p) && ordered_dq < attention::kPortableOrderedDqTiles)
    d["backward"] = describe(choose_attention_backward_sm90(p), p, attention::kPortableOrderedDq[ordered_dq]);
  else
    d["backward"] = describe(choose_attention_backward_sm90(p), p, attention::kPortableQueries[tile]);
  return d;
}

#define WARPSMITH_PLANNER(op) {#op, [](const pybind11::kwargs& given) { return plan_attention(#op, given); }},
const RegisterPlanner registered[] = {WARPSMITH_ATTENTION_OPS(WARPSMITH_PLANNER)};

WARPSMITH_REGISTER_ROWS(attention, ATTENTION);

}  // namespace
}  // namespace warpsmith::host
