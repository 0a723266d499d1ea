#include "host/problem.h"
#include "kernels/linear_loss/linear_cross_entropy_config.h"

namespace py = pybind11;

namespace warpsmith::host {
namespace {

py::dict plan(const py::kwargs& given) {
  Problem problem("linear_cross_entropy", given);
  LinearLossProblem p;
  p.rows = problem.integer("rows", 0);
  p.classes = problem.integer("classes", 1);
  p.element_bytes = problem.dtype_bytes("dtype", "bfloat16");
  p.max_chunk_bytes = problem.integer("max_chunk_bytes", 1, 0);
  p.cuda = problem.flag("cuda", true);
  problem.refuse_unknown();

  const LinearLossChunks c = choose_linear_loss_chunks(p);
  py::dict d;
  d["chunk_rows"] = c.chunk_rows;
  d["chunks"] = c.chunks;
  d["logits_bytes"] = c.logits_bytes;
  d["why"] = c.why;
  return d;
}

const RegisterPlanner registered("linear_cross_entropy", &plan);

}  // namespace
}  // namespace warpsmith::host
