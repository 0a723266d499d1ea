#include <string>

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
  pybind11::dict d;
  d["flat"] = c.flat;
  d["vector_elems"] = c.vector_elems;
  d["threads"] = c.threads;
  d["vectors"] = c.vectors;
  d["blocks"] = c.blocks;
  d["why"] = c.why;
  return d;
}

pybind11::dict describe(const BiasedConfig& c) {
  pybind11::dict d;
  d["vector_elems"] = c.vector_elems;
  d["width"] = c.width;
  d["threads"] = c.threads;
  d["tiles"] = c.tiles;
  d["row_blocks"] = c.row_blocks;
  d["blocks"] = c.blocks();
  d["why"] = c.why;
  return d;
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
