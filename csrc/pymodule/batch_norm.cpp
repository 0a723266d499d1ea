#include "kernels/batch_norm/batch_norm_config.h"
#include "kernels/batch_norm/batch_norm_ops.h"
#include "pymodule/problem.h"

namespace warpsmith::host {
namespace {

pybind11::dict describe(const BatchNormConfig& c) {
  return pybind11::dict("vector_elems"_a = c.vector_elems, "threads"_a = kBatchNormThreads, "threads_a_row"_a = c.lanes,
                        "rows_a_turn"_a = c.rows_a_turn, "slices"_a = c.slices, "blocks"_a = c.blocks());
}

pybind11::dict plan(const pybind11::kwargs& given) {
  Problem problem("batch_norm", given);
  BatchNormProblem p;
  p.rows = problem.integer("rows", 1);
  p.columns = problem.integer("columns", 1);
  p.element_bytes = problem.dtype_bytes("dtype", "bfloat16");
  p.multiprocessors = static_cast<int>(problem.integer("multiprocessors", 1, 132));
  problem.refuse_unknown();

  return pybind11::dict("statistics"_a = describe(choose_batch_norm(p, BatchNormTogether::statistics)),
                        "normalize"_a = describe(choose_batch_norm(p, BatchNormTogether::normalize)),
                        "sums"_a = describe(choose_batch_norm(p, BatchNormTogether::sums)),
                        "gradients"_a = describe(choose_batch_norm(p, BatchNormTogether::gradients)));
}

const RegisterPlanner registered[] = {{"batch_norm", plan}};

WARPSMITH_REGISTER_ROWS(batch_norm, BATCH_NORM);

}  // namespace
}  // namespace warpsmith::host
