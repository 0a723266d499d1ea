#include "kernels/linear/linear_config.h"
#include "kernels/linear/linear_ops.h"
#include "pymodule/bindings.h"
#include "pymodule/problem.h"

namespace py = pybind11;

namespace warpsmith::host {
namespace {

py::dict plan(const char* op, const py::kwargs& given) {
  Problem problem(op, given);
  LinearProblem p;
  p.rows = problem.integer("rows", 0);
  p.in_features = problem.integer("in_features", 0);
  p.out_features = problem.integer("out_features", 0);
  p.activation = static_cast<LinearActivation>(problem.one_of("activation", kLinearActivations));
  problem.dtype_bytes("dtype", "bfloat16");
  p.bfloat16 = problem.text("dtype", "bfloat16") == "bfloat16";
  p.derivative = problem.flag("derivative", false);
  p.residual = problem.flag("residual", false);
  p.aligned = problem.flag("aligned", true);
  p.library = problem.flag("library", true);
  p.code_capability = static_cast<int>(problem.integer("code_capability", 80, 90));
  problem.refuse_unknown();

  const LinearPlan found = choose_linear(p);
  py::dict d;
  d["path"] = found.epilogue ? "cublas_lt" : "torch";
  d["why"] = found.why;
  return d;
}

#define WARPSMITH_ROW(op) {#op, [](const py::kwargs& given) { return plan(#op, given); }},
const RegisterPlanner registered[] = {WARPSMITH_LINEAR_OPS(WARPSMITH_ROW)};
#undef WARPSMITH_ROW

const RegisterBinder names([](py::module_& m) {
  py::list all;
  for (const char* name : kLinearActivations) all.append(name);
  m.attr("LINEAR_ACTIVATIONS") = py::tuple(all);
});

WARPSMITH_REGISTER_ROWS(linear, LINEAR);

}  // namespace
}  // namespace warpsmith::host
