#include "kernels/group_norm/group_norm_config.h"
#include "kernels/group_norm/group_norm_ops.h"
#include "pymodule/problem.h"

namespace warpsmith::host {
namespace {

pybind11::dict describe(const GroupNormProblem& p) {
  const GroupNormConfig c = choose_group_norm(p);
  return pybind11::dict("vector_elems"_a = c.vector_elems, "threads"_a = kGroupNormThreads,
                        "threads_a_pixel"_a = c.lanes, "ranges"_a = c.ranges,
                        "range_channels"_a = c.vectors * c.vector_elems, "tiles"_a = c.tiles, "set"_a = c.set,
                        "blocks"_a = c.blocks(p.samples));
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
