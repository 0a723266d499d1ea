#include "kernels/max_pool/max_pool_config.h"
#include "kernels/max_pool/max_pool_ops.h"
#include "pymodule/problem.h"

namespace warpsmith::host {
namespace {

pybind11::dict plan(const pybind11::kwargs& given) {
  Problem problem("max_pool2d", given);
  MaxPoolProblem p;
  p.samples = problem.integer("samples", 1);
  p.channels = problem.integer("channels", 1);
  p.height = problem.integer("height", 1);
  p.width = problem.integer("width", 1);
  p.out_height = problem.integer("out_height", 1);
  p.out_width = problem.integer("out_width", 1);
  for (int i = 0; i < 2; ++i) {
    p.kernel[i] = static_cast<int>(problem.integer("kernel_size", 1, 3));
    p.stride[i] = static_cast<int>(problem.integer("stride", 1, 2));
    p.padding[i] = static_cast<int>(problem.integer("padding", 0, 1));
  }
  p.element_bytes = problem.dtype_bytes("dtype", "bfloat16");
  problem.refuse_unknown();

  const MaxPoolConfig c = choose_max_pool(p);
  const auto describe = [&](bool backward, int pixels) {
    return pybind11::dict("blocks"_a = c.blocks(p, backward), "pixels_a_thread"_a = pixels);
  };
  return pybind11::dict("vector_elems"_a = c.vector_elems, "threads"_a = kMaxPoolThreads,
                        "forward"_a = describe(false, c.square ? kMaxPoolRows : 1),
                        "backward"_a = describe(true, c.square ? 4 : 1),
                        "why"_a = c.square ? "3 x 3 or 2 x 2 at stride 2: windows share what a thread reads"
                                           : "any window: a pixel a thread");
}

const RegisterPlanner registered[] = {{"max_pool2d", plan}};

WARPSMITH_REGISTER_ROWS(max_pool, MAX_POOL);

}  // namespace
}  // namespace warpsmith::host
