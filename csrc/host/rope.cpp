#include "kernels/rope/rope_config.h"

#include "host/problem.h"

namespace py = pybind11;

namespace warpsmith::host {
namespace {

py::dict plan(const py::kwargs& given) {
  Problem problem("rope", given);
  RopeProblem p;
  p.tokens = problem.integer("tokens", 1);
  p.q_heads = problem.integer("q_heads", 0);
  p.k_heads = problem.integer("k_heads", 0, 0);
  p.head_dim = problem.integer("head_dim", 1);
  p.rotary_dim = problem.integer("rotary_dim", 0, p.head_dim / 2 * 2);
  p.element_bytes = problem.dtype_bytes("dtype", "bfloat16");
  p.aligned = problem.flag("aligned", true);
  p.inplace = problem.flag("inplace", false);
  problem.refuse_unknown();

  const RopeConfig c = choose_rope(p);
  py::dict d;
  d["vector_elems"] = c.vector_elems;
  d["heads_a_thread"] = c.heads_a_thread;
  d["threads_a_token"] = c.threads_a_token;
  d["tokens_a_block"] = c.tokens_a_block;
  d["threads"] = c.threads;
  d["blocks"] = c.blocks * c.parts;
  d["why"] = c.why;
  return d;
}

const RegisterPlanner registered("rope", &plan);

}  // namespace
}  // namespace warpsmith::host
