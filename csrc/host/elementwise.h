#pragma once
#include <string>

#include "host/problem.h"
#include "kernels/activation/elementwise_config.h"

namespace warpsmith::host {

// The planner of ops that run on the elementwise body (kernels/activation/elementwise.cuh).
inline pybind11::dict plan_elementwise_of(const char* op, const pybind11::kwargs& given) {
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

}  // namespace warpsmith::host
