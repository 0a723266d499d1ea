#include "kernels/quantize/quantize_config.h"
#include "kernels/quantize/quantize_ops.h"
#include "pymodule/bindings.h"
#include "pymodule/problem.h"

namespace py = pybind11;

namespace warpsmith::host {
namespace {

constexpr const char* kTransposes[] = {"no", "also", "only"};

py::dict plan_quantize(const py::kwargs& given) {
  Problem problem("quantize_fp8", given);
  QuantizeProblem p;
  p.scaling = Fp8Scaling::row;
  p.rows = problem.integer("rows", 0);
  p.columns = problem.integer("columns", 0);
  p.element_bytes = problem.dtype_bytes("dtype", "bfloat16");
  p.scaling = static_cast<Fp8Scaling>(problem.one_of("scaling", kFp8Scalings));
  const int transpose = problem.one_of("transpose", kTransposes);
  p.data = transpose != 2;
  p.transposed = transpose != 0;
  p.given = problem.flag("given", false);
  p.column_sums = problem.flag("column_sums", false);
  p.contiguous = problem.flag("contiguous", true);
  problem.refuse_unknown();

  const QuantizeConfig c = choose_quantize(p);
  return py::dict("kernel"_a = c.tiles ? "tiles" : "segments", "amax_pass"_a = c.amax_pass,
                  "threads"_a = c.tiles ? tile_threads(p.element_bytes) : kSegmentTeams[c.team].threads,
                  "threads_a_segment"_a = c.tiles ? 0 : kSegmentTeams[c.team].lanes, "segment"_a = c.length,
                  "blocks"_a = c.blocks, "workspace_bytes"_a = 4 * (c.workspace + c.maxima), "why"_a = c.why);
}

py::dict plan_dequantize(const py::kwargs& given) {
  Problem problem("dequantize_fp8", given);
  const int64_t rows = problem.integer("rows", 0), columns = problem.integer("columns", 0);
  const int vector = 16 / problem.dtype_bytes("dtype", "float32");
  problem.refuse_unknown();
  py::dict d;
  d["vector_elems"] = vector;
  d["blocks"] = ceil_div(rows * ceil_div(columns, 32 * vector), 8);
  d["why"] = "a warp for a part of a row, 16 bytes of it a thread";
  return d;
}

const RegisterPlanner registered[] = {{"quantize_fp8", plan_quantize}, {"dequantize_fp8", plan_dequantize}};

const RegisterBinder names([](py::module_& m) {
  py::list all;
  for (const char* name : kFp8Scalings) all.append(name);
  m.attr("FP8_SCALINGS") = py::tuple(all);
});

WARPSMITH_REGISTER_ROWS(quantize, QUANTIZE);

}  // namespace
}  // namespace warpsmith::host
