#include "common/instances.h"
#include "common/visit_dtype.h"
#include "device/launch.h"
#include "kernels/rope/rope_config.h"
#include "kernels/rope/rotate_heads.cuh"

namespace warpsmith {
namespace {

RopeProblem problem_of(const RopeParams& p) {
  const bool aligned = heads_on_16_bytes(p.q, p.q_in_layout, p.dtype) &&
                       heads_on_16_bytes(p.k, p.k_in_layout, p.dtype) &&
                       heads_on_16_bytes(p.q_out, p.q_out_layout, p.dtype) &&
                       heads_on_16_bytes(p.k_out, p.k_out_layout, p.dtype) && angles_on_16_bytes(p.angles);
  return {p.shape.batch * p.shape.tokens,
          p.q_in_layout.heads,
          p.k_in_layout.heads,
          p.shape.head_dim,
          p.shape.rotary_dim,
          size_bytes(p.dtype),
          aligned,
          p.inplace};
}

template <class T, class C> Status launch_rope(const RopeParams& p, const RopeConfig& c, void* stream) {
  const auto kernel =
      instance_of<kRopeInstances>([&](const RopeInstance& i) { return i.matches(c, p.shape.interleaved); },
                                  [&]<class I>() { return &rope::rotate_heads<T, C, I>; });
  if (!kernel)
    return Status::unsupported("no kernel with " + std::to_string(c.heads_a_thread) +
                               " heads a thread and vectors of " + std::to_string(c.vector_elems));
  if (c.blocks_x > 0x7fffffff || c.blocks_y > 0xffff || c.blocks_z > 0xffff)
    return Status::unsupported(std::to_string(c.blocks_x) + " x " + std::to_string(c.blocks_y) + " x " +
                               std::to_string(c.blocks_z) + " blocks are more than a grid may have");
  LaunchConfig launch_config;
  launch_config.grid =
      dim3(static_cast<unsigned>(c.blocks_x), static_cast<unsigned>(c.blocks_y), static_cast<unsigned>(c.blocks_z));
  launch_config.block =
      dim3(static_cast<unsigned>(c.threads_x), static_cast<unsigned>(c.threads_y), static_cast<unsigned>(c.threads_z));
  return launch(kernel, launch_config, stream, p, c);
}

}  // namespace

Status rope_cuda(const RopeParams& p, void* stream) { return rope_cuda_with(choose_rope(problem_of(p)), p, stream); }

Status rope_cuda_with(const RopeConfig& c, const RopeParams& p, void* stream) {
  return visit_cuda_dtypes(p.dtype, p.angles.dtype,
                           [&]<class T, class C>() { return launch_rope<T, C>(p, c, stream); });
}

}  // namespace warpsmith
