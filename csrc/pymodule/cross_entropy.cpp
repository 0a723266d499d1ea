#include "kernels/cross_entropy/cross_entropy_config.h"
#include "kernels/cross_entropy/cross_entropy_ops.h"
#include "pymodule/bindings.h"
#include "pymodule/problem.h"

namespace py = pybind11;

namespace warpsmith::host {
namespace {

py::dict describe(const CrossEntropyConfig& c) {
  return py::dict("kernel"_a = name(c.kernel), "cluster"_a = c.cluster, "threads_a_row"_a = c.lanes * c.cluster,
                  "threads"_a = c.threads, "blocks"_a = c.blocks, "vectors_of_a_thread"_a = c.slots,
                  "bulk_copies"_a = c.bulk, "shared_bytes"_a = c.shared_bytes, "why"_a = c.why);
}

py::dict plan(const py::kwargs& given) {
  Problem problem("cross_entropy", given);
  CrossEntropyProblem p;
  p.rows = problem.integer("rows", 1);
  p.classes = problem.integer("classes", 1);
  p.element_bytes = problem.dtype_bytes("dtype", "bfloat16");
  p.aligned = problem.flag("aligned", true);
  p.gradient = problem.flag("gradient", true);
  p.loss = problem.flag("loss", true);
  p.multiprocessors = static_cast<int>(problem.integer("multiprocessors", 1, 132));
  p.code_capability = static_cast<int>(problem.integer("code_capability", 80, 90));
  p.max_shared_bytes = static_cast<int>(problem.integer("max_shared_bytes", 0, 227 * 1024));
  problem.refuse_unknown();

  py::dict d;
  d["forward"] = describe(choose_cross_entropy_forward(p));
  d["backward"] = describe(choose_cross_entropy_backward(p));
  return d;
}

const RegisterPlanner registered("cross_entropy", plan);

#define WARPSMITH_ROW(name) numbers[#name] = number++;
const RegisterBinder reductions([](py::module_& m) {
  py::dict numbers;
  int64_t number = 0;
  WARPSMITH_REDUCTIONS(WARPSMITH_ROW)
  m.attr("REDUCTIONS") = numbers;
});
#undef WARPSMITH_ROW

WARPSMITH_REGISTER_ROWS(cross_entropy, CROSS_ENTROPY);

}  // namespace
}  // namespace warpsmith::host
