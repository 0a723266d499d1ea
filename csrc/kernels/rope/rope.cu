#include "common/launch.h"
#include "kernels/rope/rope_config.h"
#include "kernels/rope/rope_kernel.cuh"

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

template <class T, class C, int U> void (*vector_kernel(bool interleaved))(RopeParams, RopeConfig) {
  constexpr int N = 16 / sizeof(T), B = rope_blocks(U);
  return interleaved ? rope::rotate_heads<T, C, N, true, U, B> : rope::rotate_heads<T, C, N, false, U, B>;
}

template <class T, class C> Status launch_rope(const RopeParams& p, const RopeConfig& c, void* stream) {
  if (!rope_has_kernel(c.heads_a_thread, c.vector_elems))
    return Status::unsupported("no kernel with " + std::to_string(c.heads_a_thread) +
                               " heads a thread and vectors of " + std::to_string(c.vector_elems));
  if (c.blocks_x > 0x7fffffff || c.blocks_y > 0xffff || c.blocks_z > 0xffff)
    return Status::unsupported(std::to_string(c.blocks_x) + " x " + std::to_string(c.blocks_y) + " x " +
                               std::to_string(c.blocks_z) + " blocks are more than a grid may have");
  const auto kernel = c.vector_elems == 1     ? rope::rotate_heads<T, C, 1, false, 2, rope_blocks(2)>
                      : c.heads_a_thread == 1 ? vector_kernel<T, C, 1>(p.shape.interleaved)
                      : c.heads_a_thread == 2 ? vector_kernel<T, C, 2>(p.shape.interleaved)
                                              : vector_kernel<T, C, 4>(p.shape.interleaved);
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
  const bool wide = p.angles.dtype == Dtype::float32;
  switch (p.dtype) {
    case Dtype::float32: return launch_rope<float, float>(p, c, stream);
    case Dtype::float16:
      return wide ? launch_rope<float16, float>(p, c, stream) : launch_rope<float16, float16>(p, c, stream);
    case Dtype::bfloat16:
      return wide ? launch_rope<bfloat16, float>(p, c, stream) : launch_rope<bfloat16, bfloat16>(p, c, stream);
    case Dtype::float64: break;
  }
  return Status::unsupported(std::string("no CUDA kernel for ") + name(p.dtype));
}

}  // namespace warpsmith
