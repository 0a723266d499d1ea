#include "kernels/group_norm/group_norm_config.h"
#include "kernels/group_norm/group_norm_ops.h"
#include "pymodule/problem.h"

namespace warpsmith::host {
namespace {

pybind11::dict describe(const GroupNormProblem& p) {
  const GroupNormConfig c = choose_group_norm(p);
  pybind11::dict d;
  d["vector_elems"] = c.vector_elems;
  d["threads"] = kGroupNormThreads;
  d["threads_a_pixel"] = c.lanes;
  d["ranges"] = c.ranges;
  d["range_channels"] = c.vectors * c.vector_elems;
  d["cluster"] = c.cluster;
  d["blocks"] = p.samples * c.ranges * c.cluster;
  return d;
}

pybind11::dict plan(const pybind11::kwargs& given) {
  Problem problem("group_norm", given);
  GroupNormProblem p;
  p.samples = problem.integer("samples", 1);
  p.pixels = problem.integer("pixels", 1);
  p.channels = problem.integer("channels", 1);
  p.groups = problem.integer("groups", 1);
  if (p.channels % p.groups != 0)
    throw pybind11::value_error("plan: groups: expected a divisor of " + std::to_string(p.channels) +
                                " channels, got " + std::to_string(p.groups));
  p.element_bytes = problem.dtype_bytes("dtype", "bfloat16");
  p.multiprocessors = static_cast<int>(problem.integer("multiprocessors", 1, 132));
  p.clusters = problem.integer("code_capability", 80, 90) >= 90;
  problem.refuse_unknown();

  pybind11::dict d;
  d["forward"] = describe(p);
  p.tensors = 2;
  d["backward"] = describe(p);
  return d;
}

const RegisterPlanner registered[] = {{"group_norm", plan}};

WARPSMITH_REGISTER_ROWS(group_norm, GROUP_NORM);

}  // namespace
}  // namespace warpsmith::host
