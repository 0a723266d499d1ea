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
  pybind11::dict d;
  d["vector_elems"] = c.vector_elems;
  d["threads"] = kImageThreads;
  d["blocks"] = c.blocks;
  d["whole"] = c.whole;
  d["why"] = c.whole ? "a vector of 16 bytes of the result a thread, four of them in flight"
                     : "the elements of a sample are no multiple of 8: byte by byte";
  return d;
}

const RegisterPlanner registered[] = {{"normalize_image", plan}};

WARPSMITH_REGISTER_ROWS(image, IMAGE);

}  // namespace
}  // namespace warpsmith::host
