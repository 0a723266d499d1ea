#include "kernels/image/image_config.h"
#include "kernels/image/image_ops.h"
#include "pymodule/problem.h"

namespace warpsmith::host {
namespace {

pybind11::dict plan(const pybind11::kwargs& given) {
  Problem problem("normalize_image", given);
  ImageProblem p;
  p.samples = problem.integer("samples", 1);
  p.elems = 3 * problem.integer("height", 1);
  p.elems *= problem.integer("width", 1);
  p.element_bytes = problem.dtype_bytes("dtype", "float16");
  problem.refuse_unknown();

  const ImageConfig c = choose_image(p);
  return pybind11::dict("vector_elems"_a = c.vector_elems, "threads"_a = kImageThreads, "blocks"_a = c.blocks,
                        "whole"_a = c.whole,
                        "why"_a = c.whole ? "a vector of 16 bytes of the result a thread, four of them in flight"
                                          : "the elements of a sample are no multiple of 8: byte by byte");
}

const RegisterPlanner registered[] = {{"normalize_image", plan}};

WARPSMITH_REGISTER_ROWS(image, IMAGE);

}  // namespace
}  // namespace warpsmith::host
