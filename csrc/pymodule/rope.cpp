#include "kernels/rope/rope_config.h"
#include "kernels/rope/rope_ops.h"
#include "pymodule/problem.h"

namespace py = pybind11;

namespace warpsmith::host {
namespace {

RopeProblem read_problem(Problem& problem) {
  RopeProblem p;
  p.tokens = problem.integer("tokens", 1);
  p.q_heads = problem.integer("q_heads", 0);
  p.k_heads = problem.integer("k_heads", 0, 0);
  p.head_dim = problem.integer("head_dim", 1);
  p.rotary_dim = problem.integer("rotary_dim", 0, p.head_dim / 2 * 2);
  p.element_bytes = problem.dtype_bytes("dtype", "bfloat16");
  p.aligned = problem.flag("aligned", true);
  return p;
}

py::dict plan_rope(const py::kwargs& given) {
  Problem problem("rope", given);
  RopeProblem p = read_problem(problem);
  p.inplace = problem.flag("inplace", false);
  problem.refuse_unknown();

  const RopeConfig c = choose_rope(p);
  return py::dict("vector_elems"_a = c.vector_elems, "heads_a_thread"_a = c.heads_a_thread,
                  "threads"_a = py::make_tuple(c.threads_x, c.threads_y, c.threads_z),
                  "blocks"_a = py::make_tuple(c.blocks_x, c.blocks_y, c.blocks_z), "why"_a = c.why);
}

py::dict describe(const QkNormRopeConfig& c) {
  return py::dict("kernel"_a = name(c.kernel), "vector_elems"_a = c.vector_elems, "threads_a_head"_a = c.lanes,
                  "known_threads_a_head"_a = c.known_lanes > 0, "heads_a_thread"_a = c.heads_a_thread,
                  "threads_a_token"_a = c.threads_a_token, "tokens_a_block"_a = c.tokens_a_block,
                  "threads"_a = c.threads, "blocks"_a = c.blocks * c.parts, "stages"_a = c.stages,
                  "shared_bytes"_a = c.shared_bytes, "why"_a = c.why);
}

py::dict plan_qk_norm_rope(const py::kwargs& given) {
  Problem problem("qk_norm_rope", given);
  RopeProblem p = read_problem(problem);
  p.interleaved = problem.flag("interleaved", false);
  p.own_weights = problem.dtype_bytes("weight_dtype", problem.text("dtype", "bfloat16")) == p.element_bytes;
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

const RegisterPlanner registered[] = {{"rope", plan_rope}, {"qk_norm_rope", plan_qk_norm_rope}};

WARPSMITH_REGISTER_ROWS(rope, ROPE);

}  // namespace
}  // namespace warpsmith::host
