#include <string>

#include "host/norm_plan.h"
#include "host/problem.h"
#include "kernels/norm/rms_norm_config.h"

namespace py = pybind11;

namespace warpsmith::host {
namespace {

py::dict describe(const RmsNormConfig& c) {
  py::dict d;
  d["kernel"] = name(c.kernel);
  d["threads_a_row"] = c.lanes;
  d["threads"] = c.threads;
  d["blocks"] = c.blocks;
  d["vector_elems"] = c.vector_elems;
  d["vectors_a_thread"] = c.vectors;
  d["stages"] = c.stages;
  d["shared_bytes"] = c.shared_bytes;
  d["why"] = c.why;
  return d;
}

py::dict plan(const py::kwargs& given) {
  Problem problem("rms_norm", given);
  RmsNormProblem p;
  p.rows = problem.integer("rows", 1);
  p.columns = problem.integer("columns", 1);
  p.element_bytes = problem.dtype_bytes("dtype", "bfloat16");
  p.aligned = problem.flag("aligned", true);
  p.multiprocessors = static_cast<int>(problem.integer("multiprocessors", 1, 132));
  p.max_shared_bytes = static_cast<int>(problem.integer("max_shared_bytes", 0, 227 * 1024));
  NormProblem forward;
  forward.rows = p.rows, forward.columns = p.columns, forward.element_bytes = p.element_bytes;
  forward.aligned = p.aligned, forward.multiprocessors = p.multiprocessors;
  forward.max_shared_bytes = p.max_shared_bytes, forward.clusters = problem.flag("clusters", true);
  forward.affine_as_x = problem.flag("affine_as_x", true);
  problem.refuse_unknown();

  const RmsNormConfig backward = choose_rms_norm_backward(p);
  py::dict d;
  d["forward"] = host::describe(choose_norm_forward(forward));
  d["backward"] = describe(backward);
  d["partial_rows"] = rms_norm_partial_rows(backward);
  return d;
}

const RegisterPlanner registered("rms_norm", &plan);

}  // namespace
}  // namespace warpsmith::host
