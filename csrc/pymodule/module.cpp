#include <pybind11/pybind11.h>

#include <string>

#include "pymodule/bindings.h"
#include "pymodule/problem.h"

namespace py = pybind11;

namespace {

py::dict build() {
  const std::string cuda = WARPSMITH_CUDA_COMPILER;
  py::dict facts;
  facts["version"] = WARPSMITH_VERSION;
  facts["host_compiler"] = WARPSMITH_HOST_COMPILER;
  facts["cuda"] = !cuda.empty();
  facts["cuda_compiler"] = cuda.empty() ? py::object(py::none()) : py::object(py::str(cuda));
  facts["cuda_architectures"] = py::str(WARPSMITH_CUDA_ARCHITECTURES).attr("split")();
  return facts;
}

py::dict plan(const std::string& op, const py::kwargs& problem) {
  const auto found = warpsmith::host::planners().find(op);
  if (found == warpsmith::host::planners().end()) {
    std::string known;
    for (const auto& [name, planner] : warpsmith::host::planners()) known += (known.empty() ? "" : ", ") + name;
    throw py::value_error("plan: op: expected one of " + known + ", got " + op);
  }
  try {
    return found->second(problem);
  } catch (const warpsmith::host::Keys& listed) {
    py::dict d;
    d["keys"] = listed.keys;
    return d;
  }
}

// In the order of registration: a body's rows stand together, in the order of its list.
py::list ops() {
  py::list rows;
  for (const auto& row : warpsmith::host::op_rows())
    rows.append(py::make_tuple(row.name, row.family, row.body,
                               py::tuple(py::str(row.arguments).attr("replace")(",", " ").attr("split")())));
  return rows;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "What the build holds and which kernel would run; knows nothing of torch.";
  m.def("build", &build, "Facts about this build: version, compilers, CUDA architectures.");
  m.def("ops", &ops, "The rows of the families' lists of ops: (name, family, body, arguments).");
  m.def("plan", &plan, py::arg("op"),
        "The configuration an op's kernel would run with for a problem, as plain values.");
  for (const auto bind : warpsmith::host::binders()) bind(m);
}
