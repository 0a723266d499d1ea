#include <string>

#include "host/problem.h"
#include "kernels/rope/qk_norm_rope_config.h"

namespace py = pybind11;

namespace warpsmith::host {
namespace {

py::dict describe(const QkNormRopeConfig& c) {
  py::dict d;
  d["kernel"] = name(c.kernel);
  d["vector_elems"] = c.vector_elems;
  d["threads_a_head"] = c.lanes;
  d["heads_a_thread"] = c.heads_a_thread;
  d["threads_a_token"] = c.threads_a_token;
  d["tokens_a_block"] = c.tokens_a_block;
  d["threads"] = c.threads;
  d["blocks"] = c.blocks * c.parts;
  d["stages"] = c.stages;
  d["shared_bytes"] = c.shared_bytes;
  d["why"] = c.why;
  return d;
}

py::dict plan(const py::kwargs& given) {
  Problem problem("qk_norm_rope", given);
  QkNormRopeProblem p;
  p.tokens = problem.integer("tokens", 1);
  p.q_heads = problem.integer("q_heads", 0);
  p.k_heads = problem.integer("k_heads", 0, 0);
  p.head_dim = problem.integer("head_dim", 1);
  p.rotary_dim = problem.integer("rotary_dim", 0, p.head_dim / 2 * 2);
  p.element_bytes = problem.dtype_bytes("dtype", "bfloat16");
  p.aligned = problem.flag("aligned", true);
  p.multiprocessors = static_cast<int>(problem.integer("multiprocessors", 1, 132));
  p.max_shared_bytes = static_cast<int>(problem.integer("max_shared_bytes", 0, 227 * 1024));
  problem.refuse_unknown();

  const QkNormRopeConfig backward = choose_qk_norm_rope_backward(p);
  py::dict d;
  d["forward"] = describe(choose_qk_norm_rope_forward(p));
  d["backward"] = describe(backward);
  d["partial_rows"] = qk_norm_rope_partial_rows(backward);
  return d;
}

const RegisterPlanner registered("qk_norm_rope", &plan);

}  // namespace
}  // namespace warpsmith::host
