#include "kernels/norm/norm.h"
#include "kernels/norm/backward_config.h"
#include "kernels/norm/forward_config.h"
#include "pymodule/problem.h"

namespace warpsmith::host {
namespace {

pybind11::dict describe(const NormConfig& c) {
  return pybind11::dict("kernel"_a = name(c.kernel), "scope"_a = name(c.scope), "threads_a_row"_a = c.lanes * c.cluster,
                        "threads"_a = c.threads, "cluster"_a = c.cluster, "blocks"_a = c.blocks,
                        "vector_elems"_a = c.vector_elems, "vectors_a_thread"_a = c.vectors, "rows_together"_a = c.rows,
                        "stages"_a = c.stages, "shared_bytes"_a = c.shared_bytes, "why"_a = c.why);
}

pybind11::dict plan(Norm op, const pybind11::kwargs& given) {
  Problem problem(name(op), given);
  const NormRow row = row_of(op);
  NormProblem p;
  p.rows = problem.integer("rows", 1);
  p.columns = problem.integer("columns", 1);
  p.element_bytes = problem.dtype_bytes("dtype", "bfloat16");
  if (row.residual)
    p.residual_bytes = problem.dtype_bytes("residual_dtype", p.element_bytes == 4 ? "float32" : "bfloat16");
  p.layer = row.layer, p.dropout = row.dropout;
  p.aligned = problem.flag("aligned", true);
  p.multiprocessors = static_cast<int>(problem.integer("multiprocessors", 1, 132));
  p.max_shared_bytes = static_cast<int>(problem.integer("max_shared_bytes", 0, 227 * 1024));
  p.code_capability = static_cast<int>(problem.integer("code_capability", 80, 90));
  p.affine_as_x = problem.flag("affine_as_x", true);
  problem.refuse_unknown();

  const NormConfig backward = choose_norm_backward(p);
  pybind11::dict d;
  d["forward"] = describe(choose_norm_forward(p));
  d["backward"] = describe(backward);
  d["partial_rows"] = norm_partial_rows(backward);
  return d;
}

#define WARPSMITH_ROW(op, ...) {#op, [](const pybind11::kwargs& given) { return plan(Norm::op, given); }},
const RegisterPlanner registered[] = {WARPSMITH_NORM_OPS(WARPSMITH_ROW)};

WARPSMITH_REGISTER_ROWS(norm, NORM);

}  // namespace
}  // namespace warpsmith::host
