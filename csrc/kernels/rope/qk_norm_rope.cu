#include "common/instances.h"
#include "common/visit_dtype.h"
#include "device/launch.h"
#include "kernels/rope/qk_norm_backward.cuh"
#include "kernels/rope/qk_norm_forward.cuh"
#include "kernels/rope/rope_config.h"

namespace warpsmith {
namespace {

LaunchConfig grid_of(const QkNormRopeConfig& c) {
  return {.grid = dim3(static_cast<unsigned>(c.blocks), static_cast<unsigned>(c.parts)),
          .block = static_cast<unsigned>(c.threads),
          .dynamic_shared_bytes = static_cast<size_t>(c.shared_bytes)};
}

template <class Params> Status problem_of(const Params& p, bool aligned, RopeProblem* out) {
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
          /*inplace=*/false,
          p.shape.interleaved,
          p.weight_dtype == p.dtype,
          device.multiprocessors,
          device.max_dynamic_shared_bytes};
  return {};
}

Status problem_of(const QkNormRopeFwdParams& p, RopeProblem* out) {
  const bool outputs =
      heads_on_16_bytes(p.q_out, p.q_out_layout, p.dtype) && heads_on_16_bytes(p.k_out, p.k_out_layout, p.dtype);
  return problem_of(p, outputs, out);
}

Status problem_of(const QkNormRopeBwdParams& p, RopeProblem* out) {
  const bool gradients = heads_on_16_bytes(p.dq_out, p.dq_out_layout, p.dtype) &&
                         heads_on_16_bytes(p.dk_out, p.dk_out_layout, p.dtype) &&
                         (!p.dq || heads_on_16_bytes(p.dq, p.dq_layout, p.dtype)) &&
                         (!p.dk || heads_on_16_bytes(p.dk, p.dk_layout, p.dtype));
  return problem_of(p, gradients, out);
}

Status no_kernel(const char* direction, const QkNormRopeConfig& c) {
  return Status::unsupported(std::string("no ") + direction + " kernel " + name(c.kernel) + " with " +
                             std::to_string(c.heads_a_thread) + " heads a thread and " + std::to_string(c.stages) +
                             " stages");
}

template <class T, class C>
Status launch_forward(const QkNormRopeFwdParams& p, const QkNormRopeConfig& c, void* stream) {
  using namespace qk_norm_rope;
  if (c.blocks > 0x7fffffff || c.parts > 0xffff)
    return Status::unsupported(std::to_string(c.blocks) + " x " + std::to_string(c.parts) +
                               " blocks are more than a grid may have");
  if (c.kernel == QkNormRopeKernel::looped) return launch(forward_looped<T, C>, grid_of(c), stream, p, c);
  const auto kernel = instance_of<kQkNormRopeForward>(
      [&](const QkNormRopeInstance& i) { return i.matches(c, p.shape.interleaved, c.heads_a_thread, sizeof(T)); },
      [&]<class I>() { return &forward_registers<T, C, I>; });
  if (!kernel || c.kernel != QkNormRopeKernel::registers) return no_kernel("forward", c);
  return launch(kernel, grid_of(c), stream, p, c, static_cast<float>(p.eps),
                1.f / static_cast<float>(p.shape.head_dim));
}

template <class T, class C>
Status launch_backward(const QkNormRopeBwdParams& p, const QkNormRopeConfig& c, void* stream) {
  using namespace qk_norm_rope;
  if (c.kernel == QkNormRopeKernel::looped) {
    WARPSMITH_RETURN_IF_FAILED(launch(backward_looped<T, C>, grid_of(c), stream, p, c));
  } else {
    const auto kernel = instance_of<kQkNormRopeBackward>(
        [&](const QkNormRopeInstance& i) { return i.matches(c, p.shape.interleaved, c.stages, sizeof(T)); },
        [&]<class I>() { return &backward_ring<T, C, I>; });
    if (!kernel || c.kernel != QkNormRopeKernel::ring || c.heads_a_thread % c.stages != 0)
      return no_kernel("backward", c);
    WARPSMITH_RETURN_IF_FAILED(launch(kernel, grid_of(c), stream, p, c, static_cast<float>(p.eps),
                                      1.f / static_cast<float>(p.shape.head_dim)));
  }
  if (!p.partials) return {};
  const int64_t partial_rows = qk_norm_rope_partial_rows(c);
  LaunchConfig sum{.grid = static_cast<unsigned>(ceil_div(p.shape.head_dim, kSumThreads / 32)),  // two columns a warp
                   .block = kSumThreads};
  WARPSMITH_RETURN_IF_FAILED(allow_overlap(&sum));
  return launch(sum_partials<T>, sum, stream, p, partial_rows);
}

}  // namespace

Status qk_norm_rope_forward_cuda(const QkNormRopeFwdParams& p, void* stream) {
  RopeProblem problem;
  WARPSMITH_RETURN_IF_FAILED(problem_of(p, &problem));
  return qk_norm_rope_forward_cuda_with(choose_qk_norm_rope_forward(problem), p, stream);
}

Status qk_norm_rope_forward_cuda_with(const QkNormRopeConfig& c, const QkNormRopeFwdParams& p, void* stream) {
  return visit_cuda_dtypes(p.dtype, p.angles.dtype,
                           [&]<class T, class C>() { return launch_forward<T, C>(p, c, stream); });
}

Status qk_norm_rope_partial_rows_cuda(const QkNormRopeBwdParams& p, int64_t* partial_rows) {
  RopeProblem problem;
  WARPSMITH_RETURN_IF_FAILED(problem_of(p, &problem));
  *partial_rows = qk_norm_rope_partial_rows(choose_qk_norm_rope_backward(problem));
  return {};
}

Status qk_norm_rope_backward_cuda(const QkNormRopeBwdParams& p, void* stream) {
  RopeProblem problem;
  WARPSMITH_RETURN_IF_FAILED(problem_of(p, &problem));
  return qk_norm_rope_backward_cuda_with(choose_qk_norm_rope_backward(problem), p, stream);
}

Status qk_norm_rope_backward_cuda_with(const QkNormRopeConfig& c, const QkNormRopeBwdParams& p, void* stream) {
  return visit_cuda_dtypes(p.dtype, p.angles.dtype,
                           [&]<class T, class C>() { return launch_backward<T, C>(p, c, stream); });
}

}  // namespace warpsmith
