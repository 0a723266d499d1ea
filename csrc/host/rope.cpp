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
  d["threads"] = py::make_tuple(c.threads_x, c.threads_y, c.threads_z);
  d["blocks"] = py::make_tuple(c.blocks_x, c.blocks_y, c.blocks_z);
  d["why"] = c.why;
  return d;
}

const RegisterPlanner registered("rope", &plan);

}  // namespace
}  // namespace warpsmith::host
