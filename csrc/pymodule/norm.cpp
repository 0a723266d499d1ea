#include <string>

#include "kernels/norm/backward_config.h"
#include "kernels/norm/forward_config.h"
#include "kernels/norm/norm.h"
#include "pymodule/problem.h"

namespace warpsmith::host {
namespace {

pybind11::dict describe(const NormConfig& c) {
  pybind11::dict d;
  d["kernel"] = name(c.kernel);
  d["scope"] = name(c.scope);
  d["threads_a_row"] = c.lanes * c.cluster;
  d["threads"] = c.threads;
  d["cluster"] = c.cluster;
  d["blocks"] = c.blocks;
  d["vector_elems"] = c.vector_elems;
  d["vectors_a_thread"] = c.vectors;
  d["rows_together"] = c.rows;
  d["stages"] = c.stages;
  d["shared_bytes"] = c.shared_bytes;
  d["why"] = c.why;
  return d;
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
