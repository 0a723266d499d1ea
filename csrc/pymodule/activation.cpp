#include "kernels/activation/activation_config.h"
#include "kernels/activation/activation_ops.h"
#include "pymodule/problem.h"

namespace warpsmith::host {
namespace {

pybind11::dict plan_elementwise(const char* op, const pybind11::kwargs& given) {
  Problem problem(op, given);
  ElementwiseProblem p;
  p.rows = problem.integer("rows", 1);
  p.columns = problem.integer("columns", 1);
  p.element_bytes = problem.dtype_bytes("dtype", "bfloat16");
  p.contiguous = problem.flag("contiguous", true);
  p.aligned = problem.flag("aligned", true);
  problem.refuse_unknown();

  const ElementwiseConfig c = choose_elementwise(p);
  return pybind11::dict("flat"_a = c.flat, "vector_elems"_a = c.vector_elems, "threads"_a = c.threads,
                        "vectors"_a = c.vectors, "blocks"_a = c.blocks, "why"_a = c.why);
}

pybind11::dict describe(const BiasedConfig& c) {
  return pybind11::dict("vector_elems"_a = c.vector_elems, "width"_a = c.width, "threads"_a = c.threads,
                        "tiles"_a = c.tiles, "row_blocks"_a = c.row_blocks, "blocks"_a = c.blocks(), "why"_a = c.why);
}

pybind11::dict plan_biased(const char* op, const pybind11::kwargs& given) {
  Problem problem(op, given);
  BiasedProblem p;
  p.rows = problem.integer("rows", 1);
  p.columns = problem.integer("columns", 1);
  p.element_bytes = problem.dtype_bytes("dtype", "bfloat16");
  p.aligned = problem.flag("aligned", true);
  p.multiprocessors = static_cast<int>(problem.integer("multiprocessors", 1, 132));
  problem.refuse_unknown();

  pybind11::dict d;
  d["forward"] = describe(choose_biased_forward(p));
  d["backward"] = describe(choose_biased_backward(p));
  return d;
}

#define WARPSMITH_ELEMENTWISE(op, ...) \
  {#op, [](const pybind11::kwargs& given) { return plan_elementwise(#op, given); }},
#define WARPSMITH_BIASED(op, ...) {#op, [](const pybind11::kwargs& given) { return plan_biased(#op, given); }},
const RegisterPlanner registered[] = {WARPSMITH_GATED_OPS(WARPSMITH_ELEMENTWISE) WARPSMITH_UNARY_OPS(
    WARPSMITH_ELEMENTWISE) WARPSMITH_DROPOUT_OPS(WARPSMITH_ELEMENTWISE) WARPSMITH_BIASED_OPS(WARPSMITH_BIASED)};

WARPSMITH_REGISTER_ROWS(activation, GATED);
WARPSMITH_REGISTER_ROWS(activation, BIASED);
WARPSMITH_REGISTER_ROWS(activation, UNARY);
WARPSMITH_REGISTER_ROWS(activation, DROPOUT);

}  // namespace
}  // namespace warpsmith::host
