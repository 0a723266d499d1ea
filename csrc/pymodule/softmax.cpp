#include "kernels/softmax/softmax_config.h"
#include "kernels/softmax/softmax_ops.h"
#include "pymodule/problem.h"

namespace warpsmith::host {
namespace {

pybind11::dict describe(const SoftmaxConfig& c) {
  return pybind11::dict("kernel"_a = c.slots ? "resident" : "looped", "cluster"_a = c.cluster,
                        "threads_a_row"_a = c.lanes * c.cluster, "threads"_a = c.threads, "blocks"_a = c.blocks,
                        "vectors_of_a_thread"_a = c.slots, "bulk_copies"_a = c.bulk, "shared_bytes"_a = c.shared_bytes,
                        "why"_a = c.why);
}

pybind11::dict plan(const char* op, const pybind11::kwargs& given) {
  Problem problem(op, given);
  SoftmaxProblem p;
  p.rows = problem.integer("rows", 1);
  p.columns = problem.integer("columns", 1);
  p.element_bytes = problem.dtype_bytes("dtype", "bfloat16");
  p.aligned = problem.flag("aligned", true);
  p.code_capability = static_cast<int>(problem.integer("code_capability", 80, 90));
  p.max_shared_bytes = static_cast<int>(problem.integer("max_shared_bytes", 0, 227 * 1024));
  problem.refuse_unknown();

  pybind11::dict d;
  d["forward"] = describe(choose_softmax(p));
  p.tensors = 2;
  d["backward"] = describe(choose_softmax(p));
  return d;
}

#define WARPSMITH_ROW(op, log) {#op, [](const pybind11::kwargs& given) { return plan(#op, given); }},
const RegisterPlanner registered[] = {WARPSMITH_SOFTMAX_OPS(WARPSMITH_ROW)};
#undef WARPSMITH_ROW

WARPSMITH_REGISTER_ROWS(softmax, SOFTMAX);

}  // namespace
}  // namespace warpsmith::host
