#include "common/launch.h"
#include "kernels/rope/qk_norm_rope_config.h"
#include "kernels/rope/qk_norm_rope_kernel.cuh"
#include "kernels/rope/qk_norm_rope_kernel_backward.cuh"

namespace warpsmith {
namespace {

LaunchConfig grid_of(const QkNormRopeConfig& c) {
  LaunchConfig launch;
  launch.grid.x = static_cast<unsigned>(c.blocks);
  launch.grid.y = static_cast<unsigned>(c.parts);
  launch.block.x = static_cast<unsigned>(c.threads);
  launch.dynamic_shared_bytes = static_cast<size_t>(c.shared_bytes);
  return launch;
}

template <class Params> Status problem_of(const Params& p, bool aligned, QkNormRopeProblem* out) {
  DeviceProperties device;
  WARPSMITH_RETURN_IF_FAILED(device_properties(device));
  aligned = aligned && heads_on_16_bytes(p.q, p.q_layout, p.dtype) && heads_on_16_bytes(p.k, p.k_layout, p.dtype) &&
            on_16_bytes(p.q_weight) && on_16_bytes(p.k_weight) && angles_on_16_bytes(p.angles);
  *out = {p.shape.batch * p.shape.tokens,
          p.q_layout.heads,
          p.k_layout.heads,
          p.shape.head_dim,
          p.shape.rotary_dim,
          size_bytes(p.dtype),
          aligned,
          device.multiprocessors,
          device.max_dynamic_shared_bytes};
  return {};
}

Status problem_of(const QkNormRopeFwdParams& p, QkNormRopeProblem* out) {
  const bool outputs =
      heads_on_16_bytes(p.q_out, p.q_out_layout, p.dtype) && heads_on_16_bytes(p.k_out, p.k_out_layout, p.dtype);
  return problem_of(p, outputs, out);
}

Status problem_of(const QkNormRopeBwdParams& p, QkNormRopeProblem* out) {
  const bool gradients = heads_on_16_bytes(p.dq_out, p.dq_out_layout, p.dtype) &&
                         heads_on_16_bytes(p.dk_out, p.dk_out_layout, p.dtype) &&
                         (!p.dq || heads_on_16_bytes(p.dq, p.dq_layout, p.dtype)) &&
                         (!p.dk || heads_on_16_bytes(p.dk, p.dk_layout, p.dtype));
  return problem_of(p, gradients, out);
}

// Runs `visit.template operator()<T, C>()` for the storage types of activations and angles.
template <class Visit> Status dispatch(Dtype dtype, Dtype angles_dtype, Visit&& visit) {
  const bool wide = angles_dtype == Dtype::float32;
  switch (dtype) {
    case Dtype::float32: return visit.template operator()<float, float>();
    case Dtype::float16:
      return wide ? visit.template operator()<float16, float>() : visit.template operator()<float16, float16>();
    case Dtype::bfloat16:
      return wide ? visit.template operator()<bfloat16, float>() : visit.template operator()<bfloat16, bfloat16>();
    case Dtype::float64: break;
  }
  return Status::unsupported(std::string("no CUDA kernel for ") + name(dtype));
}

Status no_kernel(const char* direction, const QkNormRopeConfig& c) {
  return Status::unsupported(std::string("no ") + direction + " kernel " + name(c.kernel) + " with " +
                             std::to_string(c.heads_a_thread) + " heads a thread and " + std::to_string(c.stages) +
                             " stages");
}

template <class T> constexpr int kUsual = 128 * sizeof(T) / 32;  // lanes of heads of 128; half of them of 64

template <class T, class C>
Status launch_forward(const QkNormRopeFwdParams& p, const QkNormRopeConfig& c, void* stream) {
  using namespace qk_norm_rope;
  constexpr int U = kQkNormRopeHeadsAThread, kThreads = kQkNormRopeForwardThreads, B = kQkNormRopeForwardBlocks;
  if (c.blocks > 0x7fffffff || c.parts > 0xffff)
    return Status::unsupported(std::to_string(c.blocks) + " x " + std::to_string(c.parts) +
                               " blocks are more than a grid may have");
  if (c.kernel == QkNormRopeKernel::looped) return launch(forward_looped<T, C>, grid_of(c), stream, p, c);
  if (c.kernel != QkNormRopeKernel::registers || c.heads_a_thread != U) return no_kernel("forward", c);
  const bool whole = c.whole && p.weight_dtype == p.dtype;
  const auto kernel = p.shape.interleaved             ? forward_registers<T, C, true, U, 0, kThreads, B>
                      : whole && c.lanes == kUsual<T> ? forward_registers<T, C, false, U, kUsual<T>, kThreads, B>
                      : whole && c.lanes == kUsual<T> / 2
                          ? forward_registers<T, C, false, U, kUsual<T> / 2, kThreads, B>
                          : forward_registers<T, C, false, U, 0, kThreads, B>;
  return launch(kernel, grid_of(c), stream, p, c, static_cast<float>(p.eps),
                1.f / static_cast<float>(p.shape.head_dim));
}

template <class T, class C>
Status launch_backward(const QkNormRopeBwdParams& p, const QkNormRopeConfig& c, void* stream) {
  using namespace qk_norm_rope;
  if (c.kernel == QkNormRopeKernel::looped) {
    WARPSMITH_RETURN_IF_FAILED(launch(backward_looped<T, C>, grid_of(c), stream, p, c));
  } else {
    if (c.kernel != QkNormRopeKernel::ring || c.stages != kQkNormRopeBackwardHeads ||
        c.heads_a_thread % c.stages != 0 || c.threads > kQkNormRopeBackwardThreads)
      return no_kernel("backward", c);
    constexpr int U = kQkNormRopeBackwardHeads, kThreads = kQkNormRopeBackwardThreads, B = kQkNormRopeBackwardBlocks;
    const auto kernel = p.shape.interleaved        ? backward_ring<T, C, true, U, 0, kThreads, B>
                        : c.lanes == kUsual<T>     ? backward_ring<T, C, false, U, kUsual<T>, kThreads, B>
                        : c.lanes == kUsual<T> / 2 ? backward_ring<T, C, false, U, kUsual<T> / 2, kThreads, B>
                                                   : backward_ring<T, C, false, U, 0, kThreads, B>;
    WARPSMITH_RETURN_IF_FAILED(launch(kernel, grid_of(c), stream, p, c, static_cast<float>(p.eps),
                                      1.f / static_cast<float>(p.shape.head_dim)));
  }
  if (!p.partials) return {};
  const int64_t partial_rows = qk_norm_rope_partial_rows(c);
  LaunchConfig sum;
  constexpr int64_t kPairs = kSumThreads / 32;  // of columns, of a block
  sum.grid.x = static_cast<unsigned>((p.shape.head_dim + kPairs - 1) / kPairs);
  sum.block.x = kSumThreads;
  DeviceProperties device;
  WARPSMITH_RETURN_IF_FAILED(device_properties(device));
  sum.programmatic_dependent = device.compute_capability >= 90;
  return launch(sum_partials<T>, sum, stream, p, partial_rows);
}

}  // namespace

Status qk_norm_rope_forward_cuda(const QkNormRopeFwdParams& p, void* stream) {
  QkNormRopeProblem problem;
  WARPSMITH_RETURN_IF_FAILED(problem_of(p, &problem));
  return qk_norm_rope_forward_cuda_with(choose_qk_norm_rope_forward(problem), p, stream);
}

Status qk_norm_rope_forward_cuda_with(const QkNormRopeConfig& c, const QkNormRopeFwdParams& p, void* stream) {
  return dispatch(p.dtype, p.angles.dtype, [&]<class T, class C>() { return launch_forward<T, C>(p, c, stream); });
}

Status qk_norm_rope_partial_rows_cuda(const QkNormRopeBwdParams& p, int64_t* partial_rows) {
  QkNormRopeProblem problem;
  WARPSMITH_RETURN_IF_FAILED(problem_of(p, &problem));
  *partial_rows = qk_norm_rope_partial_rows(choose_qk_norm_rope_backward(problem));
  return {};
}

Status qk_norm_rope_backward_cuda(const QkNormRopeBwdParams& p, void* stream) {
  QkNormRopeProblem problem;
  WARPSMITH_RETURN_IF_FAILED(problem_of(p, &problem));
  return qk_norm_rope_backward_cuda_with(choose_qk_norm_rope_backward(problem), p, stream);
}

Status qk_norm_rope_backward_cuda_with(const QkNormRopeConfig& c, const QkNormRopeBwdParams& p, void* stream) {
  return dispatch(p.dtype, p.angles.dtype, [&]<class T, class C>() { return launch_backward<T, C>(p, c, stream); });
}

}  // namespace warpsmith
