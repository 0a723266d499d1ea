#include "host/problem.h"
#include "kernels/optim/adamw_config.h"

namespace py = pybind11;

namespace warpsmith::host {
namespace {

py::dict plan(const py::kwargs& given) {
  Problem problem("adamw", given);
  const int64_t total_elems = problem.integer("total_elems", 0);
  const auto multiprocessors = static_cast<int>(problem.integer("multiprocessors", 1, 132));
  problem.refuse_unknown();

  const AdamWConfig c = choose_adamw(total_elems, multiprocessors);
  py::dict d;
  d["threads"] = c.threads;
  d["vectors_a_thread"] = c.vectors;
  d["chunk_elems"] = c.chunk_elems;
  d["why"] = c.why;
  return d;
}

const RegisterPlanner registered("adamw", &plan);

}  // namespace
}  // namespace warpsmith::host
