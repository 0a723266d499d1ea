#pragma once
#include <string>

#include "host/problem.h"
#include "kernels/activation/biased_config.h"

namespace warpsmith::host {

inline pybind11::dict describe(const BiasedConfig& c) {
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

// The planner of ops that run on the biased body (kernels/activation/biased.cuh).
inline pybind11::dict plan_biased_of(const char* op, const pybind11::kwargs& given) {
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

}  // namespace warpsmith::host
