#include "kernels/linear_loss/linear_loss.h"
#include "kernels/linear_loss/linear_loss_config.h"
#include "kernels/linear_loss/linear_loss_ops.h"
#include "pymodule/problem.h"

namespace py = pybind11;

namespace warpsmith::host {
namespace {

// with_memory: whether the caller may say how much memory the op may take.
py::dict plan(const char* op, bool with_memory, const py::kwargs& given) {
  Problem problem(op, given);
  LinearLossProblem p;
  p.rows = problem.integer("rows", 0);
  p.classes = problem.integer("classes", 1);
  p.element_bytes = problem.dtype_bytes("dtype", "bfloat16");
  p.max_chunk_bytes = problem.integer("max_chunk_bytes", 1, 0);
  p.cuda = problem.flag("cuda", true);
  if (with_memory) {
    p.hidden_size = problem.integer("hidden_size", 0, 0);
    p.max_bytes = problem.integer("max_bytes", 1, 0);
    p.float16 = problem.text("dtype", "bfloat16") == "float16";
  }
  problem.refuse_unknown();

  LinearLossBudget budget;
  budget.chunks = choose_linear_loss_chunks(p);
  budget.float32_sums = budget.chunks.chunks > 1 || p.float16;
  budget.peak_bytes = linear_loss_peak_bytes(p, budget.chunks, budget.float32_sums);
  budget.fits = true;
  budget.why = budget.chunks.why;
  if (p.max_bytes > 0) budget = choose_linear_loss_budget(p);
  const LinearLossChunks& c = budget.chunks;
  py::dict d;
  d["chunk_rows"] = c.chunk_rows;
  d["chunks"] = c.chunks;
  d["logits_bytes"] = c.logits_bytes;
  d["why"] = budget.why;
  if (p.hidden_size == 0) return d;
  d["dw_dtype"] = budget.float32_sums ? "float32" : problem.text("dtype", "bfloat16");
  d["peak_bytes"] = budget.peak_bytes;
  d["fits"] = budget.fits;
  return d;
}

const RegisterPlanner registered[] = {
    {"linear_cross_entropy", [](const py::kwargs& given) { return plan("linear_cross_entropy", true, given); }},
    {"linear_log_prob", [](const py::kwargs& given) { return plan("linear_log_prob", false, given); }}};

WARPSMITH_REGISTER_ROWS(linear_loss, LINEAR_LOSS);

}  // namespace
}  // namespace warpsmith::host
