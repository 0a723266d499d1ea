#include "kernels/batch_norm/batch_norm_config.h"
#include "kernels/batch_norm/batch_norm_ops.h"
#include "pymodule/problem.h"

namespace warpsmith::host {
namespace {

pybind11::dict describe(const BatchNormConfig& c) {
  pybind11::dict d;
  d["vector_elems"] = c.vector_elems;
  d["threads"] = kBatchNormThreads;
  d["threads_a_row"] = c.lanes;
  d["rows_a_turn"] = c.rows_a_turn;
  d["slices"] = c.slices;
  d["blocks"] = c.blocks();
  return d;
}

pybind11::dict plan(const pybind11::kwargs& given) {
  Problem problem("batch_norm", given);
  BatchNormProblem p;
  p.rows = problem.integer("rows", 1);
  p.columns = problem.integer("columns", 1);
  p.element_bytes = problem.dtype_bytes("dtype", "bfloat16");
  p.multiprocessors = static_cast<int>(problem.integer("multiprocessors", 1, 132));
  problem.refuse_unknown();

  pybind11::dict d;
  d["statistics"] = describe(choose_batch_norm(p, BatchNormTogether::statistics));
  d["normalize"] = describe(choose_batch_norm(p, BatchNormTogether::normalize));
  d["sums"] = describe(choose_batch_norm(p, BatchNormTogether::sums));
  d["gradients"] = describe(choose_batch_norm(p, BatchNormTogether::gradients));
  return d;
}

const RegisterPlanner registered[] = {{"batch_norm", plan}};

WARPSMITH_REGISTER_ROWS(batch_norm, BATCH_NORM);

}  // namespace
}  // namespace warpsmith::host
